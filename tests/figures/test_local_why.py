"""local-why: trainings are told apart by their settings, codes err as much as the library's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from analysis.records.frames import Frames
from experiments.figures import _local
from experiments.figures import survey_local_why as why
from tests.figures.made_up import RecordBuilder
from tests.sparsify.core.test_codes import BITS, gaussian_choice, heavy_tailed_choice, trip


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
