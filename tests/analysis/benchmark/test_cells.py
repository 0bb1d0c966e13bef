"""Scores of made-up curves whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.benchmark.cells import (
    SHARES,
    Curves,
    LevelScore,
    PairedStepSeconds,
    choose_word,
    decide_together,
    score_levels,
    steps_to_level,
)
from tests.analysis.benchmark.cells import cell

STEPS = np.arange(30.0, 601.0, 30.0)
LAUNCHES = np.array([0.99, 1.0, 1.0, 1.0, 1.01])
SEEDS = np.array([[-0.02], [-0.01], [0.0], [0.01], [0.02]])


def loss_after(steps: np.ndarray) -> np.ndarray:
    """Return losses that fall by a thousandth a step: straight, so that interpolating them is exact."""
    return 3.0 - 1e-3 * steps


DENSE = Curves(STEPS, loss_after(STEPS) + SEEDS)
ALIKE = PairedStepSeconds(LAUNCHES, LAUNCHES)
TWICE = PairedStepSeconds(LAUNCHES, 0.5 * LAUNCHES)


def words_of(scores: list[LevelScore]) -> list[str]:
    return [score.word for score in scores]


def test_half_the_steps_or_half_the_seconds_is_faster_by_2_at_every_level() -> None:
    in_steps = Curves(STEPS, loss_after(2 * STEPS) + SEEDS)
    longer = Curves(2 * STEPS, loss_after(2 * STEPS) + SEEDS)
    # In half the seconds it is at the last level when its training ends, and not below it.
    for own, speed, last_word in (
        (in_steps, ALIKE, "faster"),
        (DENSE, TWICE, "inconclusive"),
        (longer, TWICE, "faster"),
    ):
        scores = score_levels(DENSE, own, speed)
        assert [score.share for score in scores] == [*SHARES]
        assert words_of(scores) == [*["faster"] * 4, last_word]
        for score in scores:
            assert score.speedup is not None
            assert score.speedup.value == pytest.approx(2)
            assert score.speedup.interval == pytest.approx((2, 2)), "seeds and launches are the same"
            assert score.loss == pytest.approx(3 - 0.6 * score.share)
            assert score.seconds == pytest.approx(600 * score.share / 2)
    words = ["slower", "slower", "slower (censored)", "slower (censored)", "not reached"]
    assert words_of(score_levels(in_steps, DENSE, ALIKE)) == words


def test_what_never_reaches_a_level_is_slower_only_if_its_budget_took_longer() -> None:
    flat = Curves(STEPS, np.full_like(DENSE.losses, 2.9) + SEEDS)
    quick, slow = (score_levels(DENSE, flat, PairedStepSeconds(LAUNCHES, s * LAUNCHES)) for s in (0.1, 2.0))
    assert words_of(quick) == ["not reached"] * 5
    assert words_of(slow) == ["slower (censored)"] * 5
    assert slow[-1].speedup is not None
    assert slow[-1].speedup.value == 0
    assert slow[-1].speedup.high == pytest.approx(0.5)


def test_the_baseline_against_itself_with_other_noise_is_inconclusive() -> None:
    random = np.random.default_rng(0)

    def noisy() -> Curves:
        losses = np.minimum.accumulate(DENSE.losses + 0.01 * random.standard_normal((5, 20)), axis=1)
        return Curves(STEPS, losses)

    def noisy_s() -> np.ndarray:
        return np.exp(0.03 * random.standard_normal(5))

    scores = [
        score
        for _ in range(20)
        for score in score_levels(noisy(), noisy(), PairedStepSeconds(noisy_s(), noisy_s()))
    ]
    decided = [word for word in words_of(scores) if word != "inconclusive"]
    assert len(decided) <= 10, "a twentieth of 100 words is expected"


def test_levels_above_the_floor_are_dropped_and_few_launches_decide_nothing() -> None:
    scores = score_levels(DENSE, DENSE, TWICE, floor=2.75)
    assert [score.share for score in scores] == [0.5, 0.75, 0.9, 1.0]
    few = PairedStepSeconds(*(seconds[:2] for seconds in TWICE))
    assert words_of(score_levels(DENSE, DENSE, few)) == ["inconclusive"] * 5
    none = PairedStepSeconds(*(seconds[:0] for seconds in TWICE))
    assert words_of(score_levels(DENSE, DENSE, none)) == ["not timed"] * 5


def test_a_test_and_an_interval_of_opposite_sign_decide_nothing() -> None:
    score = score_levels(DENSE, DENSE, TWICE)[1]
    assert choose_word(score, 0.05) == "faster"
    assert choose_word(replace(score, lead=-score.lead), 0.05) == "inconclusive"


def test_a_level_at_a_validation_is_reached_there_whatever_rounding_does() -> None:
    curves = 1 / np.arange(3.0, 23.0)[None, :]
    level = np.array([curves[0, -1] * (1 - 1e-15)])
    assert steps_to_level(curves, STEPS, level) == pytest.approx(600)


def test_words_of_a_link_and_level_are_tested_together() -> None:
    def tested(p_value: float, link: str) -> LevelScore:
        own = cell(link=link)
        (decided, *_) = decide_together(
            [replace(own, levels=[replace(own.levels[0], p_value=p)]) for p in (p_value, 0.9)]
        )
        return decided.levels[0]

    assert tested(0.02, "a").word == "faster"
    assert tested(0.03, "a").word == "inconclusive"
    assert tested(0.03, "a").word_alone == "faster"
