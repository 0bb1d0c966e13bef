"""Calls timed in turn, each repetition beginning with another one; on a GPU as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from experiments.bench._side_by_side import Clock, no_collection, started
from sparsify import host_sync

Call = Callable[[], object]
Samples = dict[str, dict[int, float]]  # name -> repetition -> its time
WARM_UP = 3  # calls before a capture: the first allocate, and compile


class Waits(Exception):
    """A call whose host waits for the device can't be captured; to try would spoil torch's allocator."""


def captured(call: Call) -> Call:
    """The same work as a CUDA graph: what is timed is the device's, whatever the host needs to launch it.

    Raises:
        Waits: it waits for the device, so it can't be captured.
    """
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
    replay: Call = graph.replay
    return replay


def nothing() -> None:
    pass


def device_ms(
    calls: Mapping[str, Call], repeats: int, device: torch.device, before: Call = nothing
) -> Samples:
    """By events on a GPU; on a CPU by the host's clock. `before` each call, untimed, data are restored."""
    clock, samples = Clock(device), {name: dict[int, float]() for name in calls}
    with no_collection():
        for turn in range(repeats):
            for name in started(list(calls), turn):
                before()
                with clock.timing(name):
                    calls[name]()
            for name, ms, _ in clock.read():
                samples[name][turn] = ms
    return samples


def host_us(calls: Mapping[str, Call], repeats: int, device: torch.device, before: Call = nothing) -> Samples:
    """Until each call returns, with a device that has nothing else to do."""
    samples: Samples = {name: {} for name in calls}
    with no_collection():
        for turn in range(repeats):
            for name in started(list(calls), turn):
                before()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                calls[name]()
                samples[name][turn] = 1e6 * (time.perf_counter() - began)
    return samples
