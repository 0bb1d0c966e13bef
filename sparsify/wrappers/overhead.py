"""What averaging takes of a step, told once, where it is more than a tenth."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from sparsify.comm import CountingComm
from sparsify.wrappers.engine import StepReport

FIRST, LAST = 4, 15  # steps that are looked at: those before warm up
MUCH = 0.1  # of a step's time
log = logging.getLogger(__name__)


class Toll:
    """Time that a step's averaging takes, as the caller waits for it, beside the whole step's.

    Args:
        comm: counts the collectives.
        advice: what sends fewer, if anything does.
    """

    def __init__(self, comm: CountingComm, advice: str) -> None:
        self.comm, self.advice = comm, advice
        self.step, self.ended_s, self.own_s = 0, time.perf_counter(), 0.0
        self.collectives = comm.collectives
        self.samples: (
            list[tuple[float, float]] | None
        ) = []  # own and whole, in seconds; None: nothing to tell

    @contextmanager
    def taken(self) -> Iterator[None]:
        """What happens within is averaging."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.own_s += time.perf_counter() - began_s

    def end(self, report: StepReport | None) -> None:
        """A step's averaging, which sent this; the next step begins."""
        if self.samples is None:
            return
        now_s, collectives, self.step = time.perf_counter(), self.comm.collectives, self.step + 1
        if self.step >= FIRST:
            self.samples.append((self.own_s, now_s - self.ended_s))
        if self.step == LAST and report is not None:
            self._tell(report, collectives - self.collectives)
        self.ended_s, self.own_s, self.collectives = now_s, 0.0, collectives

    def _tell(self, report: StepReport, collectives: int) -> None:
        """Once, on rank 0; in the log, for a warning may be an error, and then the others would wait."""
        assert self.samples
        own_s, whole_s = (median(seconds) for seconds in zip(*self.samples, strict=True))
        share = median(own / whole for own, whole in self.samples)
        self.samples = None
        if self.comm.rank == 0 and share > MUCH:
            log.warning(
                f"averaging takes {share:.0%} of a step ({1e3 * own_s:.1f} of {1e3 * whole_s:.1f} ms, steps "
                f"{FIRST} to {LAST}): a worker sends {report.wire_bytes / 1e6:.2f} MB in {collectives} "
                f"collectives; {self.advice}see What a step costs in docs/own-training.md"
            )


def advice_for(joins: bool, buckets: int) -> str:
    """What may be done about many messages."""
    if joins or buckets < 2:
        return ""
    return (
        f"this method sends its {buckets} buckets one after the other, so scope='global', or a larger size "
        "in MB, sends fewer messages; "
    )
