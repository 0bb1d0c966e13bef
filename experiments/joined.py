"""A run by processes that somebody else started: mpirun, horovodrun, torchrun or srun called us N times.

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
from typing import Any

import torch
from filelock import FileLock

from analysis.records import Attempt, read_json, run_id, write_json
from experiments import groups, worker
from experiments.diagnosis import diagnose
from experiments.orders import attempt_for, write_orders
from experiments.planning import Folders, provide
from experiments.run import execute, prepare_device
from experiments.signals import EXIT_CODE, Preempted, Stop
from slurm import environment
from slurm.environment import Joined
from sparsify.comm import Comm

SETTLE_S = 1.0  # in which the worker that failed first says why, before those who lost it do
BAD_INPUT = 2


def carry_out_here(
    config: dict[str, Any], group: Joined, folders: Folders, say: Callable[[str], None], force: bool = False
) -> Attempt:
    """Make this run, as one of the group; returns the attempt that holds its record.

    Raises:
        ValueError: these processes can't be the workers of this run.
        SystemExit: the run failed, and `say` has said why.
    """
    stop = Stop().listen()
    place, meeting = group.place, folders.scratch / "joined" / environment.step_name()
    tell = say if place.rank == 0 else lambda line: None
    # What can't be is said by all: the first to end ends the others.
    device = prepare_device(config, place)
    comm = groups.join(config, group, meeting, device)
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
    """What rank 0 decides, on all ranks; where it can't, everybody gets the reason as {"why": ...}."""
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
    (planned,) = provide([config], say)
    name = run_id(planned.config)
    lock = FileLock(folders.scratch / "locks" / f"{name}.lock")
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    held.enter_context(lock)
    if not force and (done := folders.store.valid(planned.config)) is not None:
        return {"attempt": str(done.path)}
    attempt = attempt_for(planned.config, folders.store, anew=force)
    folder = folders.scratch / f"{name}-{attempt.number:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    entry = write_orders(planned, attempt, folder, same_host=False)
    attempt.update(state="submitted", alone=planned.is_timing, why=None, failure=None)
    return {"attempt": str(attempt.path), "orders": entry["orders"]}


def _work(
    path: Path, attempt: Attempt, group: Joined, stop: Stop, comm: Comm, say: Callable[[str], None]
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
    try:
        yield
    except Preempted as preempted:
        say(f"{preempted}: run again to go on")
        sys.exit(EXIT_CODE)
    except BaseException as error:
        kind, why = worker.explain(error)
        traceback.print_exc()
        rank, size = group.place.rank, group.place.size
        write_json(folder / f"failure{rank}.json", {"rank": rank, "kind": kind, "why": why})
        time.sleep(SETTLE_S)
        kind, why = diagnose(folder, dict.fromkeys(range(size), 1), size)
        attempt.fail(why, kind)
        say(f"experiments: {attempt.run_id} failed: {why}")
        sys.exit(BAD_INPUT if kind == "bad_input" else 1)
