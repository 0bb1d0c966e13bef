"""Nodes that failed under our jobs: remembered in one file, so that later jobs can avoid them."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

from analysis import schemas
from analysis.files import Damaged, read_lines_as, read_note
from analysis.records import now
from slurm import environment, queue

FAILS = 2  # of a node, before jobs are kept away from it
TOGETHER = timedelta(minutes=1)  # jobs whose ends lie closer went down with the same failure of their node


def failed_nodes(job: str, start: Path) -> dict[str, str]:
    """Nodes that, by SLURM, caused the end of a start that left no note, and when they failed, as far as is
    known. A preemption without a warning ends the same way, and is no node's fault.
    """
    notes = [note for path in start.glob("worker*.json") if (note := read_note(path, schemas.WorkerNote))]
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
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def unreliable(ledger: Path) -> list[str]:
    """Nodes that failed under our jobs FAILS times or more; jobs that failed together count once. A ledger
    that can't be read tells of none."""
    failures: list[schemas.NodeFailure]
    try:
        failures, _ = read_lines_as(ledger, schemas.NodeFailure)
    except (FileNotFoundError, Damaged):
        return []
    times = [(found.at.replace(tzinfo=None), found.node) for found in failures]
    counts, last = Counter[str](), dict[str, datetime]()
    for at, node in sorted(times):
        if node not in last or at - last[node] > TOGETHER:
            counts[node] += 1
        last[node] = at
    return sorted(node for node, times in counts.items() if times >= FAILS)
