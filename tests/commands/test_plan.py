"""Costs that `plan` expects of runs: minutes and node-hours, by work, and by similar runs only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.records.attempts import load_valid_attempts
from analysis.records.store import Store
from experiments.config import compose
from experiments.config.config import Config, VariantConfig
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.launch.arrays import JobArray, group_into_arrays
from experiments.prediction.run_durations import (
    TURN_SETTINGS,
    ClusterCostModel,
    DurationModel,
    Machine,
    StepCounter,
    format_node_hours,
)
from tests.analysis import synthetic
from tests.conftest import Command, fine, there

HERE = Machine("a processor", 2)
STEPS = 400
TOOK_S = 20.0
EPOCHS = {"train.steps": None, "train.epochs": 4}
Changes = dict[str, Any]


def asked(*methods: str, **changes: Any) -> Config:
    """Return the config of a run, in which methods may take turns."""
    usual = {"task": "cnn_cifar10", "task.batch_size": 16, "cluster": "virtual", "method": "topk"}
    config = compose.resolve({**usual, "workers": 2, "train.steps": STEPS, "device": "cpu", **changes})
    variants = [VariantConfig(name, compose.resolve({**usual, "method": name})) for name in methods]
    return replace(config, variants=tuple(variants)) if methods else config


USUAL = asked()
PROCESSES = asked(cluster="local")


def row(like: Any = USUAL, **changes: Any) -> Changes:
    """Return a run as `Frames.runs` has it, which went over all of 50,000 images."""
    names = (
        "task.name", "task.batch_size", "cluster.where", "cluster.link.name", "timing.mode", "device",
        "workers", "method.name", "train.epoch_steps", "train.held_out",
    )  # fmt: skip
    facts = {
        "run_id": str(sorted(changes.items())), "took_s": TOOK_S, "steps_total": STEPS, "source": "shipped",
        "steps_per_epoch": 1563, "provenance.cpu": HERE.cpu, "provenance.cores": HERE.cores,
    }  # fmt: skip
    return {name: like.get_setting(name) for name in names} | facts | changes


def took(*rows: Changes) -> DurationModel:
    return DurationModel(pd.DataFrame(rows), HERE)


def check_seconds(config: Config, expected_s: float, *rows: Changes) -> None:
    assert there(took(*rows).estimate(config)).seconds == pytest.approx(expected_s)


# --- on this machine
# --------------------------------------------------------------------------------------


def test_an_estimate_is_proportional_to_steps_and_to_workers_that_take_turns() -> None:
    check_seconds(asked(**{"train.steps": 3 * STEPS}), 3 * TOOK_S, row())
    check_seconds(asked(cluster="local", **{"train.steps": 3 * STEPS}), 3 * TOOK_S, row(PROCESSES))
    shorter, longer = (row(steps_total=times * STEPS, took_s=times * TOOK_S) for times in (0.5, 7))
    check_seconds(USUAL, TOOK_S, shorter, longer)
    check_seconds(asked(workers=8), 4 * TOOK_S, row())


def test_runs_of_other_tasks_batches_and_places_are_not_taken() -> None:
    for other in (
        {"task.name": "slimvgg_cifar10"}, {"task.batch_size": 32}, {"cluster.where": "local"},
        {"timing.mode": "as_published"}, {"device": "cuda"}, {"variant": "topk"},
    ):  # fmt: skip
        assert took(row(**other)).estimate(USUAL) is None, other
        check_seconds(USUAL, TOOK_S, row(), row(took_s=9 * TOOK_S, **other))
    for other in ({"workers": 4}, {"cluster.link.name": "another"}):
        assert took(row(PROCESSES, **other)).estimate(PROCESSES) is None, other
    assert DurationModel(pd.DataFrame(), HERE).estimate(USUAL) is None


def test_of_comparable_runs_the_nearest_count_and_a_machine_like_this_one_before_the_method() -> None:
    elsewhere = {"provenance.cores": 64}
    for farther in (elsewhere, {"provenance.cpu": "another"}, {"method.name": "terngrad"}, {"workers": 8}):
        check_seconds(USUAL, TOOK_S, row(), row(took_s=9 * TOOK_S, **farther))
    check_seconds(USUAL, TOOK_S, row(**{"method.name": "terngrad"}), row(took_s=9 * TOOK_S, **elsewhere))
    emulated = asked(cluster="netns")
    of_one_core = row(emulated, **{"provenance.cores": 1})
    check_seconds(
        emulated, TOOK_S, of_one_core, row(emulated, took_s=9 * TOOK_S, **{"provenance.cpu": "another"})
    )


def in_turns(*names: str, **changes: Any) -> list[Changes]:
    """Return a run in which methods took turns: a step of 0.1 s each, of Top-k 0.2 s, and 5 s besides."""
    steps = {name: 0.2 if name == "topk" else 0.1 for name in names}
    facts = {"run_id": "-".join(names), "took_s": 5 + 10 * sum(steps.values()), "steps_total": 10} | changes
    return [
        row(**{"method.name": name, "variant": name, "step_s": step_s, **facts})
        for name, step_s in steps.items()
    ]


def test_a_run_in_turns_takes_as_long_as_the_turns_of_its_methods() -> None:
    rows = in_turns("dense", "topk", "dgc", "sidco")
    rows.append(rows[0])  # files of entries each have the baseline's
    check_seconds(asked("dense", "topk"), 5 + 1 + 2, *rows)
    check_seconds(asked("dense", "qsgd"), 5 + 1 + 1.25, *rows)
    turns = asked("dense", "topk")
    same = {name: turns.get_setting(name) for name in TURN_SETTINGS}
    longer = same | {"alternate.block_steps": 90, "run_id": "longer", "took_s": 300.0}
    elsewhere = same | {"provenance.cores": 64}  # turns as long count before the machine
    check_seconds(turns, 8, *in_turns("dense", "topk", **elsewhere), *in_turns("dense", "topk", **longer))


def test_epochs_are_as_long_as_the_data_whatever_workers_and_batch_recorded_them() -> None:
    short = row(steps_per_epoch=13, **{"train.epoch_steps": 13})  # a clock that was asked for
    lengths = StepCounter(pd.DataFrame([row(steps_per_epoch=3125, workers=1), short]))
    for workers, steps in {1: 3125, 2: 1563, 4: 782, 8: 391}.items():
        assert lengths.count_steps(asked(workers=workers, **EPOCHS)) == 4 * steps
    assert lengths.count_steps(asked(**EPOCHS, **{"train.epoch_steps": 13})) == 4 * 13
    unknown = took(row(**{"train.epoch_steps": 13}), row(**{"train.held_out": 5000}))
    assert unknown.estimate(asked(**EPOCHS)) is None


def test_minutes_are_told_by_runs_like_these_or_said_to_be_unknown(here: Command, tmp_path: Path) -> None:
    words = [
        "task=cnn_digits",
        "profile=smoke",
        "cluster=virtual",
        "train.validate=epoch",
        "train.steps=null",
    ]
    train = {"epochs": 1, "steps": 20, "epoch_steps": None, "validate": "epoch"}
    config = compose.resolve([*words, "method=topk"]).as_dict() | {"train": train}
    made = synthetic.timed(ResultFolders(tmp_path / "results").store, config)
    made.update_manifest(
        started="2026-01-01T00:00:00Z", ended="2026-01-01T01:00:00Z", memory={"host_gib": 0.75}
    )
    said = fine(here("plan", *words, "method=topk", "seed=1,2")).stdout
    for text in (
        "runs on this machine: 2 runs, 2 not measured yet",
        "by the durations of 1 run of the same task, batch and place, scaled to as many steps; ",
        "memory: up to 0.75 GiB a run, as the largest like these had",
        "`run` or `reproduce` with the same words makes them",
    ):
        assert text in said
    said = fine(here("plan", *words, "method=dense", "workers=3", "task.batch_size=3")).stdout
    assert "not known of 1 run: none of the same task, batch and place was measured" in said
    said = fine(here("plan", *words, "method=topk", "task.batch_size=3,16", "seed=1")).stdout
    assert ", for 1 of 2 runs, while nothing else computes here" in said
    assert "expected: at least " in said


# --- on a cluster
# --------------------------------------------------------------------------------------


def planned(method: Any = "topk", **changes: Any) -> PlannedRun:
    usual = {"method": method, "cluster": "generic_slurm", "task": "vgg16_cifar10", "workers": 2}
    clock = {"train.steps": 3600, "train.epochs": 1000, "train.epoch_steps": 49}
    return PlannedRun(compose.resolve({**usual, **clock, "device": "cpu", **changes}), None)


def array(*runs: PlannedRun) -> JobArray:
    (found,) = group_into_arrays(runs, one_job_per_group=False)
    return found


RUN = planned()


@pytest.fixture
def runs(tmp_path: Path) -> pd.DataFrame:
    """Provide one measured run of Top-k on that cluster."""
    config = synthetic.config("topk", cluster=RUN.config["cluster"], device="cpu")
    config["task"] |= {"batch_size": RUN.config["task"]["batch_size"]}
    return load_valid_attempts([synthetic.timed(Store(tmp_path), config)])[0].runs


def test_node_hours_are_steps_times_the_step_time_of_runs_that_are_alike(runs: pd.DataFrame) -> None:
    expected = ClusterCostModel(runs)
    node_s = array(RUN).shape.nodes * runs["step_s"].iloc[0]
    assert "the step times of 1 run " in expected.describe_expected_node_hours(array(RUN, planned(seed=1)))
    with_epochs = planned(**{"train.steps": None, "train.epochs": 2})
    for run, steps in ((RUN, 3600), (with_epochs, 98)):
        told = f"expected: {format_node_hours(array(run), steps * node_s / 3600)}, by"
        assert told in expected.describe_expected_node_hours(array(run))


def test_what_nothing_is_known_of_is_said(runs: pd.DataFrame) -> None:
    for other in ({"workers": 4}, {"device": "cuda"}):
        assert ClusterCostModel(runs).find_similar_runs(planned(**other).config) is None
    assert "; of 1 run not known" in ClusterCostModel(runs).describe_expected_node_hours(
        array(RUN, planned("dense"))
    )
    turns = replace(RUN.config, variants=(VariantConfig("a", RUN.config),))
    assert "not known" in ClusterCostModel(runs).describe_expected_node_hours(
        array(replace(RUN, config=turns))
    )
    for known in (pd.DataFrame(), runs.assign(simulated=True)):
        assert "not known" in ClusterCostModel(known).describe_expected_node_hours(array(RUN))


def test_memory_is_that_of_the_largest_run_alike_and_of_all_tasks_of_a_node(runs: pd.DataFrame) -> None:
    unknown = runs.drop(columns=["memory.host_gib"], errors="ignore")
    assert ClusterCostModel(unknown).describe_expected_memory(array(RUN)) == ""
    with_memory = runs.assign(**{"memory.host_gib": 1.5})
    node_gib = array(RUN).shape.tasks_per_node * 1.5
    assert (
        ClusterCostModel(with_memory).describe_expected_memory(array(RUN))
        == f"up to {node_gib:g} GiB of a node"
    )
    with_gpus = ClusterCostModel(with_memory.assign(**{"memory.gpu_gib": 4.0}))
    assert with_gpus.describe_expected_memory(array(RUN, planned("dense"))).endswith(
        " GiB of a node and 4 GiB of each GPU"
    )


def test_hours_of_gpus_are_told_where_there_are_some() -> None:
    assert format_node_hours(array(RUN), 44) == "44 node-hours"
    for exclusive, blocked in {True: 8, False: 2}.items():  # a node that is a job's alone is blocked whole
        found = array(planned(device="cuda", **{"cluster.exclusive": exclusive}))
        assert format_node_hours(found, 3) == f"3 node-hours ({3 * blocked} GPU-hours)"
