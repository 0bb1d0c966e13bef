"""Nodes that failed under our jobs, noted in one file, so that later jobs can avoid them.

The file, node-failures.jsonl, has a line for each failure. It lies beside the launch folders of all runs.
begin.sh writes the lines of nodes that could not start Python.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from analysis.records.files import DamagedFileError, open_for_append, try_read_struct
from analysis.records.log import read_json_lines
from analysis.records.store import utc_timestamp
from slurm import commands, environment
from slurm.commands import AccountingEntry

LEDGER_FILE = "node-failures.jsonl"
MOST_FAILURES = 2  # of a node, from which on jobs are kept away from it
SAME_FAILURE = timedelta(minutes=1)  # jobs whose ends lie closer went down with one failure of their node
# Results may come from anybody, and these names become words of SLURM's programs and lines of jobs' scripts.
NodeName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][\w.-]{0,252}\Z")]
BEGIN_SCRIPT = Path(__file__).with_name("begin.sh")


class WorkerNote(Struct, frozen=True):
    """The note worker<rank>.json on where a worker was started."""

    node: NodeName


class NodeFailure(Struct, frozen=True):
    """A failure of a node, which is a line of the ledger."""

    node: NodeName
    at: datetime  # by the clock of SLURM's accounting, or of this code, which says so by a Z
    job: str = ""
    python: str | None = None  # that could not be started there


def find_failure_time_by_node(job_id: str, start_folder: Path) -> dict[str, str]:
    """Return the times at which nodes failed that caused the end of a start without a note, by node.

    A preemption without a warning ends the same way, and is no node's fault.
    """
    paths = [*start_folder.glob("worker*.json")]
    notes = filter(None, (try_read_struct(path, WorkerNote) for path in paths))
    nodes = sorted({note.node for note in notes})
    if not nodes:
        return {}
    ends = commands.poll_accounting_for_ends(job_id, environment.job_restart_count())
    if ends is None:
        return dict.fromkeys(sorted(commands.find_down_nodes(nodes)), utc_timestamp())
    end_by_failed_node = _end_by_node(ends, "NODE_FAIL")
    # SLURM 26.05 says REQUEUED of what a node took along as of what a person requeued.
    end_by_suspect = {
        node: end
        for node, end in _end_by_node(ends, "REQUEUED").items()
        if node in nodes and node not in end_by_failed_node
    }
    if end_by_suspect:
        started_epoch_s = min(path.stat().st_mtime for path in paths)
        failed = commands.find_down_nodes(end_by_suspect)
        failed |= commands.find_nodes_with_slurmd_restarted_since(end_by_suspect, started_epoch_s)
        end_by_failed_node |= {node: end for node, end in end_by_suspect.items() if node in failed}
    return {node: end_by_failed_node[node] for node in nodes if node in end_by_failed_node}


def _end_by_node(ends: Iterable[AccountingEntry], state: str) -> dict[str, str]:
    """Return the end of each node's start that ended in a state."""
    return {
        node: end.ended_at if end.ended_at[:1].isdigit() else utc_timestamp()  # or it says Unknown
        for end in ends
        if end.state == state
        for node in commands.expand_hostlist(end.nodes)
    }


def find_nodes_without_python(python: str) -> list[str]:
    """Return the nodes of this job that can't start this Python.

    On a job's first node its script has started it already.

    Raises:
        SlurmError: the nodes can't be asked.
    """
    allocation = environment.current_allocation()
    if allocation is None or allocation.nodes == 1:
        return []
    nodes = allocation.nodes
    srun = ("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1")
    return sorted(commands.run_command(*srun, "sh", str(BEGIN_SCRIPT), python).split())


def append_node_failure(ledger: Path, node: str, job: str, at: str, python: str | None = None) -> None:
    """Append a failure to the ledger, in one write: jobs on other nodes may be writing theirs.

    Where the ledger is a link or no file, the failure is printed, and not noted.

    Args:
        python: Python that could not be started there; None: the node failed in another way.
    """
    line = json.dumps({"node": node, "job": job, "at": at, "python": python}) + "\n"
    try:
        with open_for_append(ledger) as file:
            file.write(line.encode())
    except DamagedFileError as damage:
        print(f"the failure of {node} is not noted: {damage}", file=sys.stderr)


def read_node_failures(ledger: Path) -> list[NodeFailure]:
    """Return all failures that were noted; none where the ledger can't be read."""
    try:
        failures: list[NodeFailure] = read_json_lines(ledger, NodeFailure)[0]
    except (FileNotFoundError, DamagedFileError):
        return []
    return failures


def unreliable_nodes(ledger: Path, python: str) -> list[str]:
    """Return the nodes that failed MOST_FAILURES times, and those that can't start this Python.

    Jobs that failed together count once.
    """
    failures = read_node_failures(ledger)
    times_by_node = defaultdict[str, list[datetime]](list)
    for failure in failures:
        if failure.python is None:
            times_by_node[failure.node].append(failure.at.replace(tzinfo=None))
    unreliable = {failure.node for failure in failures if failure.python == python}
    for node, times in times_by_node.items():
        times.sort()
        num_failures = 1 + sum(later - earlier > SAME_FAILURE for earlier, later in pairwise(times))
        if num_failures >= MOST_FAILURES:
            unreliable.add(node)
    return sorted(unreliable)


def describe_missing_python(nodes: Iterable[str], python: str) -> str:
    """Return a sentence on nodes that can't start a Python."""
    return f"{python} can't be started on {', '.join(nodes)}, or lacks packages there"


def explain_missing_python(ledger: Path, job: str) -> str | None:
    """Return a sentence on the nodes where a job found no Python; None where it found one everywhere."""
    failures = [failure for failure in read_node_failures(ledger) if failure.job == job and failure.python]
    if not failures:
        return None
    return describe_missing_python(
        dict.fromkeys(failure.node for failure in failures), str(failures[-1].python)
    )
