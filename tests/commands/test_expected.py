"""Expected node-hours come from runs that are alike, and from no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.records.attempts import from_attempts
from analysis.records.store import Store
from experiments.commands.plan import Expected, hours
from experiments.config import compose
from experiments.config.config import NamedVariant
from experiments.config.plan import PlannedRun
from experiments.launch.arrays import JobArray, arrays
from tests.analysis import synthetic


def planned(method: str = "topk", **changes: Any) -> PlannedRun:
    of_all = {"method": method, "cluster": "generic_slurm", "task": "vgg16_cifar10", "workers": 2}
    clock = {"train.steps": 3600, "train.epochs": 1000, "train.epoch_steps": 49}
    return PlannedRun(compose.resolve({**of_all, **clock, "device": "cpu", **changes}), None)


def measured(tmp_path: Path, method: str = "topk", **changes: Any) -> pd.DataFrame:
    """One run of that method on that cluster."""
    like = planned(method).config
    config = synthetic.config(method, cluster=like["cluster"], device="cpu", **changes)
    config["task"] = config["task"] | {"batch_size": like["task"]["batch_size"]}
    synthetic.timed(Store(tmp_path), config)
    return from_attempts(Store(tmp_path).all_valid())[0].runs


def array(*runs: PlannedRun) -> JobArray:
    (found,) = arrays(runs, block=False)
    return found


def test_node_hours_are_steps_times_the_step_time_of_runs_that_are_alike(tmp_path: Path) -> None:
    runs, run = measured(tmp_path), planned()
    step_s = runs["step_s"].iloc[0]
    expected = Expected(runs)
    nodes = array(run).shape.nodes
    assert f"expected: {hours(array(run), nodes * step_s)}, by" in expected.sentence(array(run))
    assert "the step times of 1 run " in expected.sentence(array(run, planned(seed=1)))


def test_hours_of_gpus_are_told_where_there_are_some() -> None:
    assert hours(array(planned()), 44) == "44 node-hours"
    config = compose.resolve({"cluster": "neuron_a100", "workers": 8, "device": "cuda"})
    assert hours(array(PlannedRun(config, None)), 44) == "44 node-hours (352 GPU-hours)"


@pytest.mark.parametrize("changes", [{"workers": 4}, {"device": "cuda"}])
def test_other_machines_and_numbers_of_workers_say_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = Expected(measured(tmp_path))
    other = planned(**changes)
    assert expected.like(other.config) is None


def test_memory_is_that_of_the_largest_run_alike_and_of_all_tasks_of_a_node(tmp_path: Path) -> None:
    runs, run = measured(tmp_path), planned()
    assert Expected(runs.drop(columns=["memory.host_gib"], errors="ignore")).memory(array(run)) == ""
    runs["memory.host_gib"], tasks = 1.5, array(run).shape.tasks_per_node
    assert Expected(runs).memory(array(run)) == f"up to {tasks * 1.5:g} GiB of a node"
    of_both = Expected(runs.assign(**{"memory.gpu_gib": 4.0})).memory(array(run, planned("dense")))
    assert of_both.endswith(" GiB of a node and 4 GiB of each GPU")
    assert Expected(runs).memory(array(planned("dense"))) == ""


def test_what_nothing_is_known_of_is_said(tmp_path: Path) -> None:
    runs = measured(tmp_path)
    both = array(planned(), planned("dense"))
    assert "; of 1 run not known" in Expected(runs).sentence(both)
    assert "not known" in Expected(runs).sentence(array(planned("dense")))
    assert "not known" in Expected(pd.DataFrame()).sentence(array(planned()))
    assert "not known" in Expected(runs.assign(simulated=True)).sentence(array(planned()))


def test_a_run_without_a_number_of_steps_ends_with_its_epochs(tmp_path: Path) -> None:
    runs = measured(tmp_path)
    expected, run = Expected(runs), planned("topk", **{"train.steps": None, "train.epochs": 2})
    node_s = array(run).shape.nodes * 98 * runs["step_s"].iloc[0]
    assert f"expected: {hours(array(run), node_s / 3600)}, by" in expected.sentence(array(run))


def test_the_length_of_turns_is_open(tmp_path: Path) -> None:
    run = planned()
    turns = replace(run.config, variants=(NamedVariant("a", run.config),))
    assert "not known" in Expected(measured(tmp_path)).sentence(array(replace(run, config=turns)))


@pytest.mark.parametrize(("exclusive", "blocked"), [(True, 8), (False, 2)])
def test_a_node_that_is_a_jobs_alone_is_blocked_whole(exclusive: bool, blocked: int) -> None:
    asked = {"cluster": "generic_slurm", "workers": 2, "device": "cuda", "cluster.exclusive": exclusive}
    found = array(PlannedRun(compose.resolve(asked), None))
    assert (found.shape.gpus_per_node, found.gpus_blocked) == (2, blocked)
    assert hours(found, 3) == f"3 node-hours ({3 * blocked} GPU-hours)"
