"""local-why, local-density: trainings are told apart by all their settings, and compared by seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments.config.run import RunSettings
from experiments.figures import _local
from experiments.figures import survey_local_density as density
from experiments.figures import survey_local_why as why
from tests.conftest import there


def frames(losses: Mapping[str, tuple[RunSettings, float]]) -> Frames:
    """Two seeds of each training, given its settings and the loss that seed 0 ends at."""
    rows, epochs = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, (own, loss) in losses.items():
        for seed in (0, 1):
            chosen = {"method.name" if key == "method" else key: value for key, value in own.items()}
            if chosen.get("train.evaluate") == "anchor":
                del chosen["train.evaluate"]  # as records leave it out
            key = f"{name}-{seed}"
            rows.append({**chosen, "key": key, "run_id": key, "seed": seed, "steps_total": 2007})
            epochs.append({"key": key, "epoch": 9, "step": 2007, "val_loss": loss + 0.1 * seed})
    rows.append({"key": "other", "run_id": "other", "method.name": "other", "method.clip": 2.5})
    return empty()._replace(runs=runs_frame(rows), epochs=typed("epochs", pd.DataFrame(epochs)))


def of(losses: dict[str, float]) -> Frames:
    return frames({name: (_local.whole(why.VARIANTS[name]), loss) for name, loss in losses.items()})


def test_a_training_is_told_from_all_others() -> None:
    found = of(dict.fromkeys(why.VARIANTS, 2.0))
    for name in why.VARIANTS:
        assert why.keys(found, name) == [f"{name}-0", f"{name}-1"]


def test_what_lies_below_is_as_far_apart_as_what_lies_above() -> None:
    names = ["DisTrOpZ", "as it ran live"]
    found = of({"paper": 2.0, "DisTrOpZ": 1.7, "as it ran live": 2.1})
    assert there(why.spread(found, names)).value == pytest.approx(0.3)
    assert there(why.least_above(found, names)).value == pytest.approx(-0.3)
    assert why.spread(found, [*names, "fp32"]) is None


def test_the_best_density_of_each_side_counts() -> None:
    losses = dict(zip(density.DENSITIES["paper"], (2.5, 2.2, 2.1, 2.0, 2.1, 2.3, 2.05), strict=True))
    found = frames({
        f"at {share}": (_local.whole({"method.density": share}), loss) for share, loss in losses.items()
    } | {"DiLoCo": (_local.whole(density.DILOCO), 1.9)})  # fmt: skip
    assert there(density.worse_outside(found)).value == pytest.approx(0.05)
    assert there(density.below_diloco(found)).value == pytest.approx(-0.1)
