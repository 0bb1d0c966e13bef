"""What a SLURM job does on its host, before and after its workers:

    python -m experiments.launch.job_hooks begin|end SPEC

The batch script calls it, not a worker, so that it is done whatever became of any of them: accept whole
records, say of the others why not, and requeue the job where that helps. Needs neither torch nor submitit.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from analysis.files import Damaged, Disturbed, read_json, write_json
from analysis.records import Attempt, now
from experiments.launch.bad_nodes import FAILS, failed_nodes, note_failure, unreliable
from experiments.launch.diagnosis import AS_OFTEN_AS_ALLOWED, CANCEL, POLICIES, diagnose
from slurm import environment, queue
from slurm.worker_process import STOPPED, exit_codes

CLOSED = "closed.json"  # in a start's folder: its end was seen
GO_ON, LEAVE = 0, 1


def begin(spec: dict[str, Any]) -> int:
    """Before the workers start: a node that failed under an earlier start of this job is remembered, and a
    job that landed on one that failed twice is sent elsewhere; without an answer of SLURM's it stays.
    """
    folder = Path(spec["runs"][0]["folder"])
    ledger = folder.parent / "node-failures.jsonl"
    job = environment.job_id()
    try:
        for start in _earlier_starts(folder):
            if not (start / CLOSED).exists():
                for node, at in failed_nodes(job, start).items():
                    note_failure(ledger, node, job, at)
                write_json(start / CLOSED, {"at": now(), "end": "unseen"})
        bad = unreliable(ledger)
        avoided = set(queue.expand(environment.node_list())) & set(bad)
        if not avoided or environment.restarts() >= spec["requeues"]:
            return GO_ON
        # SLURM changes the nodes of waiting jobs only, which this one is from its requeueing on. This process
        # is told to end then, and is forced to after KillWait, 30 seconds.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        queue.requeue(job)
    except queue.SlurmError as error:
        print(f"it is not known whether these nodes are reliable ({error})", file=sys.stderr, flush=True)
        return GO_ON
    print(f"{', '.join(sorted(avoided))} failed {FAILS} times or more: asking for other nodes", flush=True)
    try:
        queue.keep_away(job, bad)
    except queue.SlurmError as error:
        print(f"it may land here again: {error}", file=sys.stderr, flush=True)
    return LEAVE


def end(spec: dict[str, Any]) -> int:
    """After the workers have ended: judge each run, requeue the job if one of them can go on."""
    wants = [_close(run, int(spec["tasks"])) for run in spec["runs"]]
    limits = [spec["requeues"] if want == AS_OFTEN_AS_ALLOWED else want for want in wants if want is not None]
    restarts, job = environment.restarts(), environment.job_id()
    if any(restarts < limit for limit in limits):
        try:
            queue.requeue(job)
            return GO_ON
        except queue.SlurmError as error:
            print(f"this job can't be requeued ({error}); submit again to go on", file=sys.stderr)
    states = [Attempt(Path(read_orders(run)["attempt"])).state for run in spec["runs"]]
    return GO_ON if all(state == "ok" for state in states) else LEAVE


def _close(run: dict[str, str], size: int) -> int | None:
    """Accept the record or say why not; how often a requeue is worth it, None where there is no need."""
    attempt = Attempt(Path(read_orders(run)["attempt"]))
    start = Path(run["folder"]) / f"start-{environment.start_name()}"
    if attempt.is_valid():
        _note_end(start, "ok")
        return None
    if (Path(run["folder"]) / CANCEL).exists():
        attempt.fail("cancelled", "cancelled")
        _note_end(start, "cancelled")
        return None
    codes = exit_codes(start)
    if attempt.state == "preempted" or (len(codes) == size and set(codes.values()) == {STOPPED}):
        attempt.update(state="preempted")
        _note_end(start, "preempted")
        return AS_OFTEN_AS_ALLOWED
    if not start.is_dir():  # of a block: the job was told to stop before this one's turn
        return AS_OFTEN_AS_ALLOWED
    kind, why = diagnose(start, codes, size)
    _note_end(start, kind)
    times = POLICIES[kind].requeue
    if kind == "held":  # its manifest is another's
        return times
    if times and environment.restarts() < (times if times > 0 else sys.maxsize):
        attempt.update(state="submitted", why=f"{why}; it is started again")
        return times
    attempt.fail(why, kind)
    return None


def read_orders(run: dict[str, str]) -> dict[str, Any]:
    if (orders := read_json(Path(run["orders"]))) is None:
        raise Disturbed(f"{run['orders']} was removed or damaged while its job was under way")
    return orders


def _earlier_starts(folder: Path) -> list[Path]:
    this = f"start-{environment.start_name()}"
    mine = f"start-{environment.job_id()}-"
    return [path for path in sorted(folder.glob(f"{mine}*")) if path.name != this]


def _note_end(start: Path, end: str) -> None:
    if start.is_dir():
        write_json(start / CLOSED, {"at": now(), "end": end})


def main(what: str, path: str) -> int:
    spec = read_json(Path(path))
    if spec is None:
        raise SystemExit(f"{path} can't be read here: does this node see the results folder?")
    try:
        return begin(spec) if what == "begin" else end(spec)
    except (Damaged, Disturbed) as disturbance:
        raise SystemExit(str(disturbance)) from disturbance


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
