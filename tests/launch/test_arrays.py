"""Runs before SLURM sees them: arrays, blocks, the text of sbatch; and what an allocation is not for."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.config import code_version, compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.figures.runs import requested_runs
from experiments.launch import arrays, submission
from slurm.worker_process import WorkerCommand
from tests.conftest import Command, fine, refused

TEXTS = Path(__file__).parent / "sbatch"
SHIPPED = ("devcluster", "generic_slurm", "neuron_a100", "neuron_v100")
ACCEPT = "python -m tests.launch.test_arrays"


def planned(*words: str) -> list[PlannedRun]:
    return [PlannedRun(config, None) for config in requested_runs(words)[1]]


def text_of(cluster: str) -> str:
    """Return what sbatch is given for fig3, without what differs from machine to machine."""
    found = arrays.group_into_arrays(planned("fig3", f"cluster={cluster}"), one_job_per_group=False)
    folders = ResultFolders(Path("/RESULTS"))
    text = "\n".join(arrays.sbatch_script_previews(found, folders, "fig3-001"))
    text = text.replace(sys.executable, "PYTHON").replace(code_version.code_digest(), "DIGEST")
    text = re.sub(r"\S+ --quiet exec", "RUNTIME --quiet exec", text).replace(" --userns", "")
    return re.sub(r"\S+/(\w+\.sif)", r"IMAGES/\1", re.sub(r"( --mount \S+)+", " --mount FOLDERS", text))


@pytest.mark.parametrize("cluster", SHIPPED)
def test_the_text_for_sbatch_is_the_recorded_one(cluster: str) -> None:
    recorded = (TEXTS / f"{cluster}.sbatch").read_text()
    assert text_of(cluster) == recorded, f"if the change is meant: {ACCEPT}"


def test_the_plan_shows_what_a_worker_is_started_by(here: Command) -> None:
    for words, container in {
        "cluster=neuron_a100": "/gpu.sif env ",
        "cluster=neuron_a100 container=none": "",
        "cluster=devcluster profile=laptop": "/thin.sif env ",
    }.items():
        done = fine(here("plan", "fig1", "profile=paper", *words.split(), "--sbatch"))
        (line,) = {line for line in done.stdout.splitlines() if "experiments.worker" in line}
        assert line.startswith("# ")
        assert container in line
        assert ("--nv" in line) == ("gpu" in container)


def test_an_array_has_one_shape_and_no_more_tasks_than_the_cluster_takes() -> None:
    words = (
        "method=topk seed=range(0,25) workers=2,4 cluster=generic_slurm cluster.max_array=10 profile=smoke"
    )
    sweep = planned(*words.split())
    found = arrays.group_into_arrays(sweep, one_job_per_group=False)
    assert [len(array.jobs) for array in found] == [10, 10, 5, 10, 10, 5]
    assert len({array.shape for array in found}) == 2
    everything = [run for array in found for job in array.jobs for run in job]
    assert sorted(everything, key=sweep.index) == sweep


def test_a_block_holds_each_repetition_of_all_methods_in_an_order_of_its_own() -> None:
    sweep = planned("method=dense,topk,randomk,dgc", "seed=range(0,6)", "cluster=devcluster", "profile=smoke")
    (array,) = arrays.group_into_arrays(sweep, one_job_per_group=True)
    (job,) = array.jobs
    seeds = [run.config.seed for run in job]
    assert seeds == sorted(seeds)
    orders = {tuple(run.config.method.name for run in job if run.config.seed == seed) for seed in range(6)}
    assert {*map(frozenset, orders)} == {frozenset({"dense", "dgc", "randomk", "topk"})}
    assert len(orders) > 1
    assert arrays.group_into_arrays(list(reversed(sweep)), one_job_per_group=True)[0].jobs[0] == job


def described(**changes: Any) -> SlurmCluster:
    cluster = compose.resolve(["cluster=generic_slurm"]).cluster
    assert isinstance(cluster, SlurmCluster)
    return replace(cluster, **changes)


def run_of(workers: int, device: str = "cpu") -> Config:
    return compose.resolve(["task=cnn_cifar10", f"workers={workers}", f"device={device}"])


def test_workers_are_spread_evenly_and_warned_after_they_began() -> None:
    for workers, per_node, nodes, tasks in [
        (1, 8, 1, 1), (8, 8, 1, 8), (12, 8, 2, 6), (6, 4, 2, 3), (5, 4, 5, 1),
    ]:  # fmt: skip
        cluster = described(workers_per_node=per_node)
        shape = arrays.job_shape(cluster, run_of(workers, "cuda"))
        assert shape == (nodes, tasks, cluster.cpus_per_worker, tasks)
    with pytest.raises(ValueError, match="told to stop as they start"):
        arrays.job_shape(described(signal_delay_s=7200), run_of(2))


def test_ports_that_need_no_root_may_be_open() -> None:
    assert described(ports="1024-65535").port_range() == range(1024, 2**16)


def test_odd_values_stay_values() -> None:
    """A directive is a comment to the shell; quotes, semicolons and $(...) arrive in SLURM as they are."""
    odd = "a b; $(touch x) `y` \"q\" 'z'"
    cluster = described(comment=odd, account="a;b", python="/py thon")
    array = arrays.JobArray(cluster, arrays.job_shape(cluster, run_of(2)), [])
    worker = WorkerCommand([array.node_python], "/a folder/$(x)", 1, None, [], False)
    text = array.batch_script("name", Path("/a folder"), Path("/it's"), worker).text
    odd_lines = [line for line in text.splitlines() if re.search(r"touch x|a;b|/\$\(x\)", line)]
    assert {line.split()[0] for line in odd_lines} == {"#SBATCH"}
    (call,) = (line for line in text.splitlines() if line.startswith("srun"))
    assert "'/py thon' -u" in call
    assert "'/a folder'" in call


def test_one_process_submits_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "LOCK_TIMEOUT_S", 0.1)
    busy = pytest.raises(ValueError, match=f"process {os.getpid()} of this machine has been submitting")
    with (
        submission._acquire_submission_lock(ResultFolders(tmp_path), print),
        busy,
        submission._acquire_submission_lock(ResultFolders(tmp_path), print),
    ):
        pytest.fail("two at a time")
    with submission._acquire_submission_lock(ResultFolders(tmp_path), print):  # the first has left
        pass


if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    for name in SHIPPED:
        (TEXTS / f"{name}.sbatch").write_text(text_of(name))


WORDS = ("sweep", "method=topk", "task=cnn_digits", "profile=smoke")


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in an allocation of two tasks, as SLURM describes it."""
    facts = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)


def test_outside_of_one_the_way_into_one_is_told(here: Command) -> None:
    refused(here(*WORDS, "cluster=generic_slurm"), "inside an allocation", "sbatch slurm/sweep.sbatch")


@pytest.mark.usefixtures("allocation")
def test_a_node_without_a_task_is_refused(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    refused(here(*WORDS), "has 2 tasks on 4 nodes", "give sbatch --ntasks=4 or more, or --nodes=2")


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
        ("cluster=local", "cluster=local is no SLURM cluster"),
        ("cluster=generic_slurm,virtual", "cluster=virtual is no SLURM cluster"),
        ("workers=3", "workers=3 were asked for, but this allocation has 2 tasks"),
        ("cluster=generic_slurm workers=3", "workers=3 were asked for, but this allocation has 2 tasks"),
    ],
)
def test_runs_that_it_is_not_for_are_refused(here: Command, tmp_path: Path, words: str, why: str) -> None:
    refused(here(*WORDS, *words.split()), why)
    assert not (tmp_path / "results" / "runs").exists()
