"""Troubles of runs on this machine, done to real runs."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from analysis.records.files import try_read_json_object
from analysis.records.store import Store
from tests.launch.troubled import DEADLINE_S, SLOW, STEPS, WORDS, await_, faults_in, left_of, processes_of
from tests.worker.runs import start_python, workers_of

SENTENCE = re.compile(r"(?m)^(experiments: |topk-.*run again to go on)")  # what a command that failed says


class Case(NamedTuple):
    """A run on this machine that is to get into trouble."""

    results: Path
    process: subprocess.Popen[str]

    def step(self) -> int:
        """Return the number of steps done."""
        notes = map(try_read_json_object, self.results.glob("launch/*/progress.json"))
        return max((int(note["step"]) for note in notes if note), default=0)


def tell(number: signal.Signals, group: bool = False) -> Callable[[Case], None]:
    """Return what sends this signal to the starter alone, or to all."""

    def act(case: Case) -> None:
        (os.killpg if group else os.kill)(case.process.pid, number)

    return act


def tell_twice(case: Case) -> None:
    os.killpg(case.process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.killpg(case.process.pid, signal.SIGINT)


def tell_child_to_stop(case: Case) -> None:
    children = psutil.Process(case.process.pid).children()
    next(child for child in children if "experiments" in child.cmdline()).send_signal(signal.SIGUSR2)


def reboot(case: Case) -> None:
    for process in processes_of(case.results):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_one_worker(case: Case) -> None:
    os.kill(random.choice([*workers_of(case.results).values()]), signal.SIGKILL)


def remove(pattern: str) -> Callable[[Case], None]:
    """Return what removes these files of the attempt."""

    def act(case: Case) -> None:
        for path in case.results.glob(f"runs/*/*/{pattern}"):
            path.unlink()

    return act


def remove_results(case: Case) -> None:
    # Others write there meanwhile.
    while (case.results / "runs").exists():
        shutil.rmtree(case.results, ignore_errors=True)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TROUBLES = {
    "starter-kill": tell(signal.SIGKILL), "starter-term": tell(signal.SIGTERM),
    "starter-hup": tell(signal.SIGHUP), "starter-int": tell(signal.SIGINT),
    "group-int": tell(signal.SIGINT, group=True),  # as by Ctrl-C
    "group-hup": tell(signal.SIGHUP, group=True),  # as by a closed terminal
    "group-term": tell(signal.SIGTERM, group=True), "twice": tell_twice, "worker": kill_one_worker,
    "reboot": reboot, "logs": remove("rank*.jsonl"), "manifest": remove("run.json"),
    "results": remove_results, "torchrun-kill": tell(signal.SIGKILL),
    "torchrun-int": tell(signal.SIGINT, group=True), "torchrun-stop": tell_child_to_stop,
}  # fmt: skip
WHERE = ("virtual", "virtual", "local")  # in turn: two ranks in one process, and in two


def run(name: str, folder: Path, number: int) -> list[str]:
    """Start a run, trouble it at a random step, and ask for it again at once, as impatient people do.

    Returns:
        What is wrong with what came of it.
    """
    results = folder / f"{name}-{number}"
    starter = TORCHRUN if name.startswith("torchrun") else ()
    where = "local" if starter else WHERE[number % len(WHERE)]
    slow = SLOW if starter else ()
    words = (*starter, "-m", "experiments", "run", *WORDS, *slow, f"cluster={where}", "task.batch_size=16")
    first = Case(results, start_python(results, *words))
    at = random.Random(f"{name} {number}").randrange(1, STEPS * 3 // 4)
    await_(lambda: first.step() >= at or first.process.poll() is not None, f"step {at}", pause=0.02)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):  # it was quicker
        TROUBLES[name](first)
    faults = []
    for process in (first.process, start_python(results, *words)):
        _, errors = process.communicate(timeout=DEADLINE_S)
        is_ended = process.returncode <= 0 or name in ("torchrun-kill", "torchrun-int")
        if not (is_ended or SENTENCE.search(errors)) or ("Traceback" in errors and not starter):
            faults.append(f"it said {errors!r}")
    if first.process.returncode == 0:
        faults.append("it was quicker than its trouble")
    store = Store(results / "runs")
    attempts = [attempt for run in store.list_run_ids() for attempt in store.list_attempts(run)]
    whole = [attempt for attempt in attempts if attempt.state == "ok"]
    if len(whole) != 1:
        faults.append(f"{len(whole)} whole attempts")
    for attempt in whole:
        faults += faults_in(attempt)
    return faults + [f"{process} was left" for process in left_of(results)]
