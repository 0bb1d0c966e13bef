"""Threads that ask for short slices get what the kernel grants."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from experiments.config import compose
from experiments.worker import hardware
from experiments.worker.hardware import (
    SLICE_S,
    cores_of_node,
    pin_to_node_cores,
    shorten_time_slices,
    time_slice_s,
)
from slurm.environment import WorkerPlace

T = TypeVar("T")
needs_slices = pytest.mark.skipif(
    time_slice_s() is None, reason="this kernel has no slices that could be asked for"
)


def in_a_thread(do: Callable[[], T]) -> T:
    """Slices belong to threads: the tests' own keeps its."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(do).result()


@needs_slices
def test_short_slices_are_those_of_the_threads_started_afterwards_and_of_no_other() -> None:
    before = time_slice_s()

    def shortened() -> tuple[float | None, float | None, int]:
        niceness = os.nice(3)  # a nice thread stays nice
        shorten_time_slices()
        return time_slice_s(), in_a_thread(time_slice_s), os.nice(0) - niceness

    assert in_a_thread(shortened) == (SLICE_S, SLICE_S, 0)
    assert time_slice_s() == before != SLICE_S


def test_cores_are_dealt_out_evenly_or_not_at_all() -> None:
    def shares(nodes: int) -> list[list[int]]:
        return [cores_of_node(range(4), node, nodes) for node in range(nodes)]

    assert shares(2) == [[0, 1], [2, 3]]
    assert shares(3) == [[0], [1], [2]]
    assert shares(4) == [[0], [1], [2], [3]]
    assert shares(8) == 2 * shares(4)
    assert shares(6) == [[0, 1, 2, 3]] * 6


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def test_a_node_has_its_cores_and_what_it_starts_has_no_others() -> None:
    before = cores()
    if len(before) != os.cpu_count():
        pytest.skip("somebody has dealt out this machine's cores already")

    def taken() -> tuple[set[int], set[int], bool]:
        pin_to_node_cores(1, 2)
        return cores(), in_a_thread(cores), time_slice_s() in (SLICE_S, None)

    share = {*cores_of_node(sorted(before), 1, 2)}
    assert in_a_thread(taken) == (share, share, True)
    assert cores() == before


def test_cores_that_somebody_has_dealt_out_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the machine had one more than this process may use."""
    count = len(cores())
    monkeypatch.setattr(os, "cpu_count", lambda: count + 1)

    def taken() -> set[int]:
        pin_to_node_cores(1, count)
        return cores()

    assert in_a_thread(taken) == cores()


def test_workers_of_an_emulated_node_take_its_cores_and_none_of_the_relay_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = list[list[int]]()
    monkeypatch.setattr(hardware, "all_cpus_unless_restricted", lambda: set(range(6)))
    monkeypatch.setattr(hardware, "shorten_time_slices", lambda: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: taken.append([*cpus]))
    for cluster in (["cluster=local"], ["cluster=netns", "cluster.workers_per_node=2"]):
        config = compose.resolve(["task=vector", "train.validate=never", "workers=3", *cluster])
        for rank in range(3):
            for noted in ({"relay_cpus": [2, 5]}, {}):
                hardware.pin_if_emulated_and_set_nccl_defaults(
                    config, WorkerPlace(rank, 3, rank), torch.device("cpu"), noted
                )
    assert taken == [[0, 1], [0, 1, 2], [0, 1], [0, 1, 2], [3, 4], [3, 4, 5]]
