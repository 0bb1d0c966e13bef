"""Feedback: what stays in the residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsify
from sparsify import feedback as feedbacks
from sparsify.feedback import LowPass, MomentumCorrection
from sparsify.types import Delivery, SparseVector
from tests.sparsify.laws import check_laws, live

# Gradient, learning rate, what it comes to with the residual, what of it is delivered by index.
Steps = list[tuple[list[float], float, list[float], dict[int, float]]]
BY_HAND: dict[str, tuple[Any, Steps]] = {
    "what was not delivered is owed, and what rounding took away": (
        feedbacks.FEEDBACKS["gradient"],
        [
            ([1.0, 2.0, 3.0], 1.0, [1.0, 2.0, 3.0], {2: 3.0, 1: 1.75}),
            ([1.0, 2.0, 3.0], 0.1, [2.0, 2.25, 3.0], {}),
            ([0.0, 0.0, 0.0], 0.0, [2.0, 2.25, 3.0], {}),
        ],
    ),
    # Schedules begin and end there: nothing can be applied, so nothing is delivered, and nothing is lost.
    "at rate 0 the learning rate's domain waits": (
        feedbacks.FEEDBACKS["learning_rate"],
        [
            ([3.0, 4.0], 0.5, [3.0, 4.0], {1: 4.0}),
            ([1.0, 1.0], 0.0, [0.0, 0.0], {0: 0.0}),
            ([1.0, 1.0], 0.25, [3 * 0.5 / 0.25 + 1, 1.0], {}),
        ],
    ),
    "a low-pass filter keeps a share of what is new": (
        LowPass(beta=0.25),
        [
            ([16.0, 16.0], 1.0, [16.0, 16.0], {}),
            ([8.0, 8.0], 1.0, [4 + 8.0, 4 + 8.0], {1: 12.0}),
            ([0.0, 0.0], 1.0, [0.75 * 4 + 0.25 * 12, 0.75 * 4], {}),
        ],
    ),
    # u: 1, 1.5, then 0.75 and 0
    "momentum correction masks both memories": (
        MomentumCorrection(0.5),
        [
            ([1.0, 1.0], 1.0, [1.0, 1.0], {}),
            ([1.0, 1.0], 1.0, [2.5, 2.5], {0: 2.5}),
            ([0.0, 0.0], 1.0, [0.0, 2.5 + 0.75], {}),
        ],
    ),
}


@pytest.mark.parametrize("law", BY_HAND)
def test_residuals_are_those_by_hand(law: str) -> None:
    feedback, steps = BY_HAND[law]
    state = feedback.init(torch.zeros(len(steps[0][0])))
    for gradient, rate, expected, delivered in steps:
        given = torch.tensor(gradient)
        assert feedback.accumulate_in_gradient_units(given, rate, state).tolist() == pytest.approx(expected)
        assert given.tolist() == gradient or isinstance(feedback, LowPass)
        indices = torch.tensor(list(delivered), dtype=torch.int64)
        part = SparseVector(indices, torch.tensor(list(delivered.values())))
        feedback.retain_undelivered(Delivery([], [part] if delivered else []), state)


def test_a_negative_rate_is_refused() -> None:
    feedback = feedbacks.FEEDBACKS["learning_rate"]
    with pytest.raises(ValueError, match=r"lr=-0.1; keep it at or above 0"):
        feedback.accumulate_in_gradient_units(torch.ones(2), -0.1, feedback.init(torch.ones(2)))


def test_algorithm_1_of_eghlidi_and_jaggi_read_literally_overshoots_and_takes_it_back() -> None:
    """Line 9 of the algorithm does not average, so the first update is P times the one of the text's reading.

    Its line 11 leaves everybody else's selection, negative, in each residual. Altogether nothing is lost.
    """
    literal, text = (sparsify.build("topk", density=0.05, feedback=f) for f in ("literal", "learning_rate"))
    check_laws(literal, live(literal, 4, steps=10))
    ours, theirs = (live(method, 4, steps=1) for method in (text, literal))
    torch.testing.assert_close(theirs[0].updates[0], 4 * ours[0].updates[0])
    for rank in theirs:
        torch.testing.assert_close(rank.residual, rank.gradients[0] - theirs[0].updates[0])
