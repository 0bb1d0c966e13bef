"""`submit`, `plan` and `cancel` without a SLURM, and with programs that stand in for SLURM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config.folders import ResultFolders
from slurm import jobs
from tests.conftest import Command, fine, refused
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module
ON_SLURM = ("method=topk", "profile=smoke", "task=cnn_digits", "cluster=devcluster", "container=none")
ANY_SLURM = (*ON_SLURM, "cluster.slurm_conf=null")
HEAD = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND"


def test_where_there_is_no_slurm_that_is_said(here: Command, tmp_path: Path) -> None:
    done = here("submit", *ON_SLURM, PATH=str(tmp_path))
    refused(done, "on this machine: run this on a login node", "make slurm-up")
    refused(here("submit", "method=topk"), "conf/cluster")
    done = fine(here("plan", *ON_SLURM, PATH=str(tmp_path)))
    assert "1 runs, 1 not measured" in done.stdout


# --- options of sbatch
# --------------------------------------------------------------------------------------


def test_options_behind_two_dashes_are_sbatchs_beside_those_of_the_cluster(here: Command) -> None:
    given = ("--account", "research", "--mail-type=END,FAIL", '--nice=a "b],c')
    said = fine(here("plan", *ON_SLURM, "--sbatch", "cluster.sbatch=[--hold]", "--", *given)).stdout
    for line in ("--account=research", "--mail-type=END,FAIL", "--hold", "--nice='a \"b],c'"):
        assert f"#SBATCH {line}\n" in said


def test_options_that_can_not_be_sbatchs_are_refused(here: Command) -> None:
    for words, *answers in (
        ("cluster=local -- --hold", "is of SLURM clusters, and cluster=local is none"),
        ("-- -A x", "a long option such as --x=y"),
        ("-- --nodes=3", "--nodes=3 would replace", "workers and cluster.workers_per_node"),
        ("cluster.sbatch=[--requeue]", "--requeue would replace", "cluster.requeues"),
        ("cluster.mem_gb=4 -- --mem=1G", "--mem=1G would replace", "cluster.mem_gb"),
        ("device=cuda cluster.gres=gpu -- --gpus-per-node=4", "--gres=gpu:1 and --gpus-per-node=4", "26.05"),
        ("device=cuda cluster.gres=null -- --gres=gpu:4", "--gres=gpu:4 and --gpus-per-node=1", "keep one"),
        ("device=cuda cluster.gres=null cluster.srun=['--gres=gpu:a100:1']", "--gres=gpu:a100:1 and --gpus"),
    ):
        refused(here("plan", *ON_SLURM, *words.split()), *answers)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    said = here("sweep", "method=topk", "--", "--account=x", **job)  # in a job that is there
    refused(said, "sbatch --account=mine slurm/sweep.sbatch")


# --- what SLURM answers
# --------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> ResultFolders:
    return ResultFolders(tmp_path / "results")


def states(folders: ResultFolders) -> list[str]:
    """Return the states of all attempts, by run and number."""
    return [
        attempt.state for run in folders.store.list_run_ids() for attempt in folders.store.list_attempts(run)
    ]


def speak_to(programs: Programs, name: str, job: str) -> None:
    """Let SLURM's commands be those of this cluster, which has no job 12 and gives the next one a number."""
    programs.prints("scontrol", f"ClusterName = {name}")
    programs.prints("squeue", f"{HEAD}\n13|RUNNING|None|n1|N/A|a|/a", unless="--clusters")
    programs.prints("sbatch", job, unless="/a1/")
    jobs._cluster_settings.cache_clear()


def test_what_is_missing_is_told_before_anything_is_submitted(
    programs: Programs, here: Command, folders: ResultFolders
) -> None:
    speak_to(programs, "here", "12")
    no_image = (*ANY_SLURM, "container=thin", "container.image=/no/such.sif")
    assert "before `submit`: " in fine(here("plan", *no_image)).stderr
    refused(here("submit", *no_image))
    assert not programs.words("sbatch")
    assert not folders.sweeps.exists()
    assert not folders.store.list_run_ids()


def test_where_a_later_array_is_refused_it_is_told_what_is_queued(
    programs: Programs, here: Command, folders: ResultFolders
) -> None:
    speak_to(programs, "here", "12")
    done = here("submit", *ANY_SLURM, "workers=1,2", "sweep=odd")
    refused(done, "of 2 arrays the first 1 are queued: `cancel odd", "`submit` once more queues the others")
    assert (
        len(
            [run for run in folders.store.list_run_ids() if folders.store.list_attempts(run)[-1].slurm_job.id]
        )
        == 1
    )


@pytest.fixture
def submitted(programs: Programs, here: Command, folders: ResultFolders) -> ResultFolders:
    """Provide one run, job 12 of the cluster there; SLURM is now asked on another one."""
    speak_to(programs, "there", "12")
    fine(here("submit", *ANY_SLURM))
    speak_to(programs, "here", "14")
    return folders


def test_a_run_whose_job_is_not_shown_is_left_alone_unless_forced(
    submitted: ResultFolders, here: Command
) -> None:
    told = fine(here("status")).stdout
    assert "1 runs: 1 unknown" in told
    assert "its job is on the cluster there, and SLURM here is here" in told
    again = fine(here("submit", *ANY_SLURM))
    assert "1 of these runs are left alone" in again.stderr
    assert "nothing to submit" in again.stderr
    assert states(submitted) == ["submitted"]
    fine(here("submit", *ANY_SLURM, "--force"))
    assert states(submitted) == ["submitted", "submitted"]


def test_cancel_gives_it_up_and_touches_no_job_of_this_cluster(
    submitted: ResultFolders, here: Command, programs: Programs
) -> None:
    assert "gave up 1 runs" in fine(here("cancel", "runs-001")).stdout
    assert not programs.words("scancel")
    assert states(submitted) == ["failed"]
    fine(here("submit", *ANY_SLURM))
    assert states(submitted) == ["failed", "submitted"]


def test_on_its_own_cluster_it_is_known_again(
    submitted: ResultFolders, here: Command, programs: Programs
) -> None:
    speak_to(programs, "there", "14")
    assert "1 failed" in fine(here("status")).stdout
    (run,) = submitted.store.list_run_ids()
    script = f"{submitted.sweeps}/runs-001/a0/1.sh"
    programs.prints("squeue", f"{HEAD}\n12|RUNNING|None|n1|N/A|runs-001-a0|{script}")
    assert "1 queued" in fine(here("status")).stdout
    assert "cancelled 1 jobs" in fine(here("cancel", run)).stdout
    assert programs.words("scancel") == ["12"]
