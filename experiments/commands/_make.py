"""What the commands that make runs share: what they say, and what the failure of a run becomes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from experiments.launch.diagnosis import RunFailed
from slurm import environment

T = TypeVar("T")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_forced(force: bool) -> bool:
    """Is it to be measured again, by --force or FORCE=1?"""
    return force or environment.flag("FORCE")


def or_exit(make: Callable[[], T]) -> T:
    """A failed run ends the command with its sentence: exit code 2 where the words were at fault, else 1."""
    try:
        return make()
    except RunFailed as failure:
        if failure.kind in ("bad_input", "environment", "machine"):
            raise ValueError(str(failure)) from failure
        say(f"experiments: {failure.attempt.run_id} failed: {failure}")
        say(f"experiments: `python -m experiments why {failure.attempt.run_id}` shows the logs")
        raise SystemExit(1) from failure
