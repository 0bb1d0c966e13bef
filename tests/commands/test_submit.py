"""`submit` and `plan` where there is no SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config.folders import Folders
from tests.conftest import Command, fine, refused
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module


def test_where_there_is_no_slurm_that_is_said(here: Command, tmp_path: Path) -> None:
    words = ("method=topk", "cluster=devcluster", "profile=smoke", "task=cnn_digits", "container=none")
    refused(
        here("submit", *words, PATH=str(tmp_path)),
        "on this machine: run this on a login node",
        "make slurm-up",
    )
    refused(here("submit", "method=topk"), "conf/cluster")
    done = fine(here("plan", *words, PATH=str(tmp_path)))
    assert "1 runs, 1 not measured" in done.stdout


ON_SLURM = ("method=topk", "profile=smoke", "task=cnn_digits", "cluster=devcluster", "container=none")


def test_options_behind_two_dashes_are_sbatchs(here: Command) -> None:
    """Beside those of the cluster, and whatever signs are in them."""
    words = (
        "cluster.sbatch=[--hold]",
        "--",
        "--account",
        "research",
        "--mail-type=END,FAIL",
        '--nice=a "b],c',
    )
    said = fine(here("plan", *ON_SLURM, "--sbatch", *words)).stdout
    for line in ("--account=research", "--mail-type=END,FAIL", "--hold", "--nice='a \"b],c'"):
        assert f"#SBATCH {line}\n" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["cluster=local", "--", "--hold"], ["is of SLURM clusters, and cluster=local is none"]),
        (["--", "-A", "x"], ["a long option such as --x=y"]),
        (["--", "--nodes=3"], ["--nodes=3 would replace", "workers and cluster.workers_per_node"]),
        (["cluster.sbatch=[--requeue]"], ["--requeue would replace", "cluster.requeues"]),
        (["--", "--partition=urgent"], ["--partition=urgent would replace", "cluster.partition"]),
        (["cluster.mem_gb=4", "--", "--mem=1G"], ["--mem=1G would replace", "cluster.mem_gb"]),
    ],
)
def test_options_that_can_not_be_sbatchs_are_refused(
    here: Command, words: list[str], parts: list[str]
) -> None:
    refused(here("plan", *ON_SLURM, *words), *parts)


def test_a_job_that_is_there_takes_no_options_of_sbatch(here: Command) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    said = here("sweep", "method=topk", "--", "--account=x", **job)
    refused(said, "sbatch --account=mine slurm/sweep.sbatch")


NO_IMAGE = (*ON_SLURM[:-1], "container=thin", "container.image=/no/such.sif", "cluster.slurm_conf=null")


def test_what_is_missing_is_told_before_anything_is_submitted(
    programs: Programs, here: Command, tmp_path: Path
) -> None:
    programs.prints("scontrol", "ClusterName = here")
    programs.prints("squeue", "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND")
    programs.prints("sbatch", "12")
    assert "before `submit`: " in fine(here("plan", *NO_IMAGE)).stderr
    refused(here("submit", *NO_IMAGE))
    assert not programs.words("sbatch")
    assert not (tmp_path / "results/sweeps").exists()
    assert not Folders(tmp_path / "results").store.runs()


def test_where_a_later_array_is_refused_it_is_told_what_is_queued(
    programs: Programs, here: Command, tmp_path: Path
) -> None:
    programs.prints("scontrol", "ClusterName = here")
    programs.prints("squeue", "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND")
    programs.prints("sbatch", "12", unless="/a1/")
    words = (*ON_SLURM, "cluster.slurm_conf=null", "workers=1,2", "sweep=odd")
    done = here("submit", *words)
    refused(done, "of 2 arrays the first 1 are queued: `cancel odd", "`submit` once more queues the others")
    runs = Folders(tmp_path / "results").store
    assert len([run for run in runs.runs() if runs.attempts(run)[-1].job.id]) == 1
