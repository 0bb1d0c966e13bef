"""The one place where an attempt begins: its record's folder, and the files that its workers start from."""

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

from analysis.records.files import check_not_link
from analysis.records.locks import FileLock
from analysis.records.log import LOCK_TIMEOUT_S, LogInUseError
from analysis.records.schema import SlurmJobRecord
from analysis.records.store import DAMAGED, Attempt, Store
from experiments.config import code_version
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import Container, SlurmCluster
from experiments.config.plan import PlannedRun
from experiments.launch.diagnosis import CANCEL_FILE, POLICIES
from experiments.worker.orders import RunOrders
from slurm import container as containers
from slurm import images, pyxis
from slurm.emulated.network import EmulatedNetwork
from slurm.images import ContainerConfig
from slurm.worker_process import ORDERS_FILE, WorkerCommand

LEAVE_S = 10.0  # that the workers of an earlier start get to end
POLL_S = 0.1
UNFINISHED_STATES = ("submitted", "running", "preempted")
WORKER_ARGUMENTS = (
    "-u",
    "-m",
    "experiments.worker",
)  # followed by a run's orders and the folder of this start


class PreparedAttempt(NamedTuple):
    """An attempt whose workers can be started: its record is open, its orders are written."""

    planned: PlannedRun
    attempt: Attempt
    folder: Path  # for its starts: orders, notes, and the logs of workers on this machine

    @property
    def orders_file(self) -> str:
        """The file of the workers' orders."""
        return str(self.folder / ORDERS_FILE)


def prepare_attempt(
    planned: PlannedRun,
    folders: ResultFolders,
    *,
    force_new: bool = False,
    alone_on_machines: bool = True,
    job: str | None = None,
    sweep: str | None = None,
    array: str | None = None,
    cluster: str | None = None,
    network: EmulatedNetwork | None = None,
) -> PreparedAttempt:
    """Create an attempt, or take up the last one where it can go on, and write its workers' orders.

    The caller holds the run's lock, or knows that nobody else begins it.

    Args:
        force_new: create a new attempt in any case.
        alone_on_machines: will nothing else run on the same machines?
        job, sweep, array: SLURM's name of the job, and where `submit` noted it. Each start of a run of a
            sweep has a folder of its own, for its job may be requeued; what earlier ones left stays.
        cluster: the name of the SLURM cluster that the job is submitted to.
        network: the emulated one.

    Raises:
        LogInUseError: somebody is still writing the last attempt.
        DamagedFileError: a link stands where something would be written.
    """
    config = planned.config
    last = folders.store.find_newest_of_config(config)
    if last is not None:
        wait_for_writers(last, LOCK_TIMEOUT_S if sweep else LEAVE_S)
    attempt = resume_or_create_attempt(config, folders.store, force_new, planned.rule_digest_by_claim)
    folder = folders.launch_folder(attempt)
    check_not_link(folder)
    if not sweep:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CANCEL_FILE).unlink(missing_ok=True)
    started = PreparedAttempt(planned, attempt, folder)
    RunOrders(
        config=config.as_dict(),
        attempt_folder=str(attempt.path),
        data_root=str(planned.data_root) if planned.data_root else None,
        same_host=not sweep,
        interface=getattr(config.cluster, "interface", None),
        image_facts=checked_image_provenance(container_config(config)),
        network_facts=network.facts if network else None,
        relay_statistics_file=str(network.statistics) if network and network.statistics else None,
    ).write(Path(started.orders_file))
    attempt.store_slurm_job(SlurmJobRecord(job, cluster, os.getuid() if sweep else None))
    attempt.update_manifest(
        state="submitted",
        alone=planned.is_timing and alone_on_machines,
        sweep=sweep,
        array=array,
        why=None,
        failure=None,
    )
    return started


def run_lock(folders: ResultFolders, run_id: str) -> FileLock:
    """Return the lock, not yet acquired, that a process holds while it makes a run on this machine."""
    return FileLock(folders.scratch / "locks" / f"{run_id}.lock")


def wait_to_acquire_run_lock(
    lock: FileLock, run_id: str, say: Callable[[str], None], give_up: Callable[[], bool]
) -> bool:
    """Acquire a run's lock, which another process holds; return False where `give_up` ended the wait."""
    say(f"{run_id}: another process is measuring this run; waiting for it")
    while not lock.acquire(timeout_s=1):
        if give_up():
            return False
    return True


def resume_or_create_attempt(
    config: Config, store: Store, force_new: bool = False, rules: Mapping[str, str] = MappingProxyType({})
) -> Attempt:
    """Return the last attempt if it can go on from its checkpoint with this code, else a new one.

    Args:
        rules: rules of claims that a new attempt registers.
    """
    last = store.find_newest_of_config(config)
    if not force_new and last is not None and _can_resume(last):
        return last
    attempt = store.create_attempt(config)
    attempt.update_manifest(
        code=code_version.code_digest(), sources=code_version.digest_by_measuring_file(), rules=dict(rules)
    )
    return attempt


def wait_for_writers(attempt: Attempt, patience_s: float) -> None:
    """Wait until nobody writes an attempt, such as the workers of a starter that was just killed.

    Raises:
        LogInUseError: somebody is still writing it.
    """
    deadline = time.monotonic() + patience_s
    while True:
        writer = attempt.describe_writer()
        if not writer:
            return
        if time.monotonic() > deadline:
            raise LogInUseError(f"{writer} is still writing {attempt.path}: wait for its end, or end it")
        time.sleep(POLL_S)


def _can_resume(attempt: Attempt) -> bool:
    if attempt.state == DAMAGED:
        return False
    manifest = attempt.manifest
    policy = POLICIES.get(manifest.get("failure", ""))
    # Nobody is writing it: who asks holds the run's lock, or knows that its job is gone.
    ended_early = manifest["state"] in UNFINISHED_STATES or (policy is not None and policy.can_resume)
    if not ended_early or manifest.get("code") != code_version.code_digest():
        return False
    attempt.check_no_links()
    return attempt.newest_whole_checkpoint_step_or_zero() > 0


def container_config(config: Config) -> ContainerConfig | None:
    """Return the container that the workers run in; None without one.

    Its image has a full path: jobs run in a copy of the code, which has no images.
    """
    if not isinstance(config.container, Container):
        return None
    image = config.container.image
    if config.container.runtime != pyxis.RUNTIME or pyxis.is_image_path(image):
        image = str(images.image_path(image))
    return ContainerConfig(**{**asdict(config.container), "image": image})


@cache
def checked_image_provenance(container: ContainerConfig | None) -> dict[str, Any] | None:
    """Return facts about an image that can be used here, for the record; None without one.

    Raises:
        ValueError: it can't be used here.
    """
    if container is None:
        return None
    containers.check_container_usable_here(container)
    return containers.image_provenance(container)


def describe_missing_requirements(planned: Sequence[PlannedRun]) -> list[str]:
    """Return sentences on what these runs need and this machine has not: a program, an image."""
    sentences: dict[str, None] = {}
    for container in {container_config(run.config) for run in planned}:
        try:
            checked_image_provenance(container)
        except ValueError as error:
            sentences[str(error)] = None
    return [*sentences]


def worker_command(planned: PlannedRun, folders: ResultFolders, code: Path) -> WorkerCommand:
    """Return the command that starts the workers of this run, and of all runs of its shape.

    Args:
        code: the checkout, or a copy of it.
    """
    config = planned.config
    cluster = config.cluster if isinstance(config.cluster, SlurmCluster) else None
    # What a container must see: the code, the results, this Python and its packages, the data.
    binds = [code, folders.store.root.parent, Path(sys.prefix), Path(sys.base_prefix)]
    if planned.data_root:
        binds.append(planned.data_root)
    return WorkerCommand(
        command=[(cluster and cluster.python) or sys.executable, *WORKER_ARGUMENTS],
        cwd=str(code),
        threads=config.threads,
        container=container_config(config),
        binds=[str(bind) for bind in binds],
        gpu=config.device == "cuda",
        enter=[*cluster.enter] if cluster else [],
    )
