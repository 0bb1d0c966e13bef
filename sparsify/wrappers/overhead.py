"""A log message about the share of a step that averaging takes, where it is more than a tenth."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from sparsify.comm import CountingComm
from sparsify.wrappers.engine import StepReport

FIRST_STEP = 4  # that is measured; earlier steps warm up
LAST_STEP = 15  # that is measured
NOTEWORTHY_SHARE = 0.1  # of a step's time
log = logging.getLogger(__name__)


class AveragingOverheadMonitor:
    """The time that the caller waits for averaging, measured over some steps and logged once if it is long.

    Args:
        comm: counts the collectives.
        advice: how to send fewer messages, if there is a way; ends in "; ".
    """

    def __init__(self, comm: CountingComm, advice: str) -> None:
        self.comm = comm
        self.advice = advice
        self.step = 0
        self.averaging_s = 0.0  # in this step so far
        self.step_started_s = time.perf_counter()
        self.collectives_before = comm.collectives
        # Seconds of averaging and of the whole step; None: there is nothing to log any more.
        self.samples: list[tuple[float, float]] | None = []

    @contextmanager
    def measure_averaging(self) -> Iterator[None]:
        """Count the time within as averaging."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.averaging_s += time.perf_counter() - started_s

    def end_step(self, report: StepReport | None) -> None:
        """End a step's averaging, which sent `report`, and begin the next step."""
        if self.samples is None:
            return
        now_s = time.perf_counter()
        collectives = self.comm.collectives
        self.step += 1
        if FIRST_STEP <= self.step <= LAST_STEP:
            self.samples.append((self.averaging_s, now_s - self.step_started_s))
        if self.step >= LAST_STEP and report is not None:  # None: a GradScaler left the step out
            self._log(report, collectives - self.collectives_before)
        self.step_started_s = now_s
        self.averaging_s = 0.0
        self.collectives_before = collectives

    def _log(self, report: StepReport, collectives: int) -> None:
        """Log a long averaging time on rank 0, once.

        It is no warning: those may be errors, and then the other workers would wait.
        """
        assert self.samples
        averaging_s, step_s = (median(seconds) for seconds in zip(*self.samples, strict=True))
        share = median(averaging / step for averaging, step in self.samples)
        self.samples = None
        if self.comm.rank == 0 and share > NOTEWORTHY_SHARE:
            log.warning(
                f"averaging takes {share:.0%} of a step ({1e3 * averaging_s:.1f} of {1e3 * step_s:.1f} ms, "
                f"steps {FIRST_STEP} to {LAST_STEP}): a worker sends {report.wire_bytes / 1e6:.2f} MB in "
                f"{collectives} collectives; {self.advice}see What a step costs in docs/own-training.md"
            )


def fewer_messages_advice(sends_one_message: bool, num_buckets: int) -> str:
    """Return how to send fewer messages; "" where a method sends one message, or has one bucket."""
    if sends_one_message or num_buckets < 2:
        return ""
    return (
        f"this method sends its {num_buckets} buckets one after the other, so scope='global', or a larger "
        "size in MB, sends fewer messages; "
    )
