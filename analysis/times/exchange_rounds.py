"""What a step takes where some exchange and others do not: at every H, from launches at one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analysis.records.frames import Frames, value_of_run
from analysis.records.steps import warm_steps


class StepSeconds(NamedTuple):
    """Seconds of a method's steps in one launch."""

    local_s: float  # without an exchange; 0 where every step has one
    exchanging_s: float
    a_round: int = 1  # exchanges of local steps in a round: of fragments in turns one each

    def step_s(self, every: int | None) -> float:
        """The mean step of a training that exchanges every so many steps."""
        if every is None:
            return self.exchanging_s
        return self.local_s + self.a_round * (self.exchanging_s - self.local_s) / every


def step_seconds_by_launch(frames: Frames, keys: Sequence[str], a_round: int = 1) -> dict[int, StepSeconds]:
    """By launch. Workers end an exchange together, so that a mean over ranks is what each of them spends; the
    median over blocks of their means.

    Args:
        keys: of one method's launches.
    """
    found = dict[int, StepSeconds]()
    for key in keys:
        steps = warm_steps(frames, key).steps
        is_exchange = steps["wire_bytes"] > 0
        local, exchanging = (
            float(steps[which].groupby("block")["step_s"].mean().median())
            for which in (~is_exchange, is_exchange)
        )
        seed = int(value_of_run(frames, key, "seed"))
        found[seed] = StepSeconds(0.0 if is_exchange.all() else local, exchanging, a_round)
    return found
