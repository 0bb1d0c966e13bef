"""local-why, local-density: trainings are told apart by all their settings, and compared by seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments.config.run import RunSettings
from experiments.figures import _local
from experiments.figures import survey_local_density as density
from experiments.figures import survey_local_why as why
from tests.conftest import there
from tests.sparsify.core.test_codes import BITS, gaussian_choice, heavy_tailed_choice, trip


def frames(losses: Mapping[str, tuple[RunSettings, float]], seeds: int = 2) -> Frames:
    """So many seeds of each training, given its settings and the loss that seed 0 ends at."""
    rows, epochs = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, (own, loss) in losses.items():
        for seed in range(seeds):
            chosen = {"method.name" if key == "method" else key: value for key, value in own.items()}
            if chosen.get("train.evaluate") == "anchor":
                del chosen["train.evaluate"]  # as records leave it out
            key = f"{name}-{seed}"
            rows.append({**chosen, "key": key, "run_id": key, "seed": seed, "steps_total": 2007})
            epochs.append({"key": key, "epoch": 9, "step": 2007, "val_loss": loss + 0.1 * seed})
    rows.append({"key": "other", "run_id": "other", "method.name": "other", "method.clip": 2.5})
    return empty()._replace(runs=runs_frame(rows), epochs=typed("epochs", pd.DataFrame(epochs)))


def of(losses: dict[str, float], seeds: int = 2) -> Frames:
    return frames({name: (_local.whole(why.VARIANTS[name]), loss) for name, loss in losses.items()}, seeds)


def test_a_training_is_told_from_all_others() -> None:
    found = of(dict.fromkeys(why.VARIANTS, 2.0))
    for name in why.VARIANTS:
        assert why.keys(found, name) == [f"{name}-0", f"{name}-1"]


def test_the_errors_of_codes_are_the_library_s_on_what_top_k_leaves() -> None:
    tensors, k = 51, 16 * 64
    drawn = {"bell": gaussian_choice, "heavy tails": heavy_tailed_choice}
    for tails, choice in drawn.items():
        values = choice(16 * tensors).view(tensors, k)
        for name, told in why.CODES.items():
            word = _local.whole(why.VARIANTS[name])["method.code"]
            read = trip(word, values.flatten(), [k] * tensors).view(tensors, k)
            errors = (read - values).square().sum(1) / values.square().sum(1)
            assert 100 * float(errors.median()) == pytest.approx(told[f"error, {tails}"], rel=5e-3, abs=1e-10)
            assert told["bits a value"] == BITS[word]


def test_tables_have_perplexity_bytes_of_a_round_and_what_codes_take_away() -> None:
    found = of({"paper": 2.0, "fp32": 1.9, "symmetric 2 bits": 1.95, "a replica": 2.1})
    sent = found.epochs.assign(step=2000, wire_bytes=300.0)  # 2000 steps are 200 rounds
    tables = {table.title: table.frame for table in why.table(found._replace(epochs=sent))}
    codes, evaluated = (
        tables["How many bits a value?"],
        tables["What is evaluated, and how fast a residual decays"],
    )
    assert list(codes["training"]) == ["paper", "fp32", "symmetric 2 bits"]
    assert list(codes["bits a value"]) == [2, 32, 2]
    assert list(codes["in a round"]) == pytest.approx([3.0] * 3)
    assert [each.value for each in codes["perplexity"]] == pytest.approx(np.exp([2.05, 1.95, 2.0]))
    assert list(evaluated.columns) == [name for name in codes if name not in why.CODES["paper"]]
    assert pd.isna(why.table(found)[0].frame["in a round"]).all()  # as 2007 steps end no round


def test_what_lies_below_is_as_far_apart_as_what_lies_above() -> None:
    names = ["DisTrOpZ", "as it ran live"]
    found = of({"paper": 2.0, "DisTrOpZ": 1.7, "as it ran live": 2.1})
    assert there(why.spread(found, names)).value == pytest.approx(0.3)
    assert there(why.least_above(found, names)).value == pytest.approx(-0.3)
    assert why.spread(found, [*names, "fp32"]) is None


def test_what_diverged_is_drawn_at_the_edge_with_its_number() -> None:
    assert why._label("clipped", why.BASE, 0.1) == "clipped"
    assert why._label("8 senders", "8 workers", 2.5) == "8 senders (over 8 workers): +2.5"
    assert why._label("clipped", why.BASE, float("nan")) == "clipped: diverged"
    found = of({"paper": 2.0, "momentum 0.9": 50.0, "momentum 0.95": 900.0, "clipped": 2.1}, seeds=3)
    lines = [line for axes in why.draw(found, "laptop").axes for line in axes.lines]
    drawn = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in lines])
    assert len(lines) == 3  # zero, an interval, the means
    assert abs(drawn).max() == why.FURTHEST


def test_the_best_density_of_each_side_counts() -> None:
    losses = dict(zip(density.DENSITIES["paper"], (2.5, 2.2, 2.1, 2.0, 2.1, 2.3, 2.05), strict=True))
    found = frames({
        f"at {share}": (_local.whole({"method.density": share}), loss) for share, loss in losses.items()
    } | {"DiLoCo": (_local.whole(density.DILOCO), 1.9)})  # fmt: skip
    assert there(density.worse_outside(found)).value == pytest.approx(0.05)
    assert there(density.below_diloco(found)).value == pytest.approx(-0.1)
