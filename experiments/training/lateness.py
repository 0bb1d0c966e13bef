"""Workers that come late: for how long each does nothing at the end of backward, drawn by the run's seed.

A virtual rank's clock passes that time; a process sleeps it, so that its lateness is real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sparsify.comm import Comm
from sparsify.comm.virtual import VirtualComm

STREAM = 0x1A7E  # apart from whatever else is drawn by the run's seed
TOGETHER = 8  # workers in a published iteration


class Lateness(NamedTuple):
    """By how many seconds each worker is late in each step.

    constant: `s`. uniform: between 0 and `s`. lognormal: with median `s`, `spread` being the standard
    deviation of its logarithm. published: as late as the eight workers of one iteration of Top-k's published
    job on A100 were in compression, which took 212 ms, behind the first of them; every eight workers have an
    iteration of their own.
    """

    draw: str
    s: float
    spread: float
    rank: int | None  # the only one that is late; None: each draws for itself
    seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any], seed: int) -> Lateness | None:
        """From a config's `late`; None where nobody is late."""
        return None if config["draw"] == "none" else cls(**config, seed=seed)

    def seconds(self, step: int, rank: int, size: int) -> float:
        """Of one worker: the same whoever asks, and in whatever order."""
        if self.rank not in (None, rank):
            return 0.0
        return float(self._of_all(np.random.default_rng([STREAM, self.seed, step]), size)[rank])

    def _of_all(self, draws: np.random.Generator, size: int) -> np.ndarray:
        """(size,) seconds."""
        if self.draw == "constant":
            return np.full(size, self.s)
        if self.draw == "uniform":
            return self.s * draws.random(size)
        if self.draw == "lognormal":
            return self.s * np.exp(self.spread * draws.standard_normal(size))
        table = published()
        rows = table[draws.integers(len(table), size=-(-size // TOGETHER))]
        return draws.permuted(rows, axis=1).ravel()[:size]


@cache
def published() -> np.ndarray:
    """(iterations, 8) seconds behind the first worker, of the published job's settled iterations.

    The logs' table has the least, the mean and the greatest time of each iteration: one worker has the least,
    one the greatest, and the other six share what the mean leaves.

    Raises:
        analysis.files.Damaged: the table is not there, as in a copy of the code alone.
    """
    from analysis.published import rederived  # pandas comes with it

    table = rederived.settled(rederived.JOB["A100", "topk"])
    least, mean, greatest = (table[f"comp_{which}_ms"].to_numpy() for which in ("min", "mean", "max"))
    others = (TOGETHER * mean - least - greatest) / (TOGETHER - 2)
    seconds: np.ndarray = np.stack([least, greatest, *[others] * (TOGETHER - 2)], axis=1) - least[:, None]
    return seconds / 1e3


def be_late(seconds: float, comm: Comm, synchronise: Callable[[], None]) -> None:
    """Let this worker do nothing for so long, after what it has given its device."""
    if isinstance(comm, VirtualComm):
        comm.idle(seconds)
    elif seconds:
        synchronise()
        time.sleep(seconds)
