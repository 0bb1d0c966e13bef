"""Sweeps before SLURM sees them: grids, arrays, blocks, the text of sbatch, bad descriptions of clusters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.records import run_id
from experiments import config as configs
from experiments import job, snapshot, submission
from experiments.orders import Planned
from experiments.planning import Folders
from experiments.sweep import expand, name_and_configs
from slurm import cluster as clusters
from slurm import queue
from tests.conftest import Command, refused

TEXTS = Path(__file__).parent / "sbatch"
SHIPPED = ("devcluster", "generic_slurm", "neuron_a100", "neuron_v100")
ACCEPT = "python -m tests.test_submission"


def planned(*words: str) -> list[Planned]:
    return [Planned(config, None) for config in name_and_configs(words)[1]]


def text_of(cluster: str) -> str:
    """What sbatch is given for fig4, without what differs from machine to machine."""
    found = submission.arrays(planned("fig4", f"cluster={cluster}"), block=False)
    folders = Folders(Path("/RESULTS"))
    text = "\n".join(submission.sbatch_texts(found, folders, "fig4-001"))
    return text.replace(sys.executable, "PYTHON").replace(snapshot.digest(), "DIGEST")


@pytest.mark.parametrize("cluster", SHIPPED)
def test_the_text_for_sbatch_is_the_recorded_one(cluster: str) -> None:
    recorded = (TEXTS / f"{cluster}.sbatch").read_text()
    assert text_of(cluster) == recorded, f"if the change is meant: {ACCEPT}"


def test_every_slurm_cluster_has_a_recorded_text() -> None:
    on_slurm = {
        name
        for name in configs.options("cluster")
        if configs.resolve([f"cluster={name}"])["cluster"]["where"] == "slurm"
    }
    assert on_slurm >= set(SHIPPED)
    assert {path.stem for path in TEXTS.glob("*.sbatch")} == set(SHIPPED)


def test_a_grid_is_every_combination_and_lists_stay_lists() -> None:
    points = expand(
        ["method=topk,randomk", "method.density=0.1,0.2", "seed=range(0,3)", "task.lr_milestones=[1,2]"]
    )
    assert len(points) == 2 * 2 * 3
    assert all(point[3] == "task.lr_milestones=[1,2]" for point in points)
    assert len({tuple(point) for point in points}) == len(points)


def test_a_hyperparameter_is_left_out_where_a_method_lacks_it() -> None:
    _, found = name_and_configs(["method=dense,topk", "method.density=0.01,0.1", "profile=smoke"])
    methods = [config["method"]["name"] for config in found]
    assert methods.count("dense") == 1
    assert methods.count("topk") == 2
    with pytest.raises(ValueError, match="no key"):
        name_and_configs(["method=dense", "method.density=0.01"])


def test_what_hydra_would_compose_is_what_the_quick_way_composes() -> None:
    words = [
        "recipe=yoon2022",
        "method=dgc",
        "method.density=0.01",
        "train.steps=null",
        "seed=3",
        "data.root='a b'",
    ]
    assert configs._compose(words) == configs._composed(tuple(words))


def test_nothing_in_conf_refers_to_what_a_word_can_change() -> None:
    """Else the quick way would compose something else: it puts words in after references are resolved."""
    for path in configs.CONF.rglob("*.yaml"):
        assert "${" not in path.read_text(), path


@pytest.mark.parametrize(
    ("workers", "per_node", "nodes", "tasks"),
    [(1, 8, 1, 1), (8, 8, 1, 8), (12, 8, 2, 6), (6, 4, 2, 3), (5, 4, 5, 1)],
)
def test_workers_are_spread_evenly(workers: int, per_node: int, nodes: int, tasks: int) -> None:
    cluster = described(workers_per_node=per_node)
    assert clusters.shape(cluster, workers, 1, True) == (nodes, tasks, cluster["cpus_per_worker"], tasks)


def described(**changes: Any) -> dict[str, Any]:
    return {**configs.resolve(["cluster=generic_slurm"])["cluster"], **changes}


def test_an_array_has_one_shape_and_no_more_tasks_than_the_cluster_takes() -> None:
    sweep = planned(
        "method=topk",
        "seed=range(0,25)",
        "workers=2,4",
        "cluster=generic_slurm",
        "cluster.max_array=10",
        "profile=smoke",
    )
    found = submission.arrays(sweep, block=False)
    assert [len(array.jobs) for array in found] == [10, 10, 5, 10, 10, 5]
    assert len({array.shape for array in found}) == 2
    everything = [run_id(one.config) for array in found for job in array.jobs for one in job]
    assert sorted(everything) == sorted(run_id(one.config) for one in sweep)


def test_a_block_holds_each_repetition_of_all_methods_in_an_order_of_its_own() -> None:
    sweep = planned("method=dense,topk,randomk,dgc", "seed=range(0,6)", "cluster=devcluster", "profile=smoke")
    (array,) = submission.arrays(sweep, block=True)
    (job,) = array.jobs
    seeds = [one.config["seed"] for one in job]
    assert seeds == sorted(seeds)
    orders = {
        tuple(one.config["method"]["name"] for one in job if one.config["seed"] == seed) for seed in range(6)
    }
    assert all(sorted(order) == ["dense", "dgc", "randomk", "topk"] for order in orders)
    assert len(orders) > 1
    assert submission.arrays(list(reversed(sweep)), block=True)[0].jobs[0] == job


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("partition", "a\nscancel 1", "line break"),
        ("sbatch", ["--mail-user=x\nrm y"], "line break"),
        ("sbatch", ["hold"], "long option"),
        ("time_min", 0, "1 or more"),
        ("requeues", -1, "0 or more"),
        ("setup", "module load", "list of words"),
        ("signal_delay_s", 7200, "told to stop as they start"),
    ],
)
def test_descriptions_that_no_job_can_be_made_of(field: str, value: Any, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        clusters.check(described(**{field: value}))


def test_odd_values_stay_values() -> None:
    """A directive is a comment to the shell; quotes, semicolons and $(...) arrive in SLURM as they are."""
    odd = "a b; $(touch x) `y` \"q\" 'z'"
    cluster = described(comment=odd, account="a;b")
    shape = clusters.shape(cluster, 2, 1, False)
    options = clusters.parameters(cluster, shape, "name", Path("/a folder/$(x)"), "true")
    from slurm.submit import sbatch_text

    text = sbatch_text(Path("/a folder"), options, "/py thon", 3)
    directives = [
        line for line in text.splitlines() if "touch x" in line or "a;b" in line or "a folder" in line
    ]
    assert all(line.startswith(("#SBATCH", "srun")) for line in directives)
    (call,) = (line for line in text.splitlines() if line.startswith("srun"))
    assert "'/py thon' -u" in call
    assert "'/a folder'" in call


FAILURES = [
    ([], []),
    ([("n1", "2026-01-01T10:00:00")], []),
    ([("n1", "2026-01-01T10:00:00"), ("n1", "2026-01-01T12:00:00")], ["n1"]),
    ([("n1", "2026-01-01T10:00:00"), ("n2", "2026-01-01T12:00:00Z")], []),
    ([("n1", f"2026-01-01T10:00:{second:02}") for second in (1, 0, 59)], []),  # one failure, three jobs
]


@pytest.mark.parametrize(("failures", "expected"), FAILURES)
def test_a_node_that_takes_many_jobs_along_failed_once(
    failures: list[tuple[str, str]], expected: list[str], tmp_path: Path
) -> None:
    assert job.unreliable(tmp_path / "ledger") == []
    (tmp_path / "ledger").touch()
    for number, (node, at) in enumerate(failures):
        job.note_failure(tmp_path / "ledger", node, str(number), at)
    assert job.unreliable(tmp_path / "ledger") == expected
    with (tmp_path / "ledger").open("a") as ledger:
        ledger.write('{"node": "n3", "jo')  # its writer was killed
    assert job.unreliable(tmp_path / "ledger") == expected


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed",
            "cluster.partition",
        ),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "cluster.account",
        ),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "cluster.constraint"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "cluster.qos"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid", "cluster.time_min"),
    ],
)
def test_a_refusal_is_passed_on_with_the_field_to_change(said: str, field: str) -> None:
    sentence = queue.refusal(said)
    assert field in sentence
    assert re.sub(r"sbatch: |error: ", "", said.splitlines()[0]) in sentence


def test_where_there_is_no_slurm_that_is_said(command: Command, tmp_path: Path) -> None:
    words = ("method=topk", "cluster=devcluster", "profile=smoke", "task=cnn_digits", "container=none")
    refused(command("submit", *words, PATH=str(tmp_path)), "no squeue", "make slurm-up")
    refused(command("submit", "method=topk"), "conf/cluster")
    done = command("plan", *words, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "1 runs, 1 not measured" in done.stdout


if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    for name in SHIPPED:
        (TEXTS / f"{name}.sbatch").write_text(text_of(name))
