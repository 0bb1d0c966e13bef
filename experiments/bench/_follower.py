"""A step in a process of its own, whose memory is allocated otherwise; in lockstep with the steps here."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Ended(Exception):
    """The process is no more; the message says why."""


class Follower:
    """`experiments.bench._follow`, which makes the same inputs, and takes a step whenever it is told to.

    Args:
        words: of its command line.
        tunables: of glibc.
    """

    def __init__(self, words: Sequence[str], tunables: str) -> None:
        command = [sys.executable, "-m", "experiments.bench._follow", *words]
        self.process = subprocess.Popen(
            ["env", f"GLIBC_TUNABLES={tunables}", *command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.end = weakref.finalize(self, stop, self.process)

    def step(self, turn: int) -> dict[str, float]:
        """Wall and CPU time of its step in this turn, in ms; how many it selected, and do these differ from
        its guide's?

        Raises:
            Ended: it did not take it.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{turn}\n")
            self.process.stdin.flush()
            answer: dict[str, float] = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            _, said = self.process.communicate()
            last = said.strip().splitlines()[-1:] or ["without a word"]
            code = self.process.returncode
            raise Ended(f"its process ended with code {code}: {last[0]}") from None
        return answer


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
