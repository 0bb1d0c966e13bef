"""Scores of made-up curves whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.benchmark.cells import SHARES, LevelScore, Measurement, decide_together, score_levels
from tests.analysis.benchmark.cells import cell

STEPS = np.arange(30.0, 601.0, 30.0)
LAUNCHES = np.array([0.99, 1.0, 1.0, 1.0, 1.01])
SEEDS = np.array([[-0.02], [-0.01], [0.0], [0.01], [0.02]])


def loss_after(steps: np.ndarray) -> np.ndarray:
    """Return losses that fall by a thousandth a step: straight, so that interpolating them is exact."""
    return 3.0 - 1e-3 * steps


DENSE = Measurement(loss_after(STEPS) + SEEDS, LAUNCHES)


def words_of(scores: list[LevelScore]) -> list[str]:
    return [score.word for score in scores]


def test_half_the_steps_or_half_the_seconds_is_faster_by_2_at_every_level() -> None:
    in_steps = Measurement(loss_after(2 * STEPS) + SEEDS, LAUNCHES)
    in_seconds = Measurement(DENSE.losses, 0.5 * LAUNCHES)
    # In half the seconds it is at the last level when its budget ends, and not below it.
    for own, last_word in ((in_steps, "faster"), (in_seconds, "inconclusive")):
        scores = score_levels(STEPS, DENSE, own)
        assert [score.share for score in scores] == [*SHARES]
        assert words_of(scores) == [*["faster"] * 4, last_word]
        for score in scores:
            assert score.speedup is not None
            assert score.speedup.value == pytest.approx(2)
            assert score.speedup.interval == pytest.approx((2, 2)), "seeds and launches are the same"
            assert score.loss == pytest.approx(3 - 0.6 * score.share)
            assert score.minutes == pytest.approx(600 * score.share / 2 / 60)
    words = ["slower", "slower", "slower (censored)", "slower (censored)", "not reached"]
    assert words_of(score_levels(STEPS, in_steps, DENSE)) == words


def test_what_never_reaches_a_level_is_slower_only_if_its_budget_took_longer() -> None:
    flat = np.full_like(DENSE.losses, 2.9) + SEEDS
    quick, slow = (score_levels(STEPS, DENSE, Measurement(flat, s * LAUNCHES)) for s in (0.1, 2.0))
    assert words_of(quick) == ["not reached"] * 5
    assert words_of(slow) == ["slower (censored)"] * 5
    assert slow[-1].speedup is not None
    assert slow[-1].speedup.value == 0
    assert slow[-1].speedup.high == pytest.approx(0.5)


def test_the_baseline_against_itself_with_other_noise_is_inconclusive() -> None:
    random = np.random.default_rng(0)

    def noisy() -> Measurement:
        losses = np.minimum.accumulate(DENSE.losses + 0.01 * random.standard_normal((5, 20)), axis=1)
        return Measurement(losses, np.exp(0.03 * random.standard_normal(5)))

    scores = [score for _ in range(20) for score in score_levels(STEPS, noisy(), noisy())]
    decided = [word for word in words_of(scores) if word != "inconclusive"]
    assert len(decided) <= 10, "a twentieth of 100 words is expected"


def test_levels_above_the_floor_are_dropped_and_few_launches_decide_nothing() -> None:
    twice = Measurement(DENSE.losses, 0.5 * LAUNCHES)
    assert [score.share for score in score_levels(STEPS, DENSE, twice, floor=2.75)] == [0.5, 0.75, 0.9, 1.0]
    few = [each._replace(step_s=each.step_s[:2]) for each in (DENSE, twice)]
    assert words_of(score_levels(STEPS, few[0], few[1])) == ["inconclusive"] * 5
    none = [each._replace(step_s=each.step_s[:0]) for each in (DENSE, twice)]
    assert words_of(score_levels(STEPS, none[0], none[1])) == ["not timed"] * 5


def test_words_of_a_link_and_level_are_tested_together() -> None:
    def tested(p_value: float, link: str) -> LevelScore:
        from dataclasses import replace

        own = cell(link=link)
        (decided, *_) = decide_together(
            [replace(own, levels=[replace(own.levels[0], p_value=p)]) for p in (p_value, 0.9)]
        )
        return decided.levels[0]

    assert tested(0.02, "a").word == "faster"
    assert tested(0.03, "a").word == "inconclusive"
    assert tested(0.03, "a").word_alone == "faster"
