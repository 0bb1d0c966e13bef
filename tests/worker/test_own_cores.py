"""What the kernel grants to a thread that asks for short slices."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from experiments.config import compose
from experiments.worker import hardware
from experiments.worker.hardware import SLICE_S, share_of_cores, shorten, slice_s, take_cores
from slurm.environment import WorkerPlace

T = TypeVar("T")
needs_slices = pytest.mark.skipif(
    slice_s() is None, reason="this kernel has no slices that could be asked for"
)


def in_a_thread(do: Callable[[], T]) -> T:
    """Slices belong to threads: the tests' own keeps its."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(do).result()


@needs_slices
def test_short_slices_are_those_of_the_threads_started_afterwards_and_of_no_other() -> None:
    before = slice_s()

    def asked() -> tuple[float | None, float | None, int]:
        shorten()
        return slice_s(), in_a_thread(slice_s), os.getpriority(os.PRIO_PROCESS, 0)

    assert in_a_thread(asked) == (SLICE_S, SLICE_S, os.getpriority(os.PRIO_PROCESS, 0))
    assert slice_s() == before != SLICE_S


@needs_slices
def test_a_nice_thread_stays_nice() -> None:
    def asked() -> tuple[int, float | None]:
        nice = os.nice(3)
        shorten()
        return os.nice(0) - nice, slice_s()

    assert in_a_thread(asked) == (0, SLICE_S)


def test_where_there_is_nothing_to_ask_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, found in (("system", "Darwin"), ("machine", "riscv64")):
        with monkeypatch.context() as changed:
            changed.setattr(platform, what, lambda found=found: found)
            shorten()
            assert slice_s() is None


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [
        (2, [[0, 1], [2, 3]]),
        (3, [[0], [1], [2]]),
        (4, [[0], [1], [2], [3]]),
        (8, [[0], [1], [2], [3], [0], [1], [2], [3]]),
        (6, [[0, 1, 2, 3]] * 6),
    ],
)
def test_cores_are_dealt_out_evenly_or_not_at_all(nodes: int, shares: list[list[int]]) -> None:
    assert [share_of_cores(range(4), node, nodes) for node in range(nodes)] == shares


def test_a_node_has_its_cores_and_what_it_starts_has_no_others() -> None:
    if len(os.sched_getaffinity(0)) != os.cpu_count():
        pytest.skip("somebody has dealt out this machine's cores already")
    cores = sorted(os.sched_getaffinity(0))

    def taken() -> tuple[set[int], set[int]]:
        take_cores(1, 2)
        return os.sched_getaffinity(0), in_a_thread(lambda: os.sched_getaffinity(0))

    expected = set(share_of_cores(cores, 1, 2))
    assert in_a_thread(taken) == (expected, expected)
    assert sorted(os.sched_getaffinity(0)) == cores


def test_cores_that_somebody_has_dealt_out_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the machine had one more than this process may use."""
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "cpu_count", lambda: len(cores) + 1)

    def taken() -> set[int]:
        take_cores(1, len(cores))
        return os.sched_getaffinity(0)

    assert in_a_thread(taken) == cores


def test_the_relay_s_cores_are_no_node_s(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    monkeypatch.setattr(hardware, "all_cpus", lambda: set(range(6)))
    monkeypatch.setattr(hardware, "shorten", lambda: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: taken.append([*cpus]))
    config = compose.resolve(["task=vector", "train.validate=never", "cluster=netns", "workers=2"])
    for rank in range(2):
        place = WorkerPlace(rank, 2, rank)
        hardware.prepare(config, place, torch.device("cpu"), {"relay_cpus": [2, 5]})
        hardware.prepare(config, place, torch.device("cpu"), {})
    assert taken == [[0, 1], [0, 1, 2], [3, 4], [3, 4, 5]]


@needs_slices
def test_who_takes_cores_has_short_slices() -> None:
    def taken() -> float | None:
        take_cores(0, 1)
        return slice_s()

    assert in_a_thread(taken) == SLICE_S


@pytest.mark.parametrize(("where", "taken"), [("netns", [(1, 3)]), ("local", [])])
def test_only_workers_of_emulated_nodes_take_cores(
    monkeypatch: pytest.MonkeyPatch, where: str, taken: list[tuple[int, int]]
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(hardware, "take_cores", lambda node, nodes, _: asked.append((node, nodes)))
    per_node = ["cluster.workers_per_node=2"] * (where == "netns")
    config = compose.resolve(
        ["task=vector", "train.validate=never", f"cluster={where}", "workers=5", *per_node]
    )
    hardware.prepare(config, WorkerPlace(2, 5, 0), torch.device("cpu"))
    assert asked == taken
