"""Feedback: what stays in the residual."""

from __future__ import annotations

import pytest
import torch

import sparsify
from sparsify import feedback as feedbacks
from sparsify.feedback import ErrorFeedback, LowPass, MomentumCorrection
from sparsify.types import Delivery, Sparse
from tests.sparsify.laws import live, mass


def sparse(*pairs: tuple[int, float]) -> Sparse:
    indices, values = zip(*pairs, strict=True)
    return Sparse(torch.tensor(indices), torch.tensor(values))


def delivery(*pairs: tuple[int, float]) -> Delivery:
    return Delivery([], [sparse(*pairs)])


def test_error_feedback_owes_what_was_not_delivered() -> None:
    feedback, grad = ErrorFeedback(), torch.tensor([1.0, 2.0, 3.0])
    residual = feedback.init(grad)
    feedback.accumulate(grad, 1.0, residual)
    feedback.retain(delivery((2, 3.0)), residual)
    assert feedback.accumulate(grad, 1.0, residual).tolist() == [2.0, 4.0, 3.0]
    assert grad.tolist() == [1.0, 2.0, 3.0]


def test_what_rounding_took_away_is_owed_too() -> None:
    feedback, grad = ErrorFeedback(), torch.tensor([1.0, 2.0])
    residual = feedback.init(grad)
    feedback.accumulate(grad, 1.0, residual)
    feedback.retain(delivery((1, 1.75)), residual)
    assert residual.tolist() == [1.0, 0.25]


def test_the_two_domains_differ_when_the_learning_rate_decays() -> None:
    """A residual left at rate 1 counts at 1 in the learning-rate domain, and at 0.1 in the gradient's."""
    grad, rates = torch.tensor([1.0]), (1.0, 0.1)
    steps: dict[str, float] = {}
    for name in ("gradient", "learning_rate"):
        feedback = feedbacks.named(name)
        state = feedback.init(grad)
        feedback.accumulate(grad, rates[0], state)  # nothing delivered
        feedback.retain(Delivery([], []), state)
        steps[name] = rates[1] * feedback.accumulate(grad, rates[1], state).item()
    assert steps["gradient"] == pytest.approx(0.1 * 2)
    assert steps["learning_rate"] == pytest.approx(1.0 + 0.1)


def test_at_rate_0_the_learning_rate_domain_waits() -> None:
    """Schedules begin and end there: nothing can be applied, so nothing is delivered, and nothing is lost."""
    feedback = feedbacks.named("learning_rate")
    state = feedback.init(torch.ones(2))
    feedback.accumulate(torch.tensor([3.0, 4.0]), 0.5, state)
    feedback.retain(delivery((1, 4.0)), state)
    acc = feedback.accumulate(torch.ones(2), 0.0, state)
    assert acc.tolist() == [0.0, 0.0]
    feedback.retain(delivery((0, acc[0].item())), state)
    assert feedback.accumulate(torch.ones(2), 0.25, state).tolist() == [3 * 0.5 / 0.25 + 1, 1.0]
    with pytest.raises(ValueError, match=r"lr=-0.1; keep it at or above 0"):
        feedback.accumulate(torch.ones(2), -0.1, state)


def test_the_low_pass_filter_keeps_a_share_of_what_is_new() -> None:
    feedback = LowPass(beta=0.25)
    state = feedback.init(torch.zeros(2))
    state.residual.copy_(torch.tensor([4.0, 4.0]))
    acc = feedback.accumulate(torch.tensor([8.0, 8.0]), 1.0, state)
    assert acc.tolist() == [12.0, 12.0]
    feedback.retain(delivery((1, 12.0)), state)
    assert state.residual.tolist() == [0.75 * 4 + 0.25 * 12, 0.75 * 4]


def test_momentum_correction_masks_both_memories() -> None:
    feedback = MomentumCorrection(0.5)
    state = feedback.init(torch.zeros(2))
    for _ in range(2):
        acc = feedback.accumulate(torch.tensor([1.0, 1.0]), 1.0, state)
    assert acc.tolist() == [2.5, 2.5]  # u: 1, 1.5
    feedback.retain(delivery((0, 2.5)), state)
    assert state.residual.tolist() == [0.0, 2.5]
    assert state.momentum.tolist() == [0.0, 1.5]


def test_algorithm_1_of_eghlidi_and_jaggi_read_literally_overshoots_and_takes_it_back() -> None:
    """Its line 9 does not average, so the first update is P times the one of the text's reading; its line 11
    leaves everybody else's selection, negative, in each residual. Altogether nothing is lost.
    """
    size = 4
    literal, text = (sparsify.build("topk", density=0.05, feedback=f) for f in ("literal", "learning_rate"))
    torch.testing.assert_close(*mass(live(literal, size, steps=10)), rtol=1e-9, atol=1e-9)
    ours, theirs = live(text, size, steps=1), live(literal, size, steps=1)
    torch.testing.assert_close(theirs[0].updates[0], size * ours[0].updates[0])
    sent_by_all = theirs[0].updates[0]
    for rank in theirs:
        torch.testing.assert_close(rank.residual, rank.gradients[0] - sent_by_all)
