"""What a SLURM job does on its host, before and after its workers: python -m experiments.job begin|end SPEC

The batch script calls it, not a worker, so that it is done whatever became of any of them: accept whole
records, say of the others why not, and requeue the job where that helps. Needs neither torch nor submitit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from analysis.records import Attempt, now, read_json, read_lines, write_json
from experiments.diagnosis import AS_OFTEN_AS_ALLOWED, CANCEL, POLICIES, diagnose
from slurm import environment, queue

CLOSED = "closed.json"  # in a start's folder: its end was seen
FAILS = 2  # of a node, before jobs are kept away from it
TOGETHER = timedelta(minutes=1)  # jobs whose ends lie closer went down with the same failure of their node
GO_ON, LEAVE = 0, 1
STOPPED = 75  # EX_TEMPFAIL, of a worker that saved and stopped as told


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
    """After the workers have ended: judge each run, requeue the job if one of them can go on by itself."""
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
    codes = _exit_codes(start)
    if attempt.state == "preempted" or (len(codes) == size and set(codes.values()) == {STOPPED}):
        attempt.update(state="preempted")
        _note_end(start, "preempted")
        return AS_OFTEN_AS_ALLOWED
    if not start.is_dir():  # of a block: the job was told to stop before this one's turn
        return AS_OFTEN_AS_ALLOWED
    kind, why = diagnose(start, codes, size)
    _note_end(start, kind)
    times = POLICIES[kind].requeue
    if times and environment.restarts() < (times if times > 0 else sys.maxsize):
        attempt.update(state="submitted", why=f"{why}; it is started again")
        return times
    attempt.fail(why, kind)
    return None


def failed_nodes(job: str, start: Path) -> dict[str, str]:
    """Which nodes SLURM holds responsible for an end that nobody saw, and when they failed as far as is
    known: a preemption without a warning ends the same way, and is no node's fault."""
    notes = [note for path in start.glob("worker*.json") if (note := read_json(path))]
    nodes = sorted({note["node"] for note in notes})
    ends = queue.past_ends(job)
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
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def unreliable(ledger: Path) -> list[str]:
    """Nodes that failed under our jobs as often as we bear; jobs that went down together count once."""
    if not ledger.exists():
        return []
    told, _ = read_lines(ledger)
    counts, last = Counter[str](), dict[str, datetime]()
    for at, node in sorted((datetime.fromisoformat(one["at"].rstrip("Z")), one["node"]) for one in told):
        if node not in last or at - last[node] > TOGETHER:
            counts[node] += 1
        last[node] = at
    return sorted(node for node, times in counts.items() if times >= FAILS)


def read_orders(run: dict[str, str]) -> dict[str, Any]:
    orders = read_json(Path(run["orders"]))
    assert orders is not None, run["orders"]
    return orders


def _earlier_starts(folder: Path) -> list[Path]:
    this = f"start-{environment.start_name()}"
    mine = f"start-{environment.job_id()}-"
    return [path for path in sorted(folder.glob(f"{mine}*")) if path.name != this]


def _exit_codes(start: Path) -> dict[int, int]:
    notes = [note for path in start.glob("exit*.json") if (note := read_json(path))]
    return {note["rank"]: note["code"] for note in notes}


def _note_end(start: Path, end: str) -> None:
    if start.is_dir():
        write_json(start / CLOSED, {"at": now(), "end": end})


def main(what: str, path: str) -> int:
    spec = read_json(Path(path))
    if spec is None:
        raise SystemExit(f"{path} can't be read here: does this node see the results folder?")
    return begin(spec) if what == "begin" else end(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
