"""The work of a SLURM job on its host, before and after its workers.

    python -m experiments.launch.job_hooks begin|end SPEC

The batch script calls these hooks, not a worker, so that they run however the workers end. They accept whole
records, note why other records are not whole, and requeue the job where that helps. They need neither torch
nor submitit.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from analysis.records.files import DamagedFileError, write_json
from analysis.records.log import InterferenceError
from analysis.records.store import Attempt, utc_timestamp
from experiments.config import code_version
from experiments.launch.bad_nodes import (
    LEDGER_FILE,
    append_node_failure,
    describe_missing_python,
    find_failure_time_by_node,
    find_nodes_without_python,
    unreliable_nodes,
)
from experiments.launch.diagnosis import AS_OFTEN_AS_ALLOWED, CANCEL_FILE, POLICIES, diagnose_failed_start
from experiments.worker.orders import RunOrders
from slurm import commands, environment
from slurm.worker_process import ORDERS_FILE, STOPPED, JobSpec, current_start_folder, read_exit_code_by_rank

CLOSED_FILE = "closed.json"  # in a start's folder: its end was seen
NO_WORKER = "no worker has begun: `why` shows what SLURM and the job's script printed"


def prepare_job_or_requeue(spec: JobSpec) -> bool:
    """Check code and nodes, and requeue the job where these nodes are bad; return whether workers may start.

    Code that is not what was submitted runs nothing, and files that are no part of it are removed. A node
    that failed under an earlier start of this job is remembered. A job that landed on a node that failed
    twice is sent elsewhere; without an answer of SLURM's it stays.
    """
    if not _check_code(spec):
        return False
    job = environment.current_job_id_or_empty()
    folder = Path(spec.run_folders[0])
    ledger = folder.parent / LEDGER_FILE
    try:
        for start in sorted(folder.glob(f"start-{job}-*")):
            if start != current_start_folder(spec.run_folders[0]) and not (start / CLOSED_FILE).exists():
                for node, failed_at in find_failure_time_by_node(job, start).items():
                    append_node_failure(ledger, node, job, failed_at)
                _write_end(start, "unseen")
        without_python = find_nodes_without_python(spec.node_python)
        for node in without_python:
            append_node_failure(ledger, node, job, utc_timestamp(), spec.node_python)
        unreliable = unreliable_nodes(ledger, spec.node_python)
        avoided = sorted({*commands.expand_hostlist(environment.job_hostlist())} & {*unreliable})
        requeues = POLICIES["python"].max_requeues if without_python else spec.max_requeues
        may_move = environment.job_restart_count() < requeues
        if without_python and not may_move:
            _fail_all(spec, describe_missing_python(without_python, spec.node_python), "python")
            return False
        if not avoided or not may_move:
            return True
        print(f"{', '.join(avoided)} failed before: asking for other nodes", flush=True)
        _requeue_elsewhere(job, unreliable)
    except commands.SlurmError as error:
        print(f"it is not known whether these nodes are reliable ({error})", file=sys.stderr, flush=True)
        return True
    return False


def _check_code(spec: JobSpec) -> bool:
    """Remove files that are no part of the code; where it is damaged, mark all runs as failed."""
    code = Path(spec.command.cwd)
    with contextlib.suppress(OSError):  # where it may not be removed, it is damage
        strays = code_version.remove_extra_files(code)
        if strays:
            print(f"removed from {code}, for it is no part of the code: {', '.join(strays)}", file=sys.stderr)
    damage = code_version.describe_copy_damage(code)
    if damage:
        print(damage, file=sys.stderr, flush=True)
        _fail_all(spec, damage, "code")
    return not damage


def _fail_all(spec: JobSpec, why: str, kind: str) -> None:
    for run in spec.run_folders:
        _read_attempt(run).mark_failed_unless_whole(why, kind)


def _requeue_elsewhere(job: str, nodes: Sequence[str]) -> None:
    """Requeue this job, to other nodes than these."""
    # SLURM changes the nodes of waiting jobs only, which this one is from its requeueing on. This process is
    # told to end then, and is forced to after KillWait, 30 seconds.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    commands.requeue_job(job)
    try:
        commands.add_excluded_nodes(job, nodes)
    except commands.SlurmError as error:
        print(f"it may land here again: {error}", file=sys.stderr, flush=True)


def finish_job_or_requeue(spec: JobSpec) -> bool:
    """Judge each run after the workers have ended, and requeue the job if one of them can go on.

    Returns:
        True if the job was requeued, or all its runs are done.
    """
    has_begun = any(current_start_folder(run).is_dir() for run in spec.run_folders)
    requeues = [_judge_run(run, spec.num_tasks, has_begun) for run in spec.run_folders]
    if AS_OFTEN_AS_ALLOWED in requeues:
        requeues.append(spec.max_requeues)
    if environment.job_restart_count() < max(requeues):
        try:
            commands.requeue_job(environment.current_job_id_or_empty())
            return True
        except commands.SlurmError as error:
            print(f"this job can't be requeued ({error}); submit again to go on", file=sys.stderr)
    return all(_read_attempt(run).state == "ok" for run in spec.run_folders)


def _judge_run(folder: str, size: int, has_begun: bool = True) -> int:
    """Accept the record of a run or say why not; return how often a requeue is worth it.

    Args:
        has_begun: have workers of this start of the job begun any of its runs?
    """
    attempt = _read_attempt(folder)
    start = current_start_folder(folder)
    if attempt.is_valid():
        _write_end(start, "ok")
        return 0
    if Path(folder, CANCEL_FILE).exists():
        attempt.mark_failed_unless_whole("cancelled", "cancelled")
        _write_end(start, "cancelled")
        return 0
    codes = read_exit_code_by_rank(start)
    if attempt.state == "preempted" or (len(codes) == size and {*codes.values()} == {STOPPED}):
        attempt.update_manifest(state="preempted")
        _write_end(start, "preempted")
        return AS_OFTEN_AS_ALLOWED
    if not start.is_dir() and has_begun:  # of a block: the job was told to stop before this one's turn
        return AS_OFTEN_AS_ALLOWED
    kind, why = diagnose_failed_start(start, codes, size) if start.is_dir() else ("killed", NO_WORKER)
    _write_end(start, kind)
    requeues = POLICIES[kind].max_requeues
    if kind == "held":  # its manifest is another's
        return requeues
    if requeues == AS_OFTEN_AS_ALLOWED or environment.job_restart_count() < requeues:
        attempt.update_manifest(state="submitted", why=f"{why}; it is started again")
        return requeues
    attempt.mark_failed_unless_whole(why, kind)
    return 0


def _read_attempt(folder: str) -> Attempt:
    return Attempt(Path(RunOrders.read(Path(folder, ORDERS_FILE)).attempt_folder))


def _write_end(start: Path, end: str) -> None:
    if start.is_dir():
        write_json(start / CLOSED_FILE, {"at": utc_timestamp(), "end": end})


def run_hook(hook: str, spec_file: str) -> int:
    """Carry out the hook `begin` or `end` of the job whose spec is in a file, and return its exit code."""
    try:
        spec = msgspec.json.decode(Path(spec_file).read_bytes(), type=JobSpec)
        return 0 if (prepare_job_or_requeue if hook == "begin" else finish_job_or_requeue)(spec) else 1
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise SystemExit(f"{spec_file} can't be read here: does this node see the results folder?") from error
    except (DamagedFileError, InterferenceError) as disturbance:
        raise SystemExit(str(disturbance)) from disturbance


if __name__ == "__main__":
    sys.exit(run_hook(sys.argv[1], sys.argv[2]))
