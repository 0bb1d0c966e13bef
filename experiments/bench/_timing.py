"""How benchmarks take time: on which device, by which clock, calls in turn; on a GPU as CUDA graphs."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from analysis.records.store import utc_now
from experiments.bench import Device
from experiments.bench._runner import Record
from experiments.config import code_version
from experiments.worker.cores import cpu_model
from experiments.worker.memory import free_bytes
from experiments.worker.provenance import provenance
from sparsify.core import host_sync

TimedCall = Callable[[], object]
Samples = dict[str, dict[int, float]]  # name -> repetition -> ms
REPEATS = {"cpu": 11, "cuda": 50}
WARM_UP = 3  # calls before a capture: the first allocate, and compile
SHARE = 0.9  # of the free memory that may be used
PUBLIC = (
    "cpu", "cores", "memory_gib", "huge_pages", "gpu", "before", "platform", "versions", "commit", "dirty",
)  # fmt: skip


def device_of(asked: Device | None, threads: int | None = None) -> torch.device:
    """The device that was asked for, or a GPU where there is one; a GPU that is not there is refused."""
    if threads is not None:
        torch.set_num_threads(threads)
    if asked != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if asked == "cuda":
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU here; say --device cpu")
    return torch.device("cpu")


def facts(device: torch.device, threads: int | None = None) -> Record:
    """Facts that records tell of the machine and the code; no host's name."""
    cuda, threads = device.type == "cuda", threads or torch.get_num_threads()
    told = provenance("", "", device)
    return {
        "at": utc_now(),
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else f"{cpu_model()}, {threads} threads",
        "cpu": cpu_model(),
        "threads": threads,
        "torch": torch.__version__,
        **code_version.origin(),
        "provenance": {name: told[name] for name in PUBLIC},
    }


def lacking(needed: float, device: torch.device, besides: float = 0.0) -> str:
    """The reason why so many bytes do not fit into memory, besides others; empty where they do."""
    free = SHARE * free_bytes(device) - besides
    return "" if needed <= free else f"needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage is collected outside of timed steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Milliseconds of each call: on a GPU by events, read at the end of a repetition; else by the host's
    clock, with the CPU time of all threads of this process.

    Args:
        host: on a GPU too by the host's clock, from an idle device until the call returns ("call") or until
            the device is idle again ("wall").
    """

    def __init__(self, device: torch.device, host: Literal["", "call", "wall"] = "") -> None:
        self.device, self.cuda, self.host = device, device.type == "cuda", host
        self.taken: list[tuple[str, Any, float | None]] = []

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        if self.cuda and not self.host:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self.taken.append((name, (before, after), None))
            return
        if self.host:
            synchronise(self.device)
        worked, began = time.process_time(), time.perf_counter()
        yield
        if self.host == "wall":
            synchronise(self.device)
        ended = time.perf_counter()
        self.taken.append((name, 1e3 * (ended - began), 1e3 * (time.process_time() - worked)))

    def read(self) -> list[tuple[str, float, float | None]]:
        """Times taken since the last call: row, wall time, CPU time."""
        if self.cuda and not self.host:
            torch.cuda.synchronize()
            self.taken = [(name, before.elapsed_time(after), None) for name, (before, after), _ in self.taken]
        taken, self.taken = self.taken, []
        return taken


def in_turn(
    calls: Mapping[str, TimedCall],
    clock: Clock,
    repeats: int,
    *,
    before: TimedCall = lambda: None,
    warm_up: int = 1,
    least: int = 0,
    seconds: float = math.inf,
) -> Samples:
    """Times of all calls, side by side: in each repetition all of them, in an order that is drawn.

    Args:
        before: restores data before each call, untimed.
        warm_up: repetitions that are not counted.
        least: repetitions that are made, whatever `seconds` says.
        seconds: after which no repetition begins.
    """
    samples: Samples = {name: {} for name in calls}
    order, began, turn = random.Random(0), time.perf_counter(), -warm_up
    with no_collection():
        while turn < min(least, repeats) or (turn < repeats and time.perf_counter() - began < seconds):
            for name in order.sample(list(calls), len(calls)):
                before()
                with clock.timing(name):
                    calls[name]()
            for name, ms, _ in clock.read():
                if turn >= 0:
                    samples[name][turn] = ms
            turn += 1
    return samples


class Waits(Exception):
    """A call whose host waits for the device can't be captured; to try would spoil torch's allocator."""


def captured(call: TimedCall) -> TimedCall:
    """The same work as a CUDA graph: what is timed is the device's, whatever the host needs to launch it."""
    waits = host_sync.num_syncs()
    call()
    if host_sync.num_syncs() > waits:
        raise Waits("it waits for the device")
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # as torch wants it before a capture
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph):
        call()
    replay: TimedCall = graph.replay
    return replay
