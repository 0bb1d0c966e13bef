"""Processes that share the work of a command, and end with it, whatever ends that."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of fresh processes; an early end of the block drops what none of them has begun.

    SIGTERM and SIGHUP end the block as Ctrl-C does, unless somebody else takes them: by themselves they would
    end this process alone, and multiprocessing would complain of what it had no time to remove.
    """
    # A forked process could wait for a lock that a thread of this one held.
    context = multiprocessing.get_context("spawn")
    with (
        signals_as_interrupts(),
        ProcessPoolExecutor(processes, context, _leave_interrupts_to_the_first) as pool,
    ):
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block where a signal would end this process."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in END_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave_interrupts_to_the_first() -> None:
    """Ignore Ctrl-C, which reaches every process: one sentence about it is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
