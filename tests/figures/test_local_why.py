"""local-why: codes err as much as the library's."""

from __future__ import annotations

import pytest

from experiments.figures import survey_local_why as why
from tests.sparsify.core.test_codes import BITS, gaussian_choice, heavy_tailed_choice, trip


def test_the_errors_of_codes_are_the_library_s_on_what_top_k_leaves() -> None:
    tensors, k = 51, 16 * 64
    for tails, choice in (("bell", gaussian_choice), ("heavy tails", heavy_tailed_choice)):
        values = choice(16 * tensors).view(tensors, k)
        for name, published in why.CODES.items():
            word = why.TRAININGS.settings_by_name[name]["method.code"]
            read = trip(word, values.flatten(), [k] * tensors).view(tensors, k)
            errors = (read - values).square().sum(1) / values.square().sum(1)
            assert 100 * float(errors.median()) == pytest.approx(
                published[f"error, {tails}"], rel=5e-3, abs=1e-10
            )
            assert published["bits a value"] == BITS[word]
