"""Runs inside an allocation of SLURM's: what it is not for is refused before anything begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Command, refused

WORDS = ("sweep", "method=topk", "task=cnn_digits", "profile=smoke")


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tasks, as SLURM describes it."""
    facts = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)


def test_outside_of_one_the_way_into_one_is_told(here: Command) -> None:
    refused(here(*WORDS, "cluster=generic_slurm"), "inside an allocation", "sbatch slurm/sweep.sbatch")


@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("places", ["4", "2(x2)", "1,3"])
def test_tasks_that_the_script_asks_for_in_place_of_those_of_each_node_are_told(
    here: Command, monkeypatch: pytest.MonkeyPatch, places: str
) -> None:
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", places)
    refused(here(*WORDS), "places for 4 tasks", "--ntasks=2", "give sbatch --ntasks=4 too")


@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["cluster=local"], "cluster=local is no SLURM cluster"),
        (["cluster=generic_slurm,virtual"], "cluster=virtual is no SLURM cluster"),
        (["workers=3"], "workers=3 were asked for, but this allocation has 2 tasks"),
        (["cluster=generic_slurm", "workers=3"], "workers=3 were asked for, but this allocation has 2 tasks"),
    ],
)
def test_runs_that_it_is_not_for_are_refused(
    here: Command, tmp_path: Path, words: list[str], why: str
) -> None:
    refused(here(*WORDS, *words), why)
    assert not (tmp_path / "results" / "runs").exists()
