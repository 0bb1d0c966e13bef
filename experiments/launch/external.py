"""A run by processes that mpirun, horovodrun, torchrun or srun started, each with our command line.

Every process comes here with the same words. Rank 0 looks for a record, and for data, and begins the attempt;
it tells the others, and each is a worker in this very process.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from analysis.records.configs import run_id
from analysis.records.files import FolderReplacementDetector
from analysis.records.store import Attempt
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.plan import find_unmeasured_runs, plan_distinct_runs_and_ensure_data
from experiments.launch.attempt import prepare_attempt, run_lock, wait_to_acquire_run_lock
from experiments.launch.diagnosis import CommandInterrupted, diagnose_failed_start
from experiments.training.stop_signal import Preempted, StopSignal
from experiments.worker import connect
from experiments.worker.build import prepare_device
from experiments.worker.errors import print_and_write_failure
from experiments.worker.orders import RunOrders
from experiments.worker.run import execute_run
from slurm import environment, worker_process
from slurm.environment import LauncherGroup, WorkerPlace
from sparsify.comm import WorkerLost, gather_json

SETTLE_S = 1.0  # in which the worker that failed first says why, before those who lost it do
BAD_INPUT = 2
PATIENCE_IN_TERMINALS_S = 40.0  # with other tasks of a step of `srun --pty`, which may be a shell's alone
IN_TERMINAL = (
    "srun opened this step for a terminal (--pty) with {size} tasks, and the others do not run this command: "
    f"`unset {' '.join(environment.RANK_VARIABLES_BY_LAUNCHER['srun'])}` and run it again, and the workers "
    "are started for you"
)
STOPPED_EARLY = "told to end while it waited for other processes: nothing was begun, run again to begin"


def run_as_worker(
    config: Config,
    group: LauncherGroup,
    folders: ResultFolders,
    say: Callable[[str], None],
    force: bool = False,
) -> Attempt:
    """Carry out a run as one process of a launcher's group, and return the attempt that holds its record.

    Raises:
        ValueError: these processes can't be the workers of this run.
        SystemExit: the run failed, and `say` has said why.
    """
    worker_process.kill_self_when_parent_ends()
    stop = StopSignal().install_handlers()
    place = group.place
    meeting = folders.scratch / "joined" / environment.job_step_name()
    say_once = say if place.rank == 0 else lambda line: None
    # What can't be is said by all: the first to end ends the others.
    device = prepare_device(config, place)
    is_in_terminal = group.launcher == "srun" and environment.is_srun_pty_step()
    gives_up_at = time.monotonic() + (PATIENCE_IN_TERMINALS_S if is_in_terminal else math.inf)

    def give_up() -> bool:
        return stop.is_set or time.monotonic() > gives_up_at

    try:
        comm = connect.join_external_group(config, group, meeting, device, give_up, say)
    except WorkerLost as lost:
        if stop.is_set:
            raise CommandInterrupted(STOPPED_EARLY) from lost
        raise ValueError(IN_TERMINAL.format(size=place.size) if is_in_terminal else str(lost)) from lost
    with contextlib.ExitStack() as held_lock:
        plan: dict[str, str] = {}
        if place.rank == 0:
            try:
                plan = _prepare(config, folders, held_lock, say, force, stop)
            except ValueError as error:
                plan = {"why": str(error)}
        plan = gather_json(comm, plan, device)[0]
        if "why" in plan:
            raise ValueError(plan["why"])
        attempt = Attempt(Path(plan["attempt"]))
        if "orders" not in plan:
            say_once("already measured; --force measures again")
            comm.barrier()
            comm.close()
            return attempt
        orders = Path(plan["orders"])
        with _exit_with_reason(orders.parent, attempt, place, say_once):
            execute_run(RunOrders.read(orders), place, orders.parent, stop, comm)
        if place.rank == 0:
            shutil.rmtree(orders.parent, ignore_errors=True)
            shutil.rmtree(meeting, ignore_errors=True)
    return attempt


def _prepare(
    config: Config,
    folders: ResultFolders,
    held_lock: contextlib.ExitStack,
    say: Callable[[str], None],
    force: bool,
    stop: StopSignal,
) -> dict[str, str]:
    """Return the attempt to carry out and its orders, or only the attempt that is valid already."""
    (planned,) = plan_distinct_runs_and_ensure_data([config], say)
    name = run_id(planned.config)
    lock = held_lock.enter_context(run_lock(folders, name))
    if not lock.acquire(timeout_s=0):
        if not wait_to_acquire_run_lock(lock, name, say, lambda: stop.is_set):
            raise ValueError(STOPPED_EARLY)
        force = False  # what it measured meanwhile is as fresh as anything we could measure
    if not force and not find_unmeasured_runs([planned], folders, say):
        valid = folders.store.find_newest_valid_of_config(planned.config)
        assert valid is not None
        return {"attempt": str(valid.path)}
    started = prepare_attempt(planned, folders, force_new=force)
    return {"attempt": str(started.attempt.path), "orders": started.orders_file}


@contextlib.contextmanager
def _exit_with_reason(
    folder: Path, attempt: Attempt, place: WorkerPlace, say: Callable[[str], None]
) -> Iterator[None]:
    """End this process at an error with an exit code, after every worker has said what it knows.

    mpirun and its like end all processes once one ends badly, so each writes the reason into the manifest.
    """
    attempt_folder = FolderReplacementDetector(attempt.path)
    start_folder = FolderReplacementDetector(folder)
    try:
        yield
    except Preempted as preempted:
        say(f"{attempt.run_id}: {preempted}; run again to go on")
        sys.exit(worker_process.STOPPED)
    except BaseException as error:
        kind, why = print_and_write_failure(error, place.rank, start_folder)
        with contextlib.suppress(OSError):  # a full disk may refuse even this
            time.sleep(SETTLE_S)
            kind, why = diagnose_failed_start(folder, dict.fromkeys(range(place.size), 1), place.size)
            if kind != "held" and attempt_folder.is_still_there():  # else its manifest is another's
                attempt.mark_failed_unless_whole(why, kind)
        say(f"experiments: {attempt.run_id} failed: {why}")
        sys.exit(BAD_INPUT if kind == "bad_input" else 1)
