"""One part's command as a process of its own: watched, ended at its limit with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config.folders import ROOT
from experiments.launch.end_signals import EndSignals
from slurm.worker_process import before_exec, lifeline

POLL_S = 0.1
TAIL_BYTES = 2**16


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None  # its exit code, negative for a signal; None where it was told to end
    seconds: float


def carry_out(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    variables: Mapping[str, str],
    signals: EndSignals,
    grace_s: float,
) -> Ended:
    """Run a command, all that it prints in `log`, until it ends, its limit is reached or a signal comes.

    It leads a process group of its own, so that nothing of it is left behind; and on Linux it ends with this
    process, whatever ends that.
    """
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(variables),
            stdin=lifeline(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(before_exec, os.getpid(), ()),
        )
        try:
            while process.poll() is None:
                if signals.told or time.monotonic() - began > limit_s:
                    tell(process, grace_s)
                    return Ended(None, time.monotonic() - began)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            kill_all(process)
    return Ended(process.returncode, time.monotonic() - began)


def tell(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let it save and end: the leader alone is told, which tells its workers."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """What is left of it and of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path) -> list[str]:
    """The end of what was printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def last_object(lines: Sequence[str]) -> dict[str, Any]:
    """The JSON object that was printed last, as every benchmark does; empty where there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found: dict[str, Any] = json.loads(line)
                return found
    return {}
