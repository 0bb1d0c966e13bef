"""Variants that take turns: the same batches, whole blocks, one end for all ranks, and a reason for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, groupby
from typing import Any

import numpy as np
import pytest
import torch

from analysis.stats import POSITIVE, estimate_mean
from experiments.training.alternation import (
    AlternationResult,
    AlternationSchedule,
    VariantLog,
    VariantTraining,
    mean_step_s_on_slowest_rank,
    train_alternately,
    widest_ratio_half_width,
)
from experiments.training.settings import AlternationSettings
from experiments.training.stop_signal import Preempted
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from tests.conftest import there
from tests.training.digits import CPU, Lines, trainer

METHODS = ("dense", "topk", "randomk")
TURNS = AlternationSchedule(
    AlternationSettings(blocks=3, block_steps=2, until=np.inf, limit_min=60), warmup_steps=1, seed=0
)


def alternated(
    turns: AlternationSchedule = TURNS,
    clock: Callable[[int], Callable[[], float]] = lambda rank: lambda: 0.0,
    told_after: float = np.inf,
) -> list[tuple[AlternationResult, list[dict[str, Any]], dict[str, torch.Tensor]]]:
    """Return how the turns of two virtual ranks ended, their lines, and the first weights of each variant.

    Args:
        clock: of a rank.
        told_after: steps after which a worker is told to stop.
    """

    def body(comm: virtual.VirtualComm) -> Any:
        lines, variants = Lines(), {}
        for name in METHODS:
            own, timer = VariantLog(lines, name), PhaseTimer("serialised", comm.now_s)
            variants[name] = VariantTraining(trainer(comm, timer, name, own), own)
        ended = train_alternately(
            variants, comm, turns, CPU, lambda done: done >= told_after, clock(comm.rank)
        )
        weights = {name: first(variant.trainer.finish().model) for name, variant in variants.items()}
        return ended, lines.of("step"), weights

    return virtual.run(2, body)


def with_rules(**changed: Any) -> AlternationSchedule:
    return TURNS._replace(rules=replace(TURNS.rules, **changed))


def first(model: torch.nn.Module) -> torch.Tensor:
    return next(model.parameters()).detach().clone()


def test_every_round_has_a_block_of_each_variant_in_an_order_that_all_ranks_draw_anew() -> None:
    turns = []
    for ended, lines, _ in alternated(with_rules(blocks=8)):
        assert (ended.stopped, ended.blocks) == ("half-width", 8)
        turns.append([(line["block"], line["variant"]) for line in lines])
    first, second = turns
    assert first == second
    counts = {(block, name): 2 if block else 1 for block in range(9) for name in METHODS}
    assert Counter(first) == counts
    grouped = [turn for turn, _ in groupby(first)]  # steps in one go
    assert [block for block, _ in grouped] == [block for block, _ in counts]
    assert len({tuple(name for _, name in grouped[at : at + 3]) for at in range(0, 27, 3)}) > 2


def test_variants_know_nothing_of_each_other() -> None:
    """Each is trained, on the same batches, as if it were alone."""
    together = alternated()[0][2]
    for name in METHODS:

        def body(comm: virtual.VirtualComm, name: str = name) -> torch.Tensor:
            timer = PhaseTimer("serialised", comm.now_s)
            steps = TURNS.count_steps_per_variant(TURNS.rules.blocks)
            return first(trainer(comm, timer, name, steps=steps).run().model)

        assert torch.equal(together[name], virtual.run(2, body)[0])


def test_it_goes_on_until_the_ratios_are_known_or_the_time_is_over() -> None:
    ticks = {0: 20.0, 1: 1e9}  # seconds between two looks of a rank; rank 0's clock counts

    def clock(rank: int) -> Callable[[], float]:
        shown = iter(range(10**6))
        return lambda: next(shown) * ticks[rank]

    patient = with_rules(until=1e-9, limit_min=4)  # 12 looks: 3 of warm-up, 3 rounds
    (ended, _, _), (other, _, _) = alternated(patient, clock)
    assert ended == other
    assert (ended.stopped, ended.blocks) == ("limit", 3)
    assert there(ended.half_width) > patient.rules.until


def test_a_signal_ends_the_turns_with_the_round_once_there_are_as_many_as_asked() -> None:
    endless, steps = with_rules(until=0.0), len(METHODS) * TURNS.count_steps_per_variant(3)
    for told_after in (steps - 3, steps):  # in the last round that is asked for, or at its end
        for ended, lines, _ in alternated(endless, told_after=told_after):
            assert (ended.stopped, ended.blocks) == ("signal", 3)
            assert len(lines) == steps
    for ended, lines, _ in alternated(endless, told_after=steps + 1):  # in a round more, which is finished
        assert (ended.stopped, ended.blocks) == ("signal", 4)
        assert len(lines) == len(METHODS) * TURNS.count_steps_per_variant(4)


def test_a_signal_before_that_or_in_a_round_that_would_take_too_long_leaves_nothing() -> None:
    steps = len(METHODS) * TURNS.count_steps_per_variant(3)
    for told_after, seconds in ((1, 0), (len(METHODS), 0), (steps - 6, 0), (steps + 1, 20)):

        def clock(_: int, seconds: float = seconds) -> Callable[[], float]:
            return partial(next, count(0.0, seconds))  # so many seconds a turn

        with pytest.raises(Preempted, match="before anything was saved"):
            alternated(with_rules(until=0.0), clock, told_after)


def test_the_half_width_is_that_of_the_least_certain_paired_ratio() -> None:
    drift = np.linspace(1, 3, 20)
    noise = np.exp(0.1 * np.random.default_rng(0).normal(size=20))
    seconds = {"dense": drift, "steady": 2 * drift, "noisy": 5 * drift * noise}
    shown = estimate_mean(5 * noise, POSITIVE, "blocks").half_width_on_log_scale  # by figures
    assert widest_ratio_half_width(seconds) == pytest.approx(shown)
    assert widest_ratio_half_width({"dense": drift[:2], "noisy": noise[:2]}) is None
    # A block in which a worker was suspended all the time.
    lost = {"dense": [*drift, 1.0], "noisy": [*seconds["noisy"], math.nan]}
    assert widest_ratio_half_width(lost) == pytest.approx(shown)


def test_a_block_counts_its_slowest_rank_and_not_the_first_step_after_a_switch() -> None:
    assert mean_step_s_on_slowest_rank([[9.0, 1.0, 2.0], [1.0, 3.0, 1.0]]) == pytest.approx(2.5)
    assert mean_step_s_on_slowest_rank([[9.0], [1.0]]) == 9.0
    assert mean_step_s_on_slowest_rank([[9.0, None, 2.0], [1.0, 3.0, 1.0]]) == 2.0  # a worker was suspended
    assert math.isnan(mean_step_s_on_slowest_rank([[None, None], [1.0, 1.0]]))
