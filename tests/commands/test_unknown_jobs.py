"""A run whose job SLURM does not show here: it is not failed, and not made twice by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config.folders import Folders
from slurm import jobs
from tests.conftest import Command, fine
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module
WORDS = (
    "method=topk", "profile=smoke", "task=cnn_digits", "cluster=devcluster", "cluster.slurm_conf=null",
    "container=none",
)  # fmt: skip
HEAD = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND"


def speaks_to(programs: Programs, name: str) -> None:
    """SLURM's commands are from now on those of this cluster, which has no job 12 and knows no other."""
    programs.prints("scontrol", f"ClusterName = {name}")
    programs.prints("squeue", f"{HEAD}\n13|RUNNING|None|n1|N/A|a|/a", unless="--clusters")
    jobs._cluster.cache_clear()


@pytest.fixture
def submitted(programs: Programs, here: Command, tmp_path: Path) -> Folders:
    """One run, job 12 of the cluster there; SLURM is now asked on another one."""
    speaks_to(programs, "there")
    programs.prints("sbatch", "12")
    fine(here("submit", *WORDS))
    programs.prints("sbatch", "14")
    speaks_to(programs, "here")
    return Folders(tmp_path / "results")


def states(folders: Folders) -> list[str]:
    """Of all attempts, by run and number."""
    return [attempt.state for run in folders.store.runs() for attempt in folders.store.attempts(run)]


def test_it_is_unknown_and_left_alone(submitted: Folders, here: Command) -> None:
    told = fine(here("status")).stdout
    assert "1 runs: 1 unknown" in told
    assert "its job is on the cluster there, and SLURM here is here" in told
    again = fine(here("submit", *WORDS))
    assert "1 of these runs are left alone" in again.stderr
    assert "nothing to submit" in again.stderr
    assert states(submitted) == ["submitted"]


def test_who_knows_better_forces_it(submitted: Folders, here: Command) -> None:
    fine(here("submit", *WORDS, "--force"))
    assert states(submitted) == ["submitted", "submitted"]


def test_cancel_gives_it_up_and_touches_no_job_of_this_cluster(
    submitted: Folders, here: Command, programs: Programs
) -> None:
    assert "gave up 1 runs" in fine(here("cancel", "runs-001")).stdout
    assert not programs.words("scancel")
    assert states(submitted) == ["failed"]
    fine(here("submit", *WORDS))
    assert states(submitted) == ["failed", "submitted"]


def test_on_its_own_cluster_it_is_known_again(submitted: Folders, here: Command, programs: Programs) -> None:
    speaks_to(programs, "there")
    assert "1 failed" in fine(here("status")).stdout
    (run,) = submitted.store.runs()
    script = f"{submitted.sweeps}/runs-001/a0/1.sh"
    programs.prints("squeue", f"{HEAD}\n12|RUNNING|None|n1|N/A|runs-001-a0|{script}")
    assert "1 queued" in fine(here("status")).stdout
    assert "cancelled 1 jobs" in fine(here("cancel", run)).stdout
    assert programs.words("scancel") == ["12"]
