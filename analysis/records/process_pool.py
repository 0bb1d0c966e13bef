"""A pool of fresh processes, whose end by a signal nothing complains of."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import FrameType


@contextlib.contextmanager
def open_process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of fresh processes; an early end of the block drops what none of them has begun.

    SIGTERM and SIGHUP end the block as Ctrl-C does, unless somebody else takes them: by themselves they would
    end this process alone, and multiprocessing would complain of what it had no time to remove.
    """
    # A forked process could wait for a lock that a thread of this one held.
    context = multiprocessing.get_context("spawn")
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP)
    redirected = [number for number in numbers if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in redirected:
        signal.signal(number, _raise_keyboard_interrupt)
    try:
        with ProcessPoolExecutor(processes, context, _ignore_ctrl_c) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for number in redirected:
            signal.signal(number, signal.SIG_DFL)


def _raise_keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _ignore_ctrl_c() -> None:
    """Ignore Ctrl-C, which reaches every process: one sentence about it is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
