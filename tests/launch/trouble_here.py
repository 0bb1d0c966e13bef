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
from experiments.config.folders import Folders
from tests.launch.troubled import DEADLINE_S, STEPS, WORDS, Outcome, await_, faults_in, left_of, processes_of
from tests.worker.runs import start_python, workers_of

SENTENCE = re.compile(r"experiments: |topk-.*run again to go on")  # what a command that failed says


class Case(NamedTuple):
    """A run on this machine that is to get into trouble."""

    results: Path
    process: subprocess.Popen[str]

    @property
    def folders(self) -> Folders:
        return Folders(self.results)

    @property
    def attempt(self) -> Path:
        return next(self.results.glob("runs/*/*/run.json")).parent

    def step(self) -> int:
        """Steps done."""
        notes = [note for path in self.results.glob("launch/*/progress.json") if (note := read_json(path))]
        return max((int(note["step"]) for note in notes), default=0)


def tell(number: signal.Signals, group: bool = False) -> Callable[[Case], None]:
    """This signal to the starter alone, or to all."""

    def act(case: Case) -> None:
        (os.killpg if group else os.kill)(case.process.pid, number)

    return act


def tell_twice(case: Case) -> None:
    os.killpg(case.process.pid, signal.SIGINT)
    time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):  # it was quicker
        os.killpg(case.process.pid, signal.SIGINT)


def reboot(case: Case) -> None:
    for process in processes_of(case.results):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_one_worker(case: Case) -> None:
    workers = [*workers_of(case.results).values()]
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(workers), signal.SIGKILL)


def remove_logs(case: Case) -> None:
    for path in case.attempt.glob("rank*.jsonl"):
        path.unlink()


def remove_manifest(case: Case) -> None:
    (case.attempt / "run.json").unlink()


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
    "logs": Trouble("the logs are removed", remove_logs),
    "manifest": Trouble("the manifest is removed", remove_manifest),
    "results": Trouble("all results are removed", remove_results),
    "torchrun": Trouble("SIGKILL to torchrun", tell(signal.SIGKILL), TORCHRUN),
    "torchrun-int": Trouble("Ctrl-C under torchrun", tell(signal.SIGINT, group=True), TORCHRUN),
}
WHERE = ("virtual", "virtual", "local")  # in turn: two ranks in one process, and in two
SEEDS, BATCH_SIZE = 2, 16


def run(name: str, number: int, results: Path) -> Outcome:
    """Start a run, trouble it at a random step, and ask for it again at once, as impatient people do."""
    trouble = TROUBLES[name]
    where = "local" if trouble.starter else WHERE[number % len(WHERE)]
    chance = random.Random(f"{name} {number}")
    command = (*trouble.starter, "-m", "experiments", "run")
    words = (*command, *WORDS, f"cluster={where}", f"seed={number % SEEDS}", f"task.batch_size={BATCH_SIZE}")
    first = Case(results, start_python(results, *words))
    at = chance.randrange(1, STEPS * 3 // 4)
    await_(lambda: first.step() >= at or first.process.poll() is not None, f"step {at}", pause=0.02)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was quicker
        trouble.act(first)
    second = start_python(results, *words)
    ends = [process.communicate(timeout=DEADLINE_S) for process in (first.process, second)]
    said = [
        next((line for line in err.splitlines() if SENTENCE.match(line)), f"nothing but {err!r}")
        for process, (_, err) in zip((first.process, second), ends, strict=True)
        if process.returncode > 0
    ]
    faults = ["a traceback"] * any("Traceback" in err and not trouble.starter for _, err in ends)
    attempts = [
        attempt for run in first.folders.store.runs() for attempt in first.folders.store.attempts(run)
    ]
    whole = [attempt for attempt in attempts if attempt.state == "ok"]
    faults += [f"{len(whole)} whole attempts"] * (len(whole) != 1)
    faults += [fault for attempt in whole for fault in faults_in(attempt)]
    return Outcome(first.process.returncode != 0, faults, "; ".join(said), len(left_of(results)))
