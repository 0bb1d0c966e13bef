"""Messages to the person at the terminal: progress, and failed runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from experiments.launch.diagnosis import RunFailed
from slurm import environment

PROGRESS_INTERVAL_S = 3.0
REPEAT_INTERVAL_S = 5.0
T = TypeVar("T")


def say(line: str) -> None:
    """Print one line to standard error."""
    print(line, file=sys.stderr, flush=True)


def iterate_with_progress(items: Sequence[T], noun: str) -> Iterator[T]:
    """Yield the items; every few seconds, print how many of them are done."""
    printed_s = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - printed_s >= PROGRESS_INTERVAL_S:
            printed_s = time.monotonic()
            say(f"{done:,} of {len(items):,} {noun}")
        yield item


def repeat_until_interrupted(action: Callable[[], object]) -> None:
    """Call `action` every few seconds, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(REPEAT_INTERVAL_S)
            action()


def is_forced(force: bool) -> bool:
    """Tell whether --force or FORCE=1 asks to measure again what is measured already."""
    return force or environment.is_variable_true("FORCE")


@contextmanager
def exit_on_failed_run() -> Iterator[None]:
    """Within the block, a run that fails ends the command with a sentence.

    The exit code is 2 where the words or the machine are at fault, else 1.
    """
    try:
        yield
    except RunFailed as failure:
        if failure.kind in ("bad_input", "environment", "machine"):
            raise ValueError(str(failure)) from failure
        say(f"experiments: {failure.attempt.run_id} failed: {failure}")
        say(f"experiments: `python -m experiments why {failure.attempt.run_id}` shows the logs")
        raise SystemExit(1) from failure
