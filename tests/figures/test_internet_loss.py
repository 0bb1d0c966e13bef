"""internet-loss: trajectories and the times of steps, put together and held against whole trainings."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments.figures import survey_internet_loss as item
from tests.conftest import there

STEPS = 3000
LOSSES = {  # of each trained method, at each tenth of the training
    ("dense", None): [2.0, 1.5, 1.2, 1.0],
    ("topk", None): [2.5, 2.0, 1.4, 1.1],
    ("diloco", 15): [2.2, 1.8, 1.3, 1.05],
    ("sparseloco", 5): [2.0, 1.5, 1.2, 1.0],
}
SECONDS: dict[item.Compared, tuple[float | None, float]] = {  # of a local step, and of one with an exchange
    ("dense", None): (None, 0.6), ("dense-rings", None): (None, 0.9), ("topk", None): (None, 0.3),
    ("diloco", 15): (0.2, 0.8), ("sparseloco", 5): (0.2, 0.3),
}  # fmt: skip


def frames(whole: float | None = None, launches: int = 3) -> Frames:
    """Two seeds of each trajectory, launches with two blocks of ten steps; and a training in real time whose
    steps take so much longer than they are composed to.
    """
    rows, epochs, steps = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()

    def trained(key: str, each: item.Compared, seed: int, where: str, step_s: float = 0.0) -> None:
        name, every = each
        rows.append({
            "key": key, "run_id": key, "method.name": name, "method.every": every, "seed": seed,
            "cluster.where": where, "train.validate": "epoch", "simulated": where == "virtual",
        })  # fmt: skip
        for at, loss in enumerate(LOSSES[each], 1):
            step = at * STEPS // len(LOSSES[each])
            epochs.append({"key": key, "epoch": at, "step": step, "val_loss": loss, "wall_s": step * step_s})

    for each in LOSSES:
        for seed in (0, 1):
            trained(f"{each}-{seed}", each, seed, "virtual")
    if whole:
        trained("whole", ("diloco", 15), 0, "netns", whole * (0.2 + 0.6 / 15))
    for seed in range(launches):
        for (name, every), (local_s, exchanging_s) in SECONDS.items():
            key = f"{name}-timed-{seed}"
            rows.append({
                "key": key, "run_id": f"timed-{seed}", "group": f"timed-{seed}", "method.every": every,
                "method.name": name.removesuffix("-rings"), "seed": seed, "cluster.where": "netns",
                "train.validate": "never", "timing.warmup_steps": 0, "simulated": False,
                "collectives": "backend" if name == item.RINGS else "auto",
            })  # fmt: skip
            for step in range(30):
                exchanges = local_s is None or step % (every or 1) == (every or 1) - 1
                took = (exchanging_s if exchanges or local_s is None else local_s) * (1 + 0.1 * seed)
                steps += [
                    {"key": key, "rank": rank, "step": step, "epoch": 0, "block": step // 15, "step_s": took,
                     "wire_bytes": 100.0 * exchanges} for rank in (0, 1)
                ]  # fmt: skip
    tables = {"epochs": epochs, "steps": steps}
    typed_tables = {name: typed(name, pd.DataFrame(table)) for name, table in tables.items()}
    return empty()._replace(runs=runs_frame(rows), **typed_tables)


def test_a_step_is_the_mean_of_those_with_an_exchange_and_those_without() -> None:
    found = frames(launches=1)
    assert there(item.step_s(found, "dense", None)).value == pytest.approx(0.6)
    assert there(item.step_s(found, "diloco", 15)).value == pytest.approx(0.2 + 0.6 / 15)
    assert item.step_s(found, "diloco", 30) is None
    assert item.computing_s(found) == pytest.approx(0.2)


def test_ratios_of_steps_are_paired_by_launch() -> None:
    ratio = there(item.times(frames(), ("dense-rings", None), ("dense", None)))
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == pytest.approx((1.5, 1.5, 1.5, 3))


def test_the_time_to_a_loss_is_steps_by_seconds() -> None:
    found = frames(launches=1)
    assert item.target(found) == pytest.approx(1.1)
    gains = {each: there(item.times_as_soon(found, each)).value for each in LOSSES}
    assert gains["dense", None] == pytest.approx(1.0)
    assert gains["topk", None] == pytest.approx(0.6 / 0.3)  # after as many steps
    assert gains["sparseloco", 5] == pytest.approx(0.6 / 0.22)
    # Where it does not get there, dense is ahead, whatever its steps take.
    late = found._replace(epochs=found.epochs.assign(val_loss=lambda t: t["val_loss"].clip(lower=1.15)))
    late.epochs.loc[late.epochs["key"].str.startswith("('dense'"), "val_loss"] -= 0.1
    assert there(item.times_as_soon(late, ("topk", None), 5.0)).value == 0.0


def test_only_what_was_trained_and_timed_is_compared() -> None:
    assert item.compared(frames()) == [
        ("dense", None), ("dense-rings", None), ("topk", None), ("diloco", 15), ("sparseloco", 5),
    ]  # fmt: skip
    assert item.compared(empty()) == []
    assert item.times_as_soon(empty(), ("topk", None)) is None


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_a_training_in_real_time_tells_what_the_composition_is_worth(slower: float) -> None:
    found = frames(slower, launches=1)
    assert there(item.worst(found)).value == pytest.approx(100 * (1 - 1 / slower))
    assert item.worst(frames()) is None
    titles = [table.title for table in item.table(found)]
    assert titles[-1] == "Whole trainings in real time"
    assert item.table(frames())[-1].title == "Steps"


def test_times_are_said_of_the_link_and_not_called_simulated() -> None:
    (rings,) = [claim for claim in item.claims() if claim.id.endswith("rings")]
    others = [claim for claim in item.claims() if claim.id.startswith("sooner")]
    assert rings.link == "internet_100m_50ms"
    assert not rings.derived
    assert all(claim.derived and claim.timed for claim in others)
    assert len(others) == len(item.COMPARED) - 2
