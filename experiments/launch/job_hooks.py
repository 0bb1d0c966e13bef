"""What a SLURM job does on its host, before and after its workers:

    python -m experiments.launch.job_hooks begin|end SPEC

The batch script calls it, not a worker, so that it is done whatever became of any of them: accept whole
records, say of the others why not, and requeue the job where that helps. Needs neither torch nor submitit.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from analysis.records import schema
from analysis.records.files import Damaged, read_note, write_json
from analysis.records.log import Disturbed, read_lines_as
from analysis.records.store import Attempt, now
from experiments.config import code_version
from experiments.launch.diagnosis import AS_OFTEN_AS_ALLOWED, CANCEL, POLICIES, diagnose
from experiments.worker.orders import Orders
from slurm import environment, queue
from slurm.worker_process import ORDERS, STOPPED, JobSpec, exit_codes, start_folder

LEDGER = "node-failures.jsonl"  # of all runs, beside their folders
CLOSED = "closed.json"  # in a start's folder: its end was seen
GO_ON, LEAVE = 0, 1
FAILS = 2  # of a node, before jobs are kept away from it
TOGETHER = timedelta(minutes=1)  # jobs whose ends lie closer went down with the same failure of their node


def begin(spec: JobSpec) -> int:
    """Prepare for the workers: code that is not what was submitted runs nothing; a node that failed under an
    earlier start of this job is remembered, and a job that landed on one that failed twice is sent elsewhere;
    without an answer of SLURM's it stays.
    """
    if why := code_version.damage(Path(spec.command.cwd)):
        print(why, file=sys.stderr, flush=True)
        for run in spec.runs:
            _attempt_of(run).fail(why, "code")
        return LEAVE
    folder, job = Path(spec.runs[0]), environment.job_id()
    ledger = folder.parent / LEDGER
    try:
        for start in sorted(folder.glob(f"start-{job}-*")):
            if start != start_folder(spec.runs[0]) and not (start / CLOSED).exists():
                for node, at in failed_nodes(job, start).items():
                    note_failure(ledger, node, job, at)
                _note_end(start, "unseen")
        bad = unreliable(ledger)
        avoided = set(queue.expand(environment.node_list())) & set(bad)
        if not avoided or environment.restarts() >= spec.requeues:
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


def end(spec: JobSpec) -> int:
    """Judge each run after the workers have ended, and requeue the job if one of them can go on."""
    wants = [_close(run, spec.tasks) for run in spec.runs]
    limits = [spec.requeues if want == AS_OFTEN_AS_ALLOWED else want for want in wants]
    if any(environment.restarts() < limit for limit in limits):
        try:
            queue.requeue(environment.job_id())
            return GO_ON
        except queue.SlurmError as error:
            print(f"this job can't be requeued ({error}); submit again to go on", file=sys.stderr)
    return GO_ON if all(_attempt_of(run).state == "ok" for run in spec.runs) else LEAVE


def _close(folder: str, size: int) -> int:
    """Accept the record of a run or say why not; how often a requeue is worth it."""
    attempt, start = _attempt_of(folder), start_folder(folder)
    if attempt.is_valid():
        _note_end(start, "ok")
        return 0
    if Path(folder, CANCEL).exists():
        attempt.fail("cancelled", "cancelled")
        _note_end(start, "cancelled")
        return 0
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
    if times == AS_OFTEN_AS_ALLOWED or environment.restarts() < times:
        attempt.update(state="submitted", why=f"{why}; it is started again")
        return times
    attempt.fail(why, kind)
    return 0


def _attempt_of(folder: str) -> Attempt:
    return Attempt(Path(Orders.read(Path(folder, ORDERS)).attempt))


def _note_end(start: Path, end: str) -> None:
    if start.is_dir():
        write_json(start / CLOSED, {"at": now(), "end": end})


# Nodes that failed under our jobs: remembered in one file, so that later jobs can avoid them.


def failed_nodes(job: str, start: Path) -> dict[str, str]:
    """Nodes that, by SLURM, caused the end of a start that left no note, and when they failed, as far as is
    known. A preemption without a warning ends the same way, and is no node's fault.
    """
    notes = [note for path in start.glob("worker*.json") if (note := read_note(path, schema.WorkerNote))]
    nodes = sorted({note.node for note in notes})
    ends = queue.past_ends(job, environment.restarts())
    if ends is not None:
        blamed = {
            node: end.at if end.at[:1].isdigit() else now()  # or it says Unknown
            for end in ends
            if end.state == "NODE_FAIL"
            for node in queue.expand(end.nodes)
        }
        return {node: blamed[node] for node in nodes if node in blamed}
    return dict.fromkeys(sorted(queue.down(nodes)), now()) if nodes else {}


def note_failure(ledger: Path, node: str, job: str, at: str) -> None:
    """One line, in one write: jobs on other nodes may be writing theirs."""
    line = json.dumps({"node": node, "job": job, "at": at}) + "\n"
    with ledger.open("ab", buffering=0) as file:
        file.write(line.encode())


def unreliable(ledger: Path) -> list[str]:
    """Nodes that failed under our jobs FAILS times or more; jobs that failed together count once. A ledger
    that can't be read tells of none."""
    failures: list[schema.NodeFailure]
    try:
        failures, _ = read_lines_as(ledger, schema.NodeFailure)
    except (FileNotFoundError, Damaged):
        return []
    times = [(found.at.replace(tzinfo=None), found.node) for found in failures]
    counts, last = Counter[str](), dict[str, datetime]()
    for at, node in sorted(times):
        if node not in last or at - last[node] > TOGETHER:
            counts[node] += 1
        last[node] = at
    return sorted(node for node, times in counts.items() if times >= FAILS)


def main(what: str, path: str) -> int:
    """Carry out one of the two hooks."""
    try:
        spec = msgspec.json.decode(Path(path).read_bytes(), type=JobSpec)
        return begin(spec) if what == "begin" else end(spec)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise SystemExit(f"{path} can't be read here: does this node see the results folder?") from error
    except (Damaged, Disturbed) as disturbance:
        raise SystemExit(str(disturbance)) from disturbance


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
