"""local-loss, local-why, local-density: trainings are told apart by their settings and compared by seed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest

from analysis.records.frames import Frames
from experiments.figures import _local
from experiments.figures import survey_local_loss as loss
from experiments.figures import survey_local_why as why
from tests.conftest import there
from tests.figures.made_up import RecordBuilder, verdicts
from tests.sparsify.core.test_codes import BITS, gaussian_choice, heavy_tailed_choice, trip

# --- local-loss

EPOCHS, STEPS = 4, 30
# Loss at the end of seed 0, and bytes of a worker and step.
METHODS: dict[tuple[str, int | None], tuple[float, float]] = {
    ("dense", None): (2.0, 3e6), ("topk", None): (2.2, 1e5), ("demo", None): (2.1, 5e4),
    ("diloco", 5): (2.01, 6e5), ("diloco", 30): (2.02, 1e5), ("sparseloco", 5): (2.3, 2e3),
    ("sparseloco", 30): (1.9, 300.0),
}  # fmt: skip


@pytest.fixture
def trained() -> Frames:
    """Return trainings of all methods and periods with three seeds."""
    records = RecordBuilder({
        "task.name": "gpt_ptbchars", "task.lr": 0.003, "workers": 4, "steps_total": EPOCHS * STEPS,
        "simulated": True, "timing.mode": "production", "train.validate": "epoch",
    })  # fmt: skip
    for ((name, every), (end, sent)), seed in product(METHODS.items(), range(3)):
        epochs = [
            {
                "epoch": epoch, "step": epoch * STEPS, "wire_bytes": sent, "val_top1": 40.0,
                "val_loss": (end + 0.1 * seed) * (1 + EPOCHS - epoch),
            }
            for epoch in range(1, EPOCHS + 1)
        ]  # fmt: skip
        settings = {"method.name": name, "method.every": every, "seed": seed}
        records.add_run(f"{name}-{every}-{seed}", settings, epochs=epochs)
    return records.frames()


def test_losses_are_compared_at_the_same_period_and_paired_by_seed(trained: Frames) -> None:
    for name, every, expected in (("diloco", 30, 1.01), ("demo", None, 1.05)):
        assert there(loss.loss_over(trained, name, every)).value == pytest.approx(expected, abs=0.003)
    for every, expected in ((5, -0.29), (30, 0.12)):
        assert there(loss.below_diloco(trained, every)).value == pytest.approx(expected)
    assert loss.below_diloco(trained, 15) is None
    judged = verdicts("local-loss", trained)
    assert judged["as-good-at-30.30"].word in ("reproduced", "post hoc")
    assert judged["sparseloco-below.15"].word == "not run"


def test_bytes_add_up_over_validations_and_rounds_are_told(trained: Frames) -> None:
    assert list(loss.sent_mb(trained, loss.keys(trained, "dense"))) == [90.0, 180.0, 270.0, 360.0]
    assert loss.sent(trained, loss.keys(trained, "sparseloco", 30)) == pytest.approx(0.036)
    said = "24 with H = 5 and 4 with H = 30, fewer than the 200 aimed at with H = 5 and 30"
    assert loss.facts(trained)["rounds"] == said


# --- local-why and local-density


def variants(losses: Mapping[str, float], seeds: int = 2) -> Frames:
    """Return so many seeds of trainings, given by their names and the loss that seed 0 ends at."""
    records = RecordBuilder({"steps_total": 2007})
    for (name, end), seed in product(losses.items(), range(seeds)):
        settings = {**_local.whole(why.VARIANTS[name]), "seed": seed}
        settings["method.name"] = settings.pop("method")
        if settings.get("train.evaluate") == "anchor":
            del settings["train.evaluate"]  # as records leave it out
        last = {"epoch": 9, "step": 2007, "val_loss": end + 0.1 * seed}
        records.add_run(f"{name}-{seed}", settings, epochs=[last])
    records.add_run("other", {"method.name": "other", "method.clip": 2.5})
    return records.frames()


def test_a_training_is_told_from_all_others() -> None:
    found = variants(dict.fromkeys(why.VARIANTS, 2.0))
    for name in why.VARIANTS:
        assert why.keys(found, name) == [f"{name}-0", f"{name}-1"]


def test_the_errors_of_codes_are_the_library_s_on_what_top_k_leaves() -> None:
    tensors, k = 51, 16 * 64
    for tails, choice in (("bell", gaussian_choice), ("heavy tails", heavy_tailed_choice)):
        values = choice(16 * tensors).view(tensors, k)
        for name, told in why.CODES.items():
            word = _local.whole(why.VARIANTS[name])["method.code"]
            read = trip(word, values.flatten(), [k] * tensors).view(tensors, k)
            errors = (read - values).square().sum(1) / values.square().sum(1)
            assert 100 * float(errors.median()) == pytest.approx(told[f"error, {tails}"], rel=5e-3, abs=1e-10)
            assert told["bits a value"] == BITS[word]


def test_what_diverged_is_drawn_at_the_edge_with_its_number() -> None:
    assert why._label("8 senders", "8 workers", 2.5) == "8 senders (over 8 workers): +2.5"
    assert why._label("clipped", why.BASE, float("nan")) == "clipped: diverged"
    found = variants({"paper": 2.0, "momentum 0.9": 50.0, "momentum 0.95": 900.0, "clipped": 2.1}, seeds=3)
    lines = [line for axes in why.draw(found, "laptop").axes for line in axes.lines]
    drawn = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in lines])
    assert len(lines) == 3  # zero, an interval, the means
    assert abs(drawn).max() == why.FURTHEST
