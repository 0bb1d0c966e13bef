"""The one place where an attempt begins: a planned run -> the attempt that will hold its record, and the
files that its workers are started from.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.files import PATIENCE_S, Held, write_json
from analysis.records import DAMAGED, Attempt, Store
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.config.plan import PlannedRun
from experiments.launch.diagnosis import CANCEL, RESUMABLE
from slurm import container as containers
from slurm.worker_process import WorkerCommand

LEAVE_S, POLL_S = 10.0, 0.1  # that the workers of an earlier start get to end
UNFINISHED = ("submitted", "running", "preempted")
WORKER = ("-u", "-m", "experiments.worker")  # followed by a run's orders and the folder of this start


class Begun(NamedTuple):
    """An attempt whose workers can be started."""

    planned: PlannedRun
    attempt: Attempt
    folder: Path  # for its starts: orders, notes, and the logs of workers on this machine

    @property
    def orders(self) -> str:
        """The file of what its workers are told."""
        return str(self.folder / "launch.json")

    @property
    def entry(self) -> dict[str, str]:
        """How the spec of a SLURM job names this run."""
        return {"orders": self.orders, "folder": str(self.folder)}


def begin_attempt(
    planned: PlannedRun,
    folders: Folders,
    *,
    anew: bool = False,
    same_host: bool = False,
    starts: bool = False,
    exclusive: bool = True,
    job: str | None = None,
    sweep: str | None = None,
    array: str | None = None,
    network: Mapping[str, Any] | None = None,
) -> Begun:
    """Begin an attempt, or take up the last one where it can go on. The caller holds the run's lock, or knows
    that nobody else begins it.

    Args:
        anew: begin a new one in any case.
        same_host: all workers will be on this machine.
        starts: each start has a folder of its own, as those of a job that is requeued; what earlier ones left
            stays.
        exclusive: will nothing else run on the same machines?
        job, sweep, array: SLURM's name of the job, and where `submit` noted it.
        network: facts about the emulated one, for the record.

    Raises:
        Held: somebody is still at the last one.
    """
    if (last := folders.store.last(planned.config)) is not None:
        check_left(last, PATIENCE_S if starts else LEAVE_S)
    attempt = attempt_for(planned.config, folders.store, anew)
    folder = folders.launch(attempt)
    if not starts:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CANCEL).unlink(missing_ok=True)
    begun = Begun(planned, attempt, folder)
    write_json(Path(begun.orders), {**orders(planned, attempt, same_host), "network": network})
    attempt.note_job(job)
    attempt.update(
        state="submitted", alone=planned.is_timing and exclusive, sweep=sweep, array=array,
        why=None, failure=None,
    )  # fmt: skip
    return begun


def attempt_for(config: Mapping[str, Any], store: Store, anew: bool = False) -> Attempt:
    """The attempt to make: one that ended early and left a checkpoint goes on, if the code is the same."""
    last = store.last(config)
    if not anew and last is not None and can_go_on(last):
        return last
    attempt = store.begin(config)
    attempt.update(code=code_version.digest(), sources=code_version.sources())
    return attempt


def check_left(attempt: Attempt, patience_s: float) -> None:
    """Its writers have ended, or do so now: those of a starter that was just killed, for example.

    Raises:
        Held: somebody is still at it.
    """
    deadline = time.monotonic() + patience_s
    while (holder := attempt.writer()) is not None:
        if time.monotonic() > deadline:
            raise Held(f"{holder} is still writing {attempt.path}: wait for its end, or end it")
        time.sleep(POLL_S)


def can_go_on(attempt: Attempt) -> bool:
    if attempt.state == DAMAGED:
        return False
    manifest = attempt.manifest
    # Nobody is at it: who asks holds the run's lock, or knows that its job is gone.
    ended_early = manifest["state"] in UNFINISHED or manifest.get("failure") in RESUMABLE
    return ended_early and manifest.get("code") == code_version.digest() and attempt.has_checkpoint()


def orders(planned: PlannedRun, attempt: Attempt, same_host: bool) -> dict[str, Any]:
    """What the workers of this run are told."""
    config = planned.config
    return {
        "config": config,
        "attempt": str(attempt.path),
        "data_root": str(planned.data_root) if planned.data_root else None,
        "meet": "file" if same_host else "tcp",
        "interface": config["cluster"].get("interface"),
        "image": image_facts(json.dumps(config["container"], sort_keys=True)),
        "code": code_version.origin(),
    }


@cache
def image_facts(container: str) -> dict[str, Any] | None:
    """Which image a choice of conf/container is, as JSON; None without one.

    Raises:
        ValueError: it can't be used here.
    """
    choice = json.loads(container)
    containers.check(choice)
    return containers.facts(choice)


def worker_command(planned: PlannedRun, folders: Folders, code: Path) -> WorkerCommand:
    """What starts the workers of this run, and of all runs of its shape.

    Args:
        code: the checkout, or a copy of it.
    """
    config = planned.config
    # What a container must see: the code, the results, this Python and its packages, the data.
    binds = [code, folders.store.root.parent, Path(sys.prefix), Path(sys.base_prefix)]
    binds += [planned.data_root] if planned.data_root else []
    return WorkerCommand(
        command=[config["cluster"].get("python") or sys.executable, *WORKER],
        cwd=str(code),
        threads=config["threads"],
        container=dict(containers.resolved(config["container"])),
        binds=[str(bind) for bind in binds],
        gpu=config["device"] == "cuda",
        enter=config["cluster"].get("enter", []),
    )
