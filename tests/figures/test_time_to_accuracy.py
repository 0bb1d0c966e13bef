"""time-to-accuracy: when whole trainings reach a share of what dense ends at, in seconds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Verdict
from analysis.records.frames import Frames, empty, runs_frame, typed
from analysis.stats import Value
from analysis.times.reaching import Reached, reached, seconds_to, sooner, steps_to
from experiments import figures
from experiments.figures import survey_time_to_accuracy as item
from experiments.figures.runs import configs_of, more_configs_of
from tests.conftest import there

EVERY, EPOCHS = 49, 12
SEEDS = (0, 1, 2)
STEP_S = {item.DENSE: 0.4, item.TOPK: 0.1}
# % of top-1 that an epoch adds, up to the end
GAINS, ENDS = {item.DENSE: 10.0, item.TOPK: 8.0}, {item.DENSE: 80.0, item.TOPK: 90.0}


def frames(ends: dict[str, float] | None = None, step_s: dict[str, float] | None = None) -> Frames:
    """Trainings of both methods, validated every epoch; seeds end 1 % apart."""
    rows, epochs = list[dict[str, Any]](), list[dict[str, Any]]()
    highest, took = ENDS | (ends or {}), STEP_S | (step_s or {})
    for name, gain in GAINS.items():
        for seed in SEEDS:
            key = f"{name}-{seed}"
            rows.append({
                "key": key, "run_id": key, "seed": seed, "task.name": "slimvgg_cifar10",
                "task.batch_size": 32, "workers": 2, "method.name": name.partition("-")[0],
                "method.scope": "global" if name == item.TOPK else 1.0,
                "method.density": None if name == item.DENSE else 0.01, "overlap": name == item.DENSE,
                "select": "fused" if name == item.TOPK else "auto", "simulated": False,
                "cluster.where": "netns", "cluster.link.name": item.LINK, "task.lr_milestones": "[35, 53]",
                "cluster.link.beta_s_per_byte": 4e-8, "provenance.machine.link.together_gbit_s": 0.15,
                "train.validate": "epoch", "timing.mode": "production", "train.validate_every": 1,
                "steps_total": EPOCHS * EVERY, "provenance_json": json.dumps({}),
            })  # fmt: skip
            epochs += [
                {
                    "key": key, "epoch": epoch, "step": epoch * EVERY, "val_loss": 1.0,
                    "wall_s": epoch * EVERY * took[name], "val_top1": min(highest[name] + seed, gain * epoch),
                }
                for epoch in range(1, EPOCHS + 1)
            ]  # fmt: skip
    return empty()._replace(runs=runs_frame(rows), epochs=typed("epochs", pd.DataFrame(epochs)))


def judged(of: Frames) -> Verdict:
    (found,) = figures.judge("time-to-accuracy", of)
    return found


def test_both_train_alike_but_for_what_they_exchange() -> None:
    for profile in ("smoke", "laptop", "paper"):
        dense, sparse = (config.as_dict() for config in configs_of("time-to-accuracy", profile)[:2])
        assert dense["overlap"]
        assert not sparse["overlap"]
        assert sparse["select"] == "fused"
        assert sparse["method"]["density"] == 0.01
        assert {"task", "train", "workers", "seed", "cluster"} <= {
            name for name in dense if dense[name] == sparse[name]
        }
    seeds = {
        config["seed"] for of in (configs_of, more_configs_of) for config in of("time-to-accuracy", "laptop")
    }
    assert seeds == {0, 1, 2, 3, 4}


def test_the_target_is_a_share_of_what_dense_ends_at() -> None:
    assert item.target(frames()) == pytest.approx(0.98 * 81)
    assert item.target(frames(), 50) == pytest.approx(0.5 * 81)
    assert item.target(empty()) is None


@pytest.mark.usefixtures("one_launch_decides")
def test_times_are_seconds_paired_by_seed() -> None:
    """79.4 % is there after 8 epochs of dense and 10 of Top-k, which are four times as short."""
    value = there(judged(frames()).ours)
    assert value.value == pytest.approx(8 * 0.4 / (10 * 0.1))
    assert [value.low, value.high] == pytest.approx([7 * 0.4 / (10 * 0.1), 8 * 0.4 / (9 * 0.1)])
    slow = there(judged(frames(step_s={item.TOPK: 0.8})).ours)
    assert slow.value == pytest.approx(8 * 0.4 / (10 * 0.8))


def test_the_link_is_told_as_it_was_found() -> None:
    assert judged(frames()).claim.text.startswith("over 0.15 Gbit/s (asked: 0.2), Top-k")
    assert "over 0.15 Gbit/s (asked: 0.2)" in figures.caption("time-to-accuracy", frames(), "laptop")


def test_who_never_gets_there_is_not_sooner_and_is_named() -> None:
    never = frames(ends={item.TOPK: 70.0})
    assert there(judged(never).ours).value == 0
    said = figures.caption("time-to-accuracy", never, "laptop")
    assert "*Not all get there*: Top-k 0.01, fused with seed 0, Top-k 0.01, fused with seed 1 and" in said
    assert "Not all" not in figures.caption("time-to-accuracy", frames(ends={item.DENSE: 80.0}), "laptop")
    times, _ = item.table(never)
    assert times.frame["Top-k 0.01, fused"][0] is None
    assert times.frame["seeds that get there"][0] == "3 of 3 and 0 of 3"


def test_picture_and_tables_have_all_targets() -> None:
    figure = item.draw(frames(), "laptop")
    assert [axes.get_xlabel() for axes in figure.axes] == ["Minutes of training", "Optimiser steps"]
    times, ends = figures.tables("time-to-accuracy", frames())
    assert list(times.frame["top-1"]) == ["98 % of dense's end (79.4)", "50", "60", "65", "70", "74"]
    assert there(ends.frame["step"][0]).value == pytest.approx(1e3 * STEP_S[item.DENSE])
    with pytest.raises(ValueError, match="nothing to draw"):
        item.draw(empty(), "laptop")
    assert judged(empty()).word == "not run"


# --- when a curve gets somewhere
# ------------------------------------------------------------------------------------


def test_the_first_step_that_is_there_counts_and_the_one_before_is_told() -> None:
    assert reached([10, 20, 30], [50.0, 61.0, 59.0], 60) == (10, 20)
    assert reached([10, 20, 30], [3.0, 2.0, 2.5], 2.0, falls=True) == (10, 20)
    assert reached([10, 20], [5.0, 1.0], 3) == (0, 10)
    assert reached([10, 20], [1.0, 2.0], 3) == (20, np.inf)


def test_steps_are_counted_by_seed() -> None:
    keys = [f"{item.TOPK}-{seed}" for seed in (0, 2)]
    assert steps_to(frames(), keys, "val_top1", 70.0) == dict.fromkeys((0, 2), (8 * EVERY, 9 * EVERY))
    seconds = steps_to(frames(), keys, "val_top1", 70.0, by="wall_s")
    assert seconds[2] == pytest.approx((8 * EVERY * 0.1, 9 * EVERY * 0.1))


CERTAIN = Value(2.0, 1.9, 2.1, 50, "blocks")  # of step times
NEVER = Reached(900, np.inf)


def test_ratios_are_paired_by_seed() -> None:
    slow = {0: Reached(90, 100), 1: Reached(190, 200), 2: Reached(390, 400)}
    fast = {2: Reached(190, 200), 0: Reached(45, 50), 1: Reached(95, 100)}
    value = there(sooner(slow, fast, CERTAIN))
    assert value.value == pytest.approx(4)
    assert value.n == 3
    assert sooner({0: NEVER}, {0: NEVER}, CERTAIN) is None
    assert sooner({0: NEVER}, {1: Reached(0, 10)}, CERTAIN) is None


def test_seeds_that_get_there_at_the_same_validation_are_not_certain() -> None:
    slow, fast = (dict.fromkeys(SEEDS, Reached(*ends)) for ends in ((200, 300), (100, 200)))
    value = there(sooner(slow, fast, CERTAIN))
    assert value.value == pytest.approx(3)
    assert [value.low, value.high] == pytest.approx([1.9 * 200 / 200, 2.1 * 300 / 100])
    undecided = there(sooner(slow, fast, Value(2.0)))
    assert (round(undecided.value, 9), undecided.low, undecided.n) == (3, None, 3)
    seconds = there(seconds_to(slow, 0.5))
    assert [seconds.value, seconds.low, seconds.high] == pytest.approx([150, 100, 150])


def test_who_gets_there_at_the_first_validation_may_have_done_so_at_once() -> None:
    slow, fast = (dict.fromkeys(SEEDS, Reached(*ends)) for ends in ((200, 300), (0, 100)))
    value = there(sooner(slow, fast, CERTAIN))
    assert [value.low, value.high] == pytest.approx([1.9 * 2, np.inf])


def test_who_does_not_get_there_might_have_after_the_last_validation() -> None:
    arrived, never = dict.fromkeys(SEEDS, Reached(200, 300)), dict.fromkeys(SEEDS, NEVER)
    value = there(sooner(arrived, never, CERTAIN))
    assert [value.value, value.low, value.high] == pytest.approx([0, 0, 2.1 * 300 / 900])
    value = there(sooner(never, arrived, CERTAIN))
    assert [value.value, value.low, value.high] == pytest.approx([np.inf, 1.9 * 900 / 300, np.inf])


def test_a_mean_time_needs_every_seed() -> None:
    assert seconds_to({0: Reached(5, 10), 1: NEVER}, 0.5) is None
    assert seconds_to({}, 0.5) is None
    value = there(seconds_to({0: Reached(5, 10)}, 0.5))
    assert value.value == pytest.approx(5)
    assert value.low is None
