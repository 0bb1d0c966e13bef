"""Several trainings in one group of processes, in turns of a few steps.

What drifts while they run, such as the clock of the machine, its memory or other programs, meets all of them
alike, and each round compares them anew. All see the same batches.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from experiments.training.loop import Trainer
from experiments.training.settings import AlternationSettings
from experiments.training.step_log import MeasurementLog
from experiments.training.stop_signal import Preempted
from sparsify.comm import Comm, gather_json

S_PER_MIN = 60
MAX_LAST_ROUND_S = 30.0  # that a round may take once a worker was told to stop: SLURM waits for 90


class AlternationSchedule(NamedTuple):
    """The rules of taking turns."""

    rules: AlternationSettings
    warmup_steps: int  # of each variant, before the first round
    seed: int  # of the order in each round

    def count_steps_per_variant(self, num_blocks: int) -> int:
        """Return the number of steps of each variant in so many blocks."""
        return self.warmup_steps + num_blocks * self.rules.block_steps


class AlternationResult(NamedTuple):
    """The reason why the turns ended, and how far they came."""

    stopped: Literal["half-width", "limit", "signal"]
    half_width: float | None  # see `widest_ratio_half_width`
    blocks: int  # of each variant


@dataclass
class VariantLog:
    """Lines of a variant in the log that all variants share."""

    log: MeasurementLog
    variant: str
    block: int = 0  # 0: warm-up
    # Of each step in this block; None where the worker was suspended meanwhile.
    seconds: list[float | None] = field(default_factory=list)

    def begin_block(self, block: int) -> None:
        """Note that the steps of another block follow."""
        self.block = block
        self.seconds = []

    def add_line(self, kind: str, **values: Any) -> None:
        """Write a line, of steps with their block."""
        if kind == "step":
            self.seconds.append(None if values.get("stops") else values["step_s"])
            values["block"] = self.block
        self.log.add_line(kind, variant=self.variant, **values)

    def flush(self) -> None:
        self.log.flush()


class VariantTraining(NamedTuple):
    """A training that takes turns with others, and the log that it writes."""

    trainer: Trainer
    log: VariantLog


def train_alternately(
    variants: Mapping[str, VariantTraining],
    comm: Comm,
    schedule: AlternationSchedule,
    device: torch.device,
    after_block: Callable[[int], bool] = lambda steps: False,
    clock: Callable[[], float] = time.monotonic,
) -> AlternationResult:
    """Train in turns until every ratio to the first variant is known well enough, or the time is over.

    A round is a block of each variant, in an order drawn anew. All ranks end together, because they decide by
    the same numbers: what all of them measured, and rank 0's clock.

    Args:
        after_block: told how many steps were done, outside of what is timed; returns whether this worker was
            told to stop. Then the turns end with the round, if there are as many blocks as asked.

    Raises:
        Preempted: a worker was told to stop before.
    """
    started_s = clock()
    order = random.Random(schedule.seed)
    num_steps = 0
    elapsed_s = 0.0
    is_told_to_stop = False
    seconds: dict[str, list[float]] = {name: [] for name in variants}  # of a step, for each block

    def take_turn(name: str, block: int, steps: int) -> float:
        """Train one variant for a block, and return rank 0's clock afterwards."""
        nonlocal num_steps, is_told_to_stop
        training, log = variants[name]
        log.begin_block(block)
        for _ in range(steps):
            training.step()
        training.log.write_waiting_steps()
        num_steps += steps
        reports = gather_json(comm, [log.seconds, clock() - started_s, after_block(num_steps)], device)
        if block:
            seconds[name].append(
                mean_step_s_on_slowest_rank([seconds_of_rank for seconds_of_rank, *_ in reports])
            )
        is_told_to_stop = any(is_told for *_, is_told in reports)
        if is_told_to_stop and (block < schedule.rules.blocks or round_s > MAX_LAST_ROUND_S):
            raise Preempted(0)
        return float(reports[0][1])

    round_s = 0.0
    for name in variants:
        elapsed_s = take_turn(name, 0, schedule.warmup_steps)
    round_s = elapsed_s
    for block in count(1):
        before_s = elapsed_s
        for name in order.sample([*variants], len(variants)):
            elapsed_s = take_turn(name, block, schedule.rules.block_steps)
        round_s = elapsed_s - before_s
        reached = widest_ratio_half_width(seconds)
        enough = block >= schedule.rules.blocks and reached is not None and reached <= schedule.rules.until
        if enough:
            return AlternationResult("half-width", reached, block)
        if is_told_to_stop or elapsed_s >= schedule.rules.limit_min * S_PER_MIN:
            return AlternationResult("signal" if is_told_to_stop else "limit", reached, block)
    raise AssertionError("counting does not end")


def mean_step_s_on_slowest_rank(seconds_by_rank: Sequence[Sequence[float | None]]) -> float:
    """Return the mean step time of one block, on its slowest rank.

    The first step after another variant's is left out, if there are more. NaN where a worker was suspended in
    all of them.
    """
    steps = [*zip(*seconds_by_rank, strict=True)]
    whole = [[s for s in step if s is not None] for step in (steps[1:] or steps) if None not in step]
    return float(np.mean([max(step) for step in whole])) if whole else math.nan


def widest_ratio_half_width(seconds_by_variant: Mapping[str, Sequence[float] | np.ndarray]) -> float | None:
    """Return the half-width of the least certain ratio of step times to the first variant's.

    Blocks are paired, as in figures: 0.05 is 5 %. None where there are too few blocks for an interval.
    """
    if min(map(len, seconds_by_variant.values())) < 2:
        return None
    from analysis.stats import POSITIVE, estimate_mean  # pandas comes with it

    first_seconds, *other_seconds = (
        np.asarray(block_seconds) for block_seconds in seconds_by_variant.values()
    )
    ratios = [seconds / first_seconds for seconds in other_seconds]
    widest = max(
        estimate_mean(ratio[np.isfinite(ratio)], POSITIVE, "blocks").half_width_on_log_scale
        for ratio in ratios
    )
    return widest if np.isfinite(widest) else None
