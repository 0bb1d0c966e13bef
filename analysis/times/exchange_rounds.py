"""Seconds of steps where some exchange and others do not: at every H, from launches at one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analysis.records.frames import Frames, value_of_run
from analysis.records.steps import warm_steps


class LocalAndExchangingSeconds(NamedTuple):
    """Seconds of a method's steps in one launch."""

    local_s: float  # without an exchange; 0 where every step has one
    exchanging_s: float
    exchanges_per_round: int = 1  # of local steps: of fragments in turns one each

    def mean_step_s(self, steps_per_exchange: int | None) -> float:
        """Return the mean step of a training that exchanges every so many steps."""
        if steps_per_exchange is None:
            return self.exchanging_s
        return (
            self.local_s + self.exchanges_per_round * (self.exchanging_s - self.local_s) / steps_per_exchange
        )


def step_seconds_by_launch(
    frames: Frames, keys: Sequence[str], exchanges_per_round: int = 1
) -> dict[int, LocalAndExchangingSeconds]:
    """Return the seconds of steps by launch: the median over blocks of their means.

    Workers end an exchange together, so that a mean over ranks is what each of them spends.

    Args:
        frames: of these runs.
        keys: of one method's launches.
        exchanges_per_round: of local steps.
    """
    by_launch = dict[int, LocalAndExchangingSeconds]()
    for key in keys:
        steps = warm_steps(frames, key).steps
        is_exchange = steps["wire_bytes"] > 0
        local_s, exchanging_s = (
            float(steps[mask].groupby("block")["step_s"].mean().median())
            for mask in (~is_exchange, is_exchange)
        )
        seed = int(value_of_run(frames, key, "seed"))
        by_launch[seed] = LocalAndExchangingSeconds(
            0.0 if is_exchange.all() else local_s, exchanging_s, exchanges_per_round
        )
    return by_launch
