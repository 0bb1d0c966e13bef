"""Nodes that failed under our jobs, remembered in one file, so that later jobs can avoid them.

A line each: node-failures.jsonl, of all runs, beside their folders. Those of nodes that could not even start
Python are written by begin.sh.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from analysis.records.files import Damaged, open_for_append, read_note
from analysis.records.log import read_lines_as
from analysis.records.store import now
from slurm import commands, environment
from slurm.commands import EndedJob

LEDGER_FILE = "node-failures.jsonl"
MOST_FAILURES = 2  # of a node, before jobs are kept away from it
SAME_FAILURE = timedelta(
    minutes=1
)  # jobs whose ends lie closer went down with the same failure of their node
# Results may come from anybody, and these names become words of SLURM's programs and lines of jobs' scripts.
NodeName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][\w.-]{0,252}\Z")]
BEGIN_SCRIPT = Path(__file__).with_name("begin.sh")


class WorkerNote(Struct, frozen=True):
    """worker<rank>.json: where a worker was started."""

    node: NodeName


class NodeFailure(Struct, frozen=True):
    """A line of the ledger."""

    node: NodeName
    at: datetime  # by the clock of SLURM's accounting, or of this code, which says so by a Z
    job: str = ""
    python: str | None = None  # that could not be started there


def find_failed_nodes(job: str, start: Path) -> dict[str, str]:
    """Nodes that, by SLURM, caused the end of a start that left no note, and when they failed, as far as is
    known. A preemption without a warning ends the same way, and is no node's fault.
    """
    paths = [*start.glob("worker*.json")]
    nodes = sorted({note.node for path in paths if (note := read_note(path, WorkerNote))})
    if not nodes:
        return {}
    ends = commands.await_job_ends(job, environment.restart_count())
    if ends is None:
        return dict.fromkeys(sorted(commands.find_down_nodes(nodes)), now())
    blamed = _end_by_node(ends, "NODE_FAIL")
    # SLURM 26.05 says REQUEUED of what a node took along as of what a person requeued.
    if suspected := {
        node: at for node, at in _end_by_node(ends, "REQUEUED").items() if node in {*nodes} - {*blamed}
    }:
        begun = min(os.path.getmtime(path) for path in paths)
        gone = commands.find_down_nodes(suspected) | commands.find_nodes_restarted_since(suspected, begun)
        blamed |= {node: at for node, at in suspected.items() if node in gone}
    return {node: blamed[node] for node in nodes if node in blamed}


def _end_by_node(ends: Iterable[EndedJob], state: str) -> dict[str, str]:
    """Nodes of starts that ended so, and when."""
    return {
        node: end.at if end.at[:1].isdigit() else now()  # or it says Unknown
        for end in ends
        if end.state == state
        for node in commands.expand_nodes(end.nodes)
    }


def find_nodes_without_python(python: str) -> list[str]:
    """Nodes of this job that can't start this Python. The script that asks has done so on its own.

    Raises:
        SlurmError: they can't be asked.
    """
    here = environment.current_allocation()
    if here is None or here.nodes == 1:
        return []
    asked = ("srun", f"--nodes={here.nodes}", f"--ntasks={here.nodes}", "--ntasks-per-node=1")
    return sorted(commands.run_command(*asked, "sh", str(BEGIN_SCRIPT), python).split())


def append_failure(ledger: Path, node: str, job: str, at: str, python: str | None = None) -> None:
    """Append one line, in one write: jobs on other nodes may be writing theirs. Where the ledger is a link or
    no file, nothing is noted, which is said.

    Args:
        python: that could not be started there; None: it failed in another way.
    """
    line = json.dumps({"node": node, "job": job, "at": at, "python": python}) + "\n"
    try:
        with open_for_append(ledger) as file:
            file.write(line.encode())
    except Damaged as damage:
        print(f"the failure of {node} is not noted: {damage}", file=sys.stderr)


def read_failures(ledger: Path) -> list[NodeFailure]:
    """All that were noted. A ledger that can't be read tells of none."""
    try:
        found: list[NodeFailure] = read_lines_as(ledger, NodeFailure)[0]
    except (FileNotFoundError, Damaged):
        return []
    return found


def unreliable_nodes(ledger: Path, python: str) -> list[str]:
    """Nodes that failed under our jobs FAILS times or more, and those that can't start this Python; jobs that
    failed together count once.
    """
    found = read_failures(ledger)
    times = [(each.at.replace(tzinfo=None), each.node) for each in found if each.python is None]
    counts, last = Counter[str](), dict[str, datetime]()
    for at, node in sorted(times):
        if node not in last or at - last[node] > SAME_FAILURE:
            counts[node] += 1
        last[node] = at
    lacking = {each.node for each in found if each.python == python}
    return sorted({node for node, times in counts.items() if times >= MOST_FAILURES} | lacking)


def describe_missing_python(nodes: Iterable[str], python: str) -> str:
    """A sentence on nodes that lack it."""
    return f"{python} can't be started on {', '.join(nodes)}, or lacks packages there"


def explain_missing_python(ledger: Path, job: str) -> str | None:
    """The same of the nodes where this job found no Python; None where it found one everywhere."""
    found = [each for each in read_failures(ledger) if each.job == job and each.python]
    return (
        describe_missing_python(dict.fromkeys(each.node for each in found), str(found[-1].python))
        if found
        else None
    )
