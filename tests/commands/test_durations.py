"""Laws of expected durations: by work, and by runs of the same task, batch and place only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from experiments.commands._durations import TURNS, Lengths, Machine, Took, basis
from experiments.config import compose
from experiments.config.config import Config, NamedVariant
from tests.conftest import there

HERE = Machine("a processor", 2)
IMAGES = 50_000
STEPS, TOOK_S = 400, 20.0


def asked(**changes: Any) -> Config:
    of_all = {"task": "cnn_cifar10", "task.batch_size": 16, "cluster": "virtual", "method": "topk"}
    return compose.resolve({**of_all, "workers": 2, "train.steps": STEPS, "device": "cpu", **changes})


def row(**changes: Any) -> dict[str, Any]:
    """A run as `Frames.runs` has it, which went over all images."""
    config = asked()
    names = (
        "task.name", "task.batch_size", "cluster.where", "cluster.link.name", "timing.mode", "device",
        "workers", "method.name", "train.epoch_steps", "train.held_out",
    )  # fmt: skip
    facts = {
        "run_id": str(sorted(changes.items())), "took_s": TOOK_S, "steps_total": STEPS, "source": "shipped",
        "steps_per_epoch": IMAGES // 32 + 1, "provenance.cpu": HERE.cpu, "provenance.cores": HERE.cores,
    }  # fmt: skip
    return {name: config.leaf(name) for name in names} | facts | changes


def took(*rows: dict[str, Any]) -> Took:
    return Took(pd.DataFrame(rows), HERE)


def seconds(of: Took, **changes: Any) -> float:
    return there(of.estimate(asked(**changes))).seconds


def test_a_run_like_another_takes_as_long() -> None:
    assert seconds(took(row())) == pytest.approx(TOOK_S)


@pytest.mark.parametrize("cluster", ["virtual", "local"])
def test_an_estimate_is_proportional_to_steps(cluster: str) -> None:
    like = asked(cluster=cluster)
    of = took(row(**{name: like.leaf(name) for name in ("cluster.where", "cluster.link.name")}))
    for factor in (1, 3, 10):
        steps = {"train.steps": factor * STEPS}
        assert seconds(of, cluster=cluster, **steps) == pytest.approx(factor * TOOK_S)


def test_runs_with_other_numbers_of_steps_are_scaled() -> None:
    shorter, longer = (row(steps_total=by * STEPS, took_s=by * TOOK_S) for by in (0.5, 7))
    assert seconds(took(shorter, longer)) == pytest.approx(TOOK_S)


def test_virtual_workers_take_turns_on_one_core() -> None:
    assert seconds(took(row()), workers=8) == pytest.approx(4 * TOOK_S)


@pytest.mark.parametrize(
    "other",
    [
        {"task.name": "slimvgg_cifar10"},
        {"task.batch_size": 32},
        {"cluster.where": "local"},
        {"timing.mode": "as_published"},
        {"device": "cuda"},
        {"variant": "topk"},
    ],
)
def test_runs_of_other_tasks_batches_and_places_are_not_taken(other: dict[str, Any]) -> None:
    assert took(row(**other)).estimate(asked()) is None
    assert seconds(took(row(), row(took_s=9 * TOOK_S, **other))) == pytest.approx(TOOK_S)


def in_turns(*names: str, **changes: Any) -> list[dict[str, Any]]:
    """A run in which methods took turns: a step of 0.1 s each, of Top-k 0.2 s, and 5 s besides."""
    steps = {name: 0.2 if name == "topk" else 0.1 for name in names}
    took_s = 5 + 10 * sum(steps.values())
    return [
        row(**{"method.name": name, "variant": name, "run_id": "-".join(names), "took_s": took_s,
               "step_s": step_s, "steps_total": 10} | changes)
        for name, step_s in steps.items()
    ]  # fmt: skip


def test_a_run_in_turns_takes_as_long_as_the_turns_of_its_methods() -> None:
    rows = in_turns("dense", "topk", "dgc", "sidco")
    of = took(*rows, rows[0])  # files of entries each have the baseline's
    for names, expected in {("dense", "topk"): 5 + 1 + 2, ("dense", "qsgd"): 5 + 1 + 1.25}.items():
        turns = replace(asked(), variants=tuple(NamedVariant(name, asked(method=name)) for name in names))
        assert there(of.estimate(turns)).seconds == pytest.approx(expected)


def test_turns_as_long_count_before_the_machine() -> None:
    turns = replace(
        asked(), variants=tuple(NamedVariant(name, asked(method=name)) for name in ("dense", "topk"))
    )
    same = {name: turns.leaf(name) for name in TURNS}
    of = took(
        *in_turns("dense", "topk", **same, **{"provenance.cores": 64}),
        *in_turns(
            "dense", "topk", **same | {"alternate.block_steps": 90, "run_id": "longer", "took_s": 300.0}
        ),
    )
    assert there(of.estimate(turns)).seconds == pytest.approx(8)


def test_processes_are_compared_with_as_many_over_the_same_link() -> None:
    like = asked(cluster="local")
    same = {name: like.leaf(name) for name in ("cluster.where", "cluster.link.name")}
    assert took(row(**same, workers=4)).estimate(like) is None
    assert took(row(**same) | {"cluster.link.name": "another"}).estimate(like) is None


@pytest.mark.parametrize(
    "farther",
    [
        {"provenance.cores": 64},
        {"provenance.cpu": "another"},
        {"method.name": "terngrad"},
        {"workers": 8},
    ],
)
def test_of_comparable_runs_the_nearest_count(farther: dict[str, Any]) -> None:
    of = took(row(), row(took_s=9 * TOOK_S, **farther))
    assert seconds(of) == pytest.approx(TOOK_S)
    assert "1 run of the same" in basis([there(of.estimate(asked()))])


def test_a_machine_like_this_one_counts_before_the_method() -> None:
    of = took(row(**{"method.name": "terngrad"}), row(took_s=9 * TOOK_S, **{"provenance.cores": 64}))
    assert seconds(of) == pytest.approx(TOOK_S)


def test_what_an_estimate_rests_on_is_told() -> None:
    here = there(took(row()).estimate(asked()))
    elsewhere = there(took(row(**{"provenance.cpu": "another", "method.name": "dense"})).estimate(asked()))
    assert basis([here]).endswith("steps; all of them on a machine like this one")
    assert basis([elsewhere]).endswith(
        "; none of them on a machine like this one; 1 run by those of other methods"
    )
    assert "2 runs of the same task, batch and place" in basis([here, elsewhere])
    assert "; 1 of them on a machine like this one" in basis([here, elsewhere])


def test_epochs_are_as_long_as_the_data_whatever_workers_and_batch_recorded_them() -> None:
    epochs = {"train.steps": None, "train.epochs": 4}
    short = row(steps_per_epoch=13, **{"train.epoch_steps": 13})  # a clock that was asked for
    lengths = Lengths(pd.DataFrame([row(steps_per_epoch=3125, workers=1), short]))
    for workers, steps in ((1, 3125), (2, 1563), (4, 782), (8, 391)):
        assert lengths.steps(asked(workers=workers, **epochs)) == 4 * steps
    assert lengths.steps(asked(**epochs, **{"train.epoch_steps": 13})) == 4 * 13


def test_where_no_epoch_was_recorded_nothing_is_estimated() -> None:
    epochs = {"train.steps": None, "train.epochs": 4}
    of = took(row(**{"train.epoch_steps": 13}), row(**{"train.held_out": 5000}))
    assert of.estimate(asked(**epochs)) is None
    assert of.comparable(asked(**epochs)) is not None


def test_without_runs_nothing_is_estimated() -> None:
    assert Took(pd.DataFrame(), HERE).estimate(asked()) is None
