"""What the commands that make runs share: what they say, and what the failure of a run becomes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from experiments.launch.diagnosis import RunFailed
from slurm import environment

SIGN_S = 3.0  # between two signs of life
AGAIN_S = 5.0  # between two looks at what runs have written
T = TypeVar("T")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def told_now_and_then(items: Sequence[T], what: str) -> Iterator[T]:
    """These, one by one; where it takes its time, it says how many are done."""
    said = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - said >= SIGN_S:
            said = now
            say(f"{done:,} of {len(items):,} {what}")
        yield item


def follow_runs(look: Callable[[], object]) -> None:
    """Look every few seconds, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(AGAIN_S)
            look()


def is_forced(force: bool) -> bool:
    """Whether runs are to be measured again, by --force or FORCE=1."""
    return force or environment.is_variable_true("FORCE")


@contextmanager
def told() -> Iterator[None]:
    """A run that fails ends the command with its sentence; exit code 2 where words are at fault, else 1."""
    try:
        yield
    except RunFailed as failure:
        if failure.kind in ("bad_input", "environment", "machine"):
            raise ValueError(str(failure)) from failure
        say(f"experiments: {failure.attempt.run_id} failed: {failure}")
        say(f"experiments: `python -m experiments why {failure.attempt.run_id}` shows the logs")
        raise SystemExit(1) from failure
