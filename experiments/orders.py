"""A planned run -> the attempt that will hold its record, and the files that its workers are started from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.records import Attempt, Store, write_json
from experiments import snapshot
from experiments.diagnosis import RESUMABLE

if TYPE_CHECKING:  # submitit comes with it, which redrawing figures must not need
    from slurm.task import RunTask

UNFINISHED = ("submitted", "running", "preempted")
WORKER = ("-u", "-m", "experiments.worker")  # followed by a run's orders and the folder of this start


@dataclass(frozen=True)
class Planned:
    """A run to be made: its resolved config, and the folder of its data."""

    config: dict[str, Any]
    data_root: Path | None

    @property
    def is_timing(self) -> bool:
        """Is it there for its step times? Then nothing else may run beside it. A run that validates every
        epoch is there for its curve."""
        return self.config["train"]["validate"] == "never" or self.config["timing"]["mode"] == "as_published"

    @property
    def tasks(self) -> int:
        """Processes."""
        return 1 if self.config["cluster"]["where"] == "virtual" else int(self.config["workers"])

    @property
    def cores(self) -> int:
        return self.tasks * int(self.config["threads"])


def attempt_for(config: Mapping[str, Any], store: Store, anew: bool = False) -> Attempt:
    """The attempt to carry out: one that ended early and left a checkpoint goes on, if the code is the same.

    Args:
        anew: begin a new one in any case.
    """
    last = store.last(config)
    if not anew and last is not None and can_go_on(last):
        return last
    attempt = store.begin(config)
    attempt.update(code=snapshot.digest())
    return attempt


def can_go_on(attempt: Attempt) -> bool:
    manifest = attempt.manifest
    # Nobody is at it: who asks holds the run's lock, or knows that its job is gone.
    ended_early = manifest["state"] in UNFINISHED or manifest.get("failure") in RESUMABLE
    return ended_early and manifest.get("code") == snapshot.digest() and attempt.has_checkpoint()


def write_orders(planned: Planned, attempt: Attempt, folder: Path, same_host: bool) -> dict[str, str]:
    """What the workers of this run are told, in `folder`/launch.json; returns the run's entry for a spec."""
    config = planned.config
    orders = {
        "config": config,
        "attempt": str(attempt.path),
        "data_root": str(planned.data_root) if planned.data_root else None,
        "meet": "file" if same_host else "tcp",
        "interface": config["cluster"].get("interface"),
        "image": image_facts(json.dumps(config["container"], sort_keys=True)),
        "code": snapshot.origin(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "launch.json", orders)
    return {"orders": str(folder / "launch.json"), "folder": str(folder)}


@cache
def image_facts(container: str) -> dict[str, Any] | None:
    """Which image a choice of conf/container is, as JSON; None without one.

    Raises:
        ValueError: it can't be used here.
    """
    from slurm import container as containers

    choice = json.loads(container)
    containers.check(choice)
    return containers.facts(choice)


def task_of(
    spec: Path, runs: Sequence[Mapping[str, str]], planned: Planned, store: Store, cwd: Path, same_host: bool
) -> RunTask:
    """The task that carries out these runs, all of the shape of `planned`."""
    from slurm import container
    from slurm.task import write_spec

    # What a container must see: the code, the results, this Python and its packages, the data.
    binds = [cwd, store.root.parent, Path(sys.prefix), Path(sys.base_prefix)]
    return write_spec(
        spec,
        runs,
        command=(planned.config["cluster"].get("python") or sys.executable, *WORKER),
        cwd=cwd,
        threads=planned.config["threads"],
        same_host=same_host,
        image=container.resolved(planned.config["container"]),
        binds=[*binds, planned.data_root] if planned.data_root else binds,
        gpu=planned.config["device"] == "cuda",
        tasks=planned.tasks,
        requeues=planned.config["cluster"].get("requeues", 0),
    )
