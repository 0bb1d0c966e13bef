"""A run by processes that mpirun, horovodrun, torchrun or srun started, each with our command line.

Every process comes here with the same words. Rank 0 looks for a record, and for data, and begins the attempt;
it tells the others, and each is a worker in this very process.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from analysis.files import Watched, read_json, write_json
from analysis.records import Attempt, run_id
from experiments.config.folders import Folders
from experiments.config.measured import missing
from experiments.config.plan import plan_runs
from experiments.launch.attempt import begin_attempt
from experiments.launch.diagnosis import diagnose
from experiments.launch.local import run_lock
from experiments.training.stop import EXIT_CODE, Preempted, Stop
from experiments.worker import connect, errors, lifeline
from experiments.worker.run import execute, prepare_device
from slurm import environment
from slurm.environment import Joined
from sparsify.comm import Comm

if TYPE_CHECKING:  # it names Horovod's communicator, which may not be installed
    from experiments.worker.connect import AnyComm

SETTLE_S = 1.0  # in which the worker that failed first says why, before those who lost it do
BAD_INPUT = 2


def run_as_worker(
    config: dict[str, Any], group: Joined, folders: Folders, say: Callable[[str], None], force: bool = False
) -> Attempt:
    """Make this run, as one of the group; returns the attempt that holds its record.

    Raises:
        ValueError: these processes can't be the workers of this run.
        SystemExit: the run failed, and `say` has said why.
    """
    lifeline.end_with_parent()
    stop = Stop().listen()
    place, meeting = group.place, folders.scratch / "joined" / environment.step_name()
    tell = say if place.rank == 0 else lambda line: None
    # What can't be is said by all: the first to end ends the others.
    device = prepare_device(config, place)
    comm = connect.join(config, group, meeting, device)
    with contextlib.ExitStack() as held:
        told = spread(comm, device, lambda: _prepare(config, folders, held, tell, force))
        if "why" in told:
            raise ValueError(told["why"])
        attempt = Attempt(Path(told["attempt"]))
        if "orders" not in told:
            tell("already measured; --force measures again")
            comm.barrier()
            comm.close()
            return attempt
        _work(Path(told["orders"]), attempt, group, stop, comm, tell)
        if place.rank == 0:
            shutil.rmtree(Path(told["orders"]).parent, ignore_errors=True)
            shutil.rmtree(meeting, ignore_errors=True)
    return attempt


def spread(comm: Comm, device: torch.device, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 decides, on all ranks; where it can't, all get the reason as {"why": ...}."""
    raw = b""
    if comm.rank == 0:
        try:
            raw = json.dumps(decide()).encode()
        except ValueError as error:
            raw = json.dumps({"why": str(error)}).encode()
    length = int(comm.broadcast(torch.tensor([len(raw)], device=device)))
    content = torch.tensor(list(raw) or [0] * length, dtype=torch.uint8, device=device)
    told: dict[str, Any] = json.loads(bytes(comm.broadcast(content).tolist()))
    return told


def _prepare(
    config: dict[str, Any],
    folders: Folders,
    held: contextlib.ExitStack,
    say: Callable[[str], None],
    force: bool,
) -> dict[str, str]:
    """On rank 0: the attempt to carry out and its orders, or only the attempt that is valid already."""
    (planned,) = plan_runs([config], say)
    held.enter_context(run_lock(folders, run_id(planned.config)))
    if not force and not missing([planned], folders, say):
        done = folders.store.valid(planned.config)
        assert done is not None
        return {"attempt": str(done.path)}
    begun = begin_attempt(planned, folders, anew=force)
    return {"attempt": str(begun.attempt.path), "orders": begun.orders}


def _work(
    path: Path, attempt: Attempt, group: Joined, stop: Stop, comm: AnyComm, say: Callable[[str], None]
) -> None:
    """Be a worker of this run, and leave the reason where it fails, as a worker's own process does."""
    orders = read_json(path)
    assert orders is not None, path
    with _reasons(path.parent, attempt, group, say):
        execute(orders, attempt, group.place, path.parent, stop, comm)


@contextlib.contextmanager
def _reasons(folder: Path, attempt: Attempt, group: Joined, say: Callable[[str], None]) -> Iterator[None]:
    """An error ends this process with an exit code, after every worker has said what it knows.

    mpirun and its like end all processes once one ends badly, so each writes the reason into the manifest.
    """
    watched = Watched(attempt.path)
    try:
        yield
    except Preempted as preempted:
        say(f"{attempt.run_id}: {preempted}; run again to go on")
        sys.exit(EXIT_CODE)
    except BaseException as error:
        kind, why = errors.explain(error)
        traceback.print_exc()
        rank, size = group.place.rank, group.place.size
        with contextlib.suppress(OSError):  # a full disk may refuse even this
            write_json(folder / f"failure{rank}.json", {"rank": rank, "kind": kind, "why": why})
            time.sleep(SETTLE_S)
            kind, why = diagnose(folder, dict.fromkeys(range(size), 1), size)
            if kind != "held" and watched.is_there():  # else its manifest is another's
                attempt.fail(why, kind)
        say(f"experiments: {attempt.run_id} failed: {why}")
        sys.exit(BAD_INPUT if kind == "bad_input" else 1)
