"""internet-loss: trajectories and the times of steps, put together and held against whole trainings."""

from __future__ import annotations

from itertools import product

import pytest

from analysis.records.frames import Frames
from experiments.figures import survey_internet_loss as item
from experiments.figures.survey_local_loss import MethodWithPeriod
from tests.conftest import there
from tests.figures.made_up import RecordBuilder

STEPS = 3000
LOSSES = {  # of each trained method, at each quarter of the training
    ("dense", None): [2.0, 1.5, 1.2, 1.0],
    ("topk", None): [2.5, 2.0, 1.4, 1.1],
    ("diloco", 15): [2.2, 1.8, 1.3, 1.05],
    ("sparseloco", 5): [2.0, 1.5, 1.2, 1.0],
}
SECONDS: dict[tuple[str, int | None], tuple[float, float]] = {  # of a local step, and of one with an exchange
    ("dense", None): (0, 0.6), ("dense-rings", None): (0, 0.9), ("topk", None): (0, 0.3),
    ("diloco", 15): (0.2, 0.8), ("sparseloco", 5): (0.2, 0.3),
}  # fmt: skip


def frames(launches: int = 3) -> Frames:
    """Return two seeds of each trajectory and launches with two blocks of 15 steps."""
    records = RecordBuilder()
    for ((name, every), losses), seed in product(LOSSES.items(), (0, 1)):
        settings = {
            "method.name": name, "method.every": every, "seed": seed, "cluster.where": "virtual",
            "train.validate": "epoch", "simulated": True,
        }  # fmt: skip
        quarters = enumerate(losses, 1)
        epochs = [
            {"epoch": quarter, "step": quarter * STEPS // 4, "val_loss": loss} for quarter, loss in quarters
        ]
        records.add_run(f"{(name, every)}-{seed}", settings, epochs=epochs)
    for seed, ((name, every), (local_s, exchanging_s)) in product(range(launches), SECONDS.items()):
        settings = {
            "run_id": f"timed-{seed}", "group": f"timed-{seed}", "method.every": every, "seed": seed,
            "method.name": name.removesuffix("-rings"), "cluster.where": "netns", "train.validate": "never",
            "collectives": "backend" if name == item.RINGS.name else "auto",
        }  # fmt: skip
        period = every or 1
        exchange = {"step_s": exchanging_s * (1 + 0.1 * seed), "wire_bytes": 100.0}
        local = {"step_s": local_s * (1 + 0.1 * seed), "wire_bytes": 0.0}
        steps = 30 // period * [*(period - 1) * [local], exchange]
        records.add_run(f"{name}-timed-{seed}", settings, steps, steps, block_steps=15)
    return records.frames()


def test_a_step_is_the_mean_of_those_with_an_exchange_and_those_without() -> None:
    records = frames(launches=1)
    assert there(item.mean_step_s(records, item.DENSE)).value == pytest.approx(0.6)
    assert there(item.mean_step_s(records, MethodWithPeriod("diloco", 15))).value == pytest.approx(
        0.2 + 0.6 / 15
    )
    assert item.mean_local_step_s(records) == pytest.approx(0.2)
    ratio = there(item.mean_step_ratio(frames(), item.RINGS, item.DENSE))  # paired by launch
    assert ratio[:4] == pytest.approx((1.5, 1.5, 1.5, 3))


def test_the_time_to_a_loss_is_steps_by_seconds() -> None:
    records = frames(launches=1)
    assert item.target_loss(records) == pytest.approx(1.1)
    for name, every, gain in (("dense", None, 1.0), ("topk", None, 0.6 / 0.3), ("sparseloco", 5, 0.6 / 0.22)):
        assert there(item.speedup_to_loss(records, MethodWithPeriod(name, every))).value == pytest.approx(
            gain
        )
