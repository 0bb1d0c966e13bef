"""Workers and the cores that they are left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.worker import cores
from experiments.worker.cores import WorkerCores, describe_core_shortages, last_core_cpus_if_spare
from tests.conftest import Command, fine
from tests.worker.runs import manifests

HYPER = ["0,4", "1,5", "2,6", "3,7"]  # cores of two threads each
FIRST, SECOND, THIRD = ([core] for core in HYPER[:3])


def test_workers_need_a_core_for_each_thread() -> None:
    def told(*workers: tuple[str, int, list[str]]) -> list[str]:
        sentences = describe_core_shortages([WorkerCores(*worker) for worker in workers])
        assert all("cluster.sbatch=['--hint=nomultithread']" in sentence for sentence in sentences)
        return [sentence.partition(";")[0] for sentence in sentences]

    assert told(("a", 1, FIRST), ("a", 1, SECOND), ("b", 1, FIRST)) == []
    assert told(*[("a", 1, HYPER)] * 4) == []
    assert told(("a", 1, HYPER[:2]), ("a", 1, HYPER[1:3]), ("a", 2, HYPER[2:])) == []
    assert told(*[("a", 1, list[str]())] * 2) == []  # a system that does not say
    assert told(("a", 4, HYPER[:2])) == ["a: 4 threads of 1 worker have 2 cores among them"]
    # The others' cores are no help to those that are kept apart.
    apart = told(("a", 1, HYPER[:2]), *[("a", 1, THIRD)] * 2)
    assert apart == ["a: 2 threads of 2 workers have 1 core among them"]


def test_the_last_core_is_to_spare_where_the_others_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "all_cpus_unless_restricted", lambda: set(range(8)))
    monkeypatch.setattr(cores, "sibling_cpu_list", lambda cpu: HYPER[cpu % 4])
    assert last_core_cpus_if_spare(1) == last_core_cpus_if_spare(3) == [3, 7]
    assert last_core_cpus_if_spare(4) == last_core_cpus_if_spare(8) == []


@pytest.mark.extended
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_a_run_whose_workers_are_bound_to_one_core_says_so(command: Command, tmp_path: Path) -> None:
    """As SLURM binds them to two threads of one core."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        words = ("method=topk", "task=cnn_digits", "profile=smoke", "cluster=local", "workers=2")
        told = fine(command("run", *words)).stdout
    finally:
        os.sched_setaffinity(0, cpus)
    sentence = "2 threads of 2 workers have 1 core among them"
    (manifest,) = manifests(tmp_path / "results")
    assert sentence in manifest["provenance"]["machine"]["crowded"][0]
    assert sentence in told
