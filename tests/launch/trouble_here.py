"""What goes wrong with runs on this machine, done to real ones."""

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

from analysis.records.files import read_json
from analysis.records.store import Store
from tests.launch.troubled import DEADLINE_S, STEPS, WORDS, Outcome, await_, faults_in, left_of, processes_of
from tests.worker.runs import start_python, workers_of

SENTENCE = re.compile(r"experiments: |topk-.*run again to go on")  # what a command that failed says


class Case(NamedTuple):
    """A run on this machine that is to get into trouble."""

    results: Path
    process: subprocess.Popen[str]

    def step(self) -> int:
        """Steps done."""
        notes = map(read_json, self.results.glob("launch/*/progress.json"))
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


class Trouble(NamedTuple):
    does: str
    act: Callable[[Case], None]
    starter: tuple[str, ...] = ()  # of the processes, where it is not us


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TROUBLES = {
    "starter-kill": Trouble("SIGKILL to the starter", tell(signal.SIGKILL)),
    "starter-term": Trouble("SIGTERM to the starter", tell(signal.SIGTERM)),
    "starter-hup": Trouble("SIGHUP to the starter", tell(signal.SIGHUP)),
    "starter-int": Trouble("SIGINT to the starter", tell(signal.SIGINT)),
    "group-int": Trouble("SIGINT to all, as by Ctrl-C", tell(signal.SIGINT, group=True)),
    "group-hup": Trouble("SIGHUP to all, as by a closed terminal", tell(signal.SIGHUP, group=True)),
    "group-term": Trouble("SIGTERM to all", tell(signal.SIGTERM, group=True)),
    "twice": Trouble("Ctrl-C twice", tell_twice),
    "worker": Trouble("SIGKILL to a worker", kill_one_worker),
    "reboot": Trouble("SIGKILL to all at once, as by a reboot", reboot),
    "logs": Trouble("the logs are removed", remove("rank*.jsonl")),
    "manifest": Trouble("the manifest is removed", remove("run.json")),
    "results": Trouble("all results are removed", remove_results),
    "torchrun": Trouble("SIGKILL to torchrun", tell(signal.SIGKILL), TORCHRUN),
    "torchrun-int": Trouble("Ctrl-C under torchrun", tell(signal.SIGINT, group=True), TORCHRUN),
}
WHERE = ("virtual", "virtual", "local")  # in turn: two ranks in one process, and in two
SEEDS, BATCH_SIZE = 2, 16


def run(name: str, folder: Path, number: int) -> Outcome:
    """Start a run, trouble it at a random step, and ask for it again at once, as impatient people do."""
    results = folder / f"{name}-{number}"
    trouble = TROUBLES[name]
    where = "local" if trouble.starter else WHERE[number % len(WHERE)]
    own = (f"cluster={where}", f"seed={number % SEEDS}", f"task.batch_size={BATCH_SIZE}")
    words = (*trouble.starter, "-m", "experiments", "run", *WORDS, *own)
    first = Case(results, start_python(results, *words))
    at = random.Random(f"{name} {number}").randrange(1, STEPS * 3 // 4)
    await_(lambda: first.step() >= at or first.process.poll() is not None, f"step {at}", pause=0.02)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):  # it was quicker
        trouble.act(first)
    said = []
    faults = []
    for process in (first.process, start_python(results, *words)):
        _, errors = process.communicate(timeout=DEADLINE_S)
        if process.returncode > 0:
            lines = [line for line in errors.splitlines() if SENTENCE.match(line)]
            said += lines[:1] or [f"nothing but {errors!r}"]
        if "Traceback" in errors and not trouble.starter:
            faults.append("a traceback")
    store = Store(results / "runs")
    attempts = [attempt for run in store.runs() for attempt in store.attempts(run)]
    whole = [attempt for attempt in attempts if attempt.state == "ok"]
    if len(whole) != 1:
        faults.append(f"{len(whole)} whole attempts")
    for attempt in whole:
        faults += faults_in(attempt)
    return Outcome(first.process.returncode != 0, faults, "; ".join(said), len(left_of(results)))
