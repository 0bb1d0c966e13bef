"""local-loss: bytes add up over validations, methods are told apart by H, and losses are paired by seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from analysis.stats import Value
from experiments import figures
from experiments.figures import _local
from experiments.figures import survey_local_loss as item
from experiments.figures.runs import configs_of, more_configs_of
from tests.conftest import there

SEEDS, EPOCHS, STEPS = (0, 1, 2), 4, 30
# Loss at the end of seed 0, and bytes of a worker and step.
METHODS: dict[tuple[str, int | None], tuple[float, float]] = {
    ("dense", None): (2.0, 3e6), ("topk", None): (2.2, 1e5), ("demo", None): (2.1, 5e4),
    ("diloco", 5): (2.01, 6e5), ("diloco", 30): (2.02, 1e5), ("sparseloco", 5): (2.3, 2e3),
    ("sparseloco", 30): (1.9, 300.0),
}  # fmt: skip


def frames() -> Frames:
    rows, epochs = list[dict[str, Any]](), list[dict[str, Any]]()
    for (name, every), (loss, sent) in METHODS.items():
        for seed in SEEDS:
            key = f"{name}-{every}-{seed}"
            rows.append({
                "key": key, "run_id": key, "seed": seed, "task.name": "gpt_ptbchars", "workers": 4,
                "method.name": name, "method.every": every, "steps_total": EPOCHS * STEPS, "simulated": True,
                "timing.mode": "production", "train.validate": "epoch", "task.lr": 0.003,
            })  # fmt: skip
            epochs += [
                {
                    "key": key, "epoch": epoch, "step": epoch * STEPS, "wire_bytes": sent, "val_top1": 40.0,
                    "val_loss": (loss + 0.1 * seed) * (1 + EPOCHS - epoch),
                }
                for epoch in range(1, EPOCHS + 1)
            ]  # fmt: skip
    return empty()._replace(runs=runs_frame(rows), epochs=typed("epochs", pd.DataFrame(epochs)))


def test_bytes_add_up_over_validations() -> None:
    of = frames()
    assert list(item.sent_mb(of, item.keys(of, "dense"))) == [90.0, 180.0, 270.0, 360.0]
    assert item.sent(of, item.keys(of, "sparseloco", 30)) == pytest.approx(0.036)


def test_losses_are_compared_at_the_same_period_and_paired_by_seed() -> None:
    of = frames()
    assert there(item.loss_over(of, "diloco", 30)).value == pytest.approx(1.01, abs=0.001)
    assert there(item.loss_over(of, "demo", None)).value == pytest.approx(1.05, abs=0.003)
    assert there(item.below_diloco(of, 5)).value == pytest.approx(-0.29)
    assert there(item.below_diloco(of, 30)).value == pytest.approx(0.12)
    assert item.below_diloco(of, 15) is None


def test_verdicts_follow_from_the_losses() -> None:
    words = {found.claim.id: found.word for found in figures.judge("local-loss", frames())}
    assert words["local-loss.as-good-at-30.30"] in ("reproduced", "post hoc")
    assert words["local-loss.sparseloco-below.15"] == "not run"


def test_picture_and_table_have_every_method_and_period() -> None:
    of = frames()
    assert len(item.draw(of, "laptop").axes) == 2
    methods = list(item.table(of)[0].frame["method"])
    assert methods[0] == "AdamW, every step"
    assert "SparseLoCo, H = 30" in methods
    assert len(methods) == len(METHODS)


def test_what_is_sent_stands_by_step_and_by_round_and_rounds_are_told() -> None:
    of = frames()
    ends, sent = (table.frame.set_index("method") for table in item.table(of))
    assert ends["perplexity"]["DiLoCo, H = 30"].value == pytest.approx(np.exp(2.12))
    assert sent["in a step"]["DiLoCo, H = 30"] == pytest.approx(100.0)
    assert sent["in a round"]["DiLoCo, H = 30"] == pytest.approx(3000.0)
    assert sent["rounds"]["DiLoCo, H = 30"] == EPOCHS * STEPS // 30
    assert sent["messages in a round"].isna().all()  # these records have none
    assert np.isnan(sent["in a round"]["AdamW, every step"])
    assert (
        item.facts(of)["rounds"]
        == "24 with H = 5 and 4 with H = 30, fewer than the 200 aimed at with H = 5 and 30"
    )


@pytest.mark.parametrize("profile", ["smoke", "laptop", "paper"])
def test_every_method_and_period_is_trained_with_each_seed(profile: str) -> None:
    first, more = (list(of("local-loss", profile)) for of in (configs_of, more_configs_of))
    per_seed = 3 + 2 * len(item.EVERY[profile])
    assert len(first) == per_seed * len(item.SEEDS[profile])
    assert len(more) == per_seed * len(item.MORE_SEEDS[profile])


def test_two_seeds_that_say_little_have_a_perplexity_without_an_interval() -> None:
    assert _local._perplexity(Value(2.0, 1.0, 1e4)) == Value(np.exp(2.0), floor=1.0)
    assert _local._perplexity(Value(2.0, 1.0, 3.0)) == Value(np.exp(2.0), np.e, np.exp(3.0), floor=1.0)
