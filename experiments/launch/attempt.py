"""The one place where an attempt begins: a planned run -> the attempt that will hold its record, and the
files that its workers are started from.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from analysis.records.files import check_no_link
from analysis.records.locks import Lock
from analysis.records.log import PATIENCE_S, Held
from analysis.records.schema import JobNote
from analysis.records.store import DAMAGED, Attempt, Store
from experiments.config import code_version
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.machines import Container, SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.diagnosis import CANCEL_FILE, POLICIES
from experiments.worker.orders import Orders
from slurm import container as containers
from slurm import images, pyxis
from slurm.images import ContainerConfig
from slurm.worker_process import ORDERS_FILE, WorkerCommand

LEAVE_S, POLL_S = 10.0, 0.1  # that the workers of an earlier start get to end
UNFINISHED_STATES = ("submitted", "running", "preempted")
WORKER_ARGUMENTS = (
    "-u",
    "-m",
    "experiments.worker",
)  # followed by a run's orders and the folder of this start


class StartedAttempt(NamedTuple):
    """An attempt whose workers can be started."""

    planned: PlannedRun
    attempt: Attempt
    folder: Path  # for its starts: orders, notes, and the logs of workers on this machine

    @property
    def orders(self) -> str:
        """The file of what its workers are told."""
        return str(self.folder / ORDERS_FILE)


def start_attempt(
    planned: PlannedRun,
    folders: Folders,
    *,
    anew: bool = False,
    exclusive: bool = True,
    job: str | None = None,
    sweep: str | None = None,
    array: str | None = None,
    slurm: str | None = None,
    network: dict[str, Any] | None = None,
    relay: str | None = None,
) -> StartedAttempt:
    """Begin an attempt, or take up the last one where it can go on. The caller holds the run's lock, or knows
    that nobody else begins it.

    Args:
        anew: begin a new one in any case.
        exclusive: will nothing else run on the same machines?
        job, sweep, array: SLURM's name of the job, and where `submit` noted it. Each start of a run of a
            sweep has a folder of its own, for its job may be requeued; what earlier ones left stays.
        slurm: the name of the cluster that the job is submitted to.
        network: facts about the emulated one, for the record.
        relay: the file in which its relay tells what it has done, if it has one.

    Raises:
        Held: somebody is still at the last one.
        Damaged: a link stands where something would be written.
    """
    if (last := folders.store.last(planned.config)) is not None:
        wait_for_writers(last, PATIENCE_S if sweep else LEAVE_S)
    attempt = resume_or_create_attempt(planned.config, folders.store, anew, planned.rules)
    folder = folders.launch(attempt)
    check_no_link(folder)
    if not sweep:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CANCEL_FILE).unlink(missing_ok=True)
    begun = StartedAttempt(planned, attempt, folder)
    config = planned.config
    Orders(
        config=config.as_dict(),
        attempt=str(attempt.path),
        data_root=str(planned.data_root) if planned.data_root else None,
        same_host=not sweep,
        interface=getattr(config.cluster, "interface", None),
        image=checked_image_provenance(container_config(config)),
        network=network,
        relay=relay,
    ).write(Path(begun.orders))
    attempt.note_job(JobNote(job, slurm, os.getuid() if sweep else None))
    attempt.update(
        state="submitted", alone=planned.is_timing and exclusive, sweep=sweep, array=array,
        why=None, failure=None,
    )  # fmt: skip
    return begun


def run_lock(folders: Folders, name: str) -> Lock:
    """The lock that a process holds while it makes the run of this name on this machine."""
    return Lock(folders.scratch / "locks" / f"{name}.lock")


def wait_for_lock(lock: Lock, name: str, say: Callable[[str], None], give_up: Callable[[], bool]) -> bool:
    """Wait for a run's lock, which another process holds; False where `give_up` ended the wait.

    Args:
        name: of the run.
    """
    say(f"{name}: another process is measuring this run; waiting for it")
    while not lock.acquire(patience_s=1):
        if give_up():
            return False
    return True


def resume_or_create_attempt(
    config: Config, store: Store, anew: bool = False, rules: Mapping[str, str] = MappingProxyType({})
) -> Attempt:
    """The attempt to make: one that ended early and left a checkpoint goes on, if the code is the same.

    Args:
        rules: that a new one registers.
    """
    last = store.last(config)
    if not anew and last is not None and _can_resume(last):
        return last
    attempt = store.begin(config)
    attempt.update(code=code_version.digest(), sources=code_version.sources(), rules=dict(rules))
    return attempt


def wait_for_writers(attempt: Attempt, patience_s: float) -> None:
    """Wait for its writers to end: those of a starter that was just killed, for example.

    Raises:
        Held: somebody is still at it.
    """
    deadline = time.monotonic() + patience_s
    while (holder := attempt.writer()) is not None:
        if time.monotonic() > deadline:
            raise Held(f"{holder} is still writing {attempt.path}: wait for its end, or end it")
        time.sleep(POLL_S)


def _can_resume(attempt: Attempt) -> bool:
    if attempt.state == DAMAGED:
        return False
    manifest = attempt.manifest
    policy = POLICIES.get(manifest.get("failure", ""))
    # Nobody is at it: who asks holds the run's lock, or knows that its job is gone.
    ended_early = manifest["state"] in UNFINISHED_STATES or (policy is not None and policy.resumes)
    if not ended_early or manifest.get("code") != code_version.digest():
        return False
    attempt.check_no_links()
    return attempt.saved_step() > 0


def container_config(config: Config) -> ContainerConfig | None:
    """The image that the workers run in, by its full path: jobs run in a copy of the code, which has none."""
    if not isinstance(config.container, Container):
        return None
    image = config.container.image
    if config.container.runtime != pyxis.RUNTIME or pyxis.is_image_file(image):
        image = str(images.image_path(image))
    return ContainerConfig(**{**asdict(config.container), "image": image})


@cache
def checked_image_provenance(image: ContainerConfig | None) -> dict[str, Any] | None:
    """Facts about an image, for the record; None without one.

    Raises:
        ValueError: it can't be used here.
    """
    if image is None:
        return None
    containers.check_container(image)
    return containers.image_provenance(image)


def missing_requirements(planned: Sequence[PlannedRun]) -> list[str]:
    """What these runs need and this machine has not, before any of them is begun: a program, an image."""
    found = dict[str, None]()
    for image in {container_config(run.config) for run in planned}:
        try:
            checked_image_provenance(image)
        except ValueError as error:
            found[str(error)] = None
    return [*found]


def worker_command(planned: PlannedRun, folders: Folders, code: Path) -> WorkerCommand:
    """The command that starts the workers of this run, and of all runs of its shape.

    Args:
        code: the checkout, or a copy of it.
    """
    config = planned.config
    cluster = config.cluster if isinstance(config.cluster, SlurmCluster) else None
    # What a container must see: the code, the results, this Python and its packages, the data.
    binds = [code, folders.store.root.parent, Path(sys.prefix), Path(sys.base_prefix)]
    binds += [planned.data_root] if planned.data_root else []
    return WorkerCommand(
        command=[(cluster and cluster.python) or sys.executable, *WORKER_ARGUMENTS],
        cwd=str(code),
        threads=config.threads,
        container=container_config(config),
        binds=[str(bind) for bind in binds],
        gpu=config.device == "cuda",
        enter=[*cluster.enter] if cluster else [],
    )
