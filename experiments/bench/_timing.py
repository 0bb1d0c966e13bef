"""Timing of calls: the device and its description, clocks, calls in turns, and CUDA graphs."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from analysis.records.store import utc_timestamp
from experiments.bench import Device
from experiments.bench._runner import Record
from experiments.config import code_version
from experiments.worker.cores import cpu_model
from experiments.worker.memory import free_memory_bytes
from experiments.worker.provenance import collect_provenance
from sparsify.core import host_sync

Call = Callable[[], object]
MsByTurn = dict[int, float]  # turn -> ms
DEFAULT_REPEATS = {"cpu": 11, "cuda": 50}
CAPTURE_WARM_UP = 3  # calls before a capture: the first allocate, and compile
USABLE_SHARE = 0.9  # of the free memory
PUBLIC_PROVENANCE = (
    "cpu", "cores", "memory_gib", "huge_pages", "gpu", "before", "platform", "versions", "commit", "dirty",
)  # fmt: skip


def choose_device_and_set_threads(kind: Device | None, threads: int | None = None) -> torch.device:
    """Return the device of this kind, by default a GPU where there is one, and set the number of CPU threads.

    Raises:
        ValueError: there is no GPU here.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if kind != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if kind == "cuda":
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU here; say --device cpu")
    return torch.device("cpu")


def describe_single_thread_cpu_machine(name_suffix: str) -> Record:
    """Describe this machine and code with one CPU thread; the name is the CPU's, then `name_suffix`."""
    machine = describe_machine_and_code(torch.device("cpu"), threads=1)
    return machine | {"name": f"{machine['cpu']}, {name_suffix}"}


def describe_machine_and_code(device: torch.device, threads: int | None = None) -> Record:
    """Return what records say of the machine and the code, without the host's name."""
    cuda = device.type == "cuda"
    threads = threads or torch.get_num_threads()
    facts = collect_provenance("", "", device)
    return {
        "at": utc_timestamp(),
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else f"{cpu_model()}, {threads} threads",
        "cpu": cpu_model(),
        "threads": threads,
        "torch": torch.__version__,
        **code_version.git_state(),
        "provenance": {name: facts[name] for name in PUBLIC_PROVENANCE},
    }


def explain_lack_of_memory(needed_bytes: float, device: torch.device, reserved_bytes: float = 0.0) -> str:
    """Return why so many bytes do not fit into the free memory; empty where they do."""
    free = USABLE_SHARE * free_memory_bytes(device) - reserved_bytes
    if needed_bytes <= free:
        return ""
    return f"needs {needed_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect Python's garbage before the block, and none inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronise_if_cuda(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedCall(NamedTuple):
    """Milliseconds that a call took."""

    name: str
    wall_ms: float
    cpu_ms: float | None = None  # of all threads of this process; None where the device's time was taken


class CallTimer:
    """A timer that keeps the time of each call until it is read.

    On a GPU the time lies between two events, which are read at the end of a repetition. Otherwise it is the
    host's wall clock, with the CPU time of all threads of this process.

    Args:
        host: take the host's wall clock on a GPU too, from an idle device until the call returns ("call") or
            until the device is idle again ("wall").
    """

    def __init__(self, device: torch.device, host: Literal["", "call", "wall"] = "") -> None:
        self.device = device
        self.uses_events = device.type == "cuda" and not host
        self.host = host
        self.timed_calls = list[TimedCall]()
        self.events = list[tuple[str, Any, Any]]()

    @contextmanager
    def time_block(self, name: str) -> Iterator[None]:
        """Take the time of the block under this name."""
        if self.uses_events:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self.events.append((name, before, after))
            return
        if self.host:
            synchronise_if_cuda(self.device)
        cpu_start = time.process_time()
        wall_start = time.perf_counter()
        yield
        if self.host == "wall":
            synchronise_if_cuda(self.device)
        wall_s = time.perf_counter() - wall_start
        cpu_s = time.process_time() - cpu_start
        self.timed_calls.append(TimedCall(name, 1e3 * wall_s, 1e3 * cpu_s))

    def read_and_clear(self) -> list[TimedCall]:
        """Return the calls since the last reading, and forget them."""
        if self.events:
            torch.cuda.synchronize()
        timed_calls = self.timed_calls
        timed_calls += [TimedCall(name, before.elapsed_time(after)) for name, before, after in self.events]
        self.timed_calls = []
        self.events = []
        return timed_calls


class CallTimesByTurn(NamedTuple):
    """Milliseconds of each call in each turn, by the call's name."""

    wall_ms_by_call: dict[str, MsByTurn]
    cpu_ms_by_call: dict[str, MsByTurn]  # empty where the device's time was taken


def time_calls_in_turns(
    calls: Mapping[str, Call],
    timer: CallTimer,
    turns: int,
    *,
    prepare: Callable[[str], object] = lambda name: None,
    groups: Sequence[Sequence[str]] | None = None,
    start_turn: Call = lambda: None,
    warm_up: int = 1,
    min_turns: int = 0,
    max_seconds: float = math.inf,
    seed: int = 0,
) -> CallTimesByTurn:
    """Time all calls side by side. Each turn makes every call once, in a random order.

    Args:
        prepare: called with a call's name before the call, untimed.
        groups: names of calls that follow each other directly; by default each call is alone.
        start_turn: called before each turn.
        warm_up: turns that are not counted.
        min_turns: turns that are made even when `max_seconds` are over.
        max_seconds: after which no turn begins.
    """
    groups = [[name] for name in calls] if groups is None else groups
    times = CallTimesByTurn({name: {} for name in calls}, {name: {} for name in calls})
    order = random.Random(seed)
    start = time.perf_counter()
    turn = -warm_up
    with garbage_collection_paused():
        while turn < min(min_turns, turns) or (turn < turns and time.perf_counter() - start < max_seconds):
            start_turn()
            for group in order.sample(groups, len(groups)):
                for name in order.sample(group, len(group)):
                    prepare(name)
                    with timer.time_block(name):
                        calls[name]()
            for name, wall_ms, cpu_ms in timer.read_and_clear():
                if turn >= 0:
                    times.wall_ms_by_call[name][turn] = wall_ms
                    if cpu_ms is not None:
                        times.cpu_ms_by_call[name][turn] = cpu_ms
            turn += 1
    return times


class HostWaitError(Exception):
    """A call waits for the device, so that no CUDA graph can be captured from it."""


def capture_cuda_graph(call: Call) -> Call:
    """Return the replay of a CUDA graph of the call, whose time leaves out all launches by the host.

    Raises:
        HostWaitError: the call waits for the device. To try a capture would spoil torch's allocator.
    """
    num_syncs = host_sync.num_syncs()
    call()
    if host_sync.num_syncs() > num_syncs:
        raise HostWaitError("it waits for the device")
    graph = torch.cuda.CUDAGraph()
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):  # as torch wants it before a capture
        for _ in range(CAPTURE_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)
    with torch.cuda.graph(graph):
        call()
    replay: Call = graph.replay
    return replay
