from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from analysis.records.schema import Sweep, Timestamp
from analysis.records.store import DAMAGED, Attempt
from experiments.commands._arguments import SweepsAndRuns
from experiments.commands._messages import say
from experiments.commands._named_runs import (
    find_logs,
    find_sweeps,
    label_attempts,
    listed,
    newest_attempts_in_sweeps,
    query_statuses,
    strip_variant,
)
from experiments.config.folders import ResultFolders
from experiments.launch import submission
from experiments.launch.diagnosis import POLICIES
from experiments.launch.status import RunStatus
from sparsify.ranges import quote

GROUP = "cluster"
LISTED = 30  # runs that are described one by one
ORDER = (
    "done", "diverged", "running", "suspended", "queued", "requeued", "unknown", "stopped",
    "cancelled", "failed", "damaged", "newer",
)  # fmt: skip


def status(words: SweepsAndRuns) -> int:
    """How far submitted runs are.

    Args:
        words: parts of the names of sweeps and runs; all sweeps without words.
    """
    folders = ResultFolders()
    chosen = find_sweeps(words, folders)
    if not chosen:
        if here := [run for run in folders.store.run_ids() if any(strip_variant(w) in run for w in words)]:
            raise ValueError(
                f"{listed(here)}: made on this machine, not submitted to a cluster; see `list` and `why`"
            )
        names = ", ".join(sweep.name for sweep in submission.read_sweeps(folders, lambda line: None))
        if names:
            raise ValueError(f"no sweep or run {quote(words[0])}; there are: {names}")
        say("nothing was submitted yet")
        return 0
    states = query_statuses(dict.fromkeys(newest_attempts_in_sweeps(chosen, folders)), folders)
    for sweep in chosen:
        own = {attempt: states[attempt] for attempt in newest_attempts_in_sweeps([sweep], folders)}
        print(_table(sweep, own, folders, words))
    return 0


def _table(
    sweep: Sweep, states: Mapping[Attempt, RunStatus], folders: ResultFolders, words: Sequence[str]
) -> str:
    counts = Counter(run.display_state for run in states.values())
    summary = ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word])
    spent = f"{_node_hours(sweep, states):.2f} node-hours spent"
    lines = [f"{sweep.name}: {len(states)} runs: {summary}{_time_left(states)}; {spent}"]
    shown = [
        attempt
        for attempt, run in states.items()
        if run.state != "done" or run.why or any(word in attempt.run_id for word in words)
    ]
    listed = shown[:LISTED]
    lines += [
        f"  {attempt.run_id} ({name}): {_sentence(attempt, states[attempt], folders)}"
        for attempt, name in zip(listed, label_attempts(listed), strict=True)
    ]
    if len(shown) > LISTED:
        lines.append(f"  ... and {len(shown) - LISTED} more")
    return "\n".join(lines)


def _sentence(attempt: Attempt, run: RunStatus, folders: ResultFolders) -> str:
    if run.state == "running":
        return f"{run.display_state} {run.why}, step {run.step}" + (f" of {run.steps}" if run.steps else "")
    if run.state == "unknown":
        return f"unknown: {run.why}"
    if run.state == "done":
        return "; ".join(filter(None, (run.display_state, run.why)))
    if run.state not in ("failed", "stopped"):
        return f"{run.state}" + (f" ({run.why})" if run.why else "")
    advice = POLICIES[run.kind].advice if run.kind in POLICIES else ""
    errors = [path for path in find_logs(attempt, folders) if path.suffix == ".err"]
    where = f" [{errors[0]}]" if errors and run.kind == "error" else ""
    called = run.display_state if run.display_state == run.kind else f"{run.state} ({run.kind})"
    return f"{called}: {run.why}" + (f"; {advice}" if advice else "") + where


def _time_left(states: Mapping[Attempt, RunStatus]) -> str:
    """The time left, from how long the finished ones took and how many run at a time."""
    took = [*filter(None, (_seconds(attempt) for attempt, run in states.items() if run.state == "done"))]
    left = sum(run.is_under_way for run in states.values())
    at_a_time = sum(run.state == "running" for run in states.values())
    if not took or not left or not at_a_time:
        return ""
    return f"; about {statistics.median(took) * left / at_a_time / 60:.0f} min left"


def _node_hours(sweep: Sweep, states: Mapping[Attempt, RunStatus]) -> float:
    nodes = {run: array.nodes for array in sweep.arrays for job in array.jobs for run in job.runs}
    return float(sum(nodes[attempt.run_id] * (_seconds(attempt) or 0) for attempt in states) / 3600)


def _seconds(attempt: Attempt) -> float | None:
    """Seconds from its first start to its end, by the clock of one node."""
    if attempt.state == DAMAGED:
        return None
    manifest = attempt.manifest
    if not manifest.get("started") or not manifest.get("ended"):
        return None
    started, ended = (msgspec.convert(manifest[name], Timestamp) for name in ("started", "ended"))
    return max(0.0, (ended - started).total_seconds())
