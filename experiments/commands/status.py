from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from analysis.pictures.numbers import format_number
from analysis.records.schema import Sweep, Timestamp
from analysis.records.store import DAMAGED, Attempt
from experiments.commands._arguments import SweepsAndRuns
from experiments.commands._messages import say
from experiments.commands._named_runs import (
    find_log_files,
    find_named_sweeps,
    join_first_names,
    label_attempts,
    newest_attempts_in_sweeps,
    query_status_by_attempt,
    strip_variant,
)
from experiments.config.folders import ResultFolders
from experiments.launch import submission
from experiments.launch.diagnosis import POLICIES
from experiments.launch.status import RunStatus
from sparsify.ranges import quote

GROUP = "cluster"
MAX_LISTED = 30  # runs that are described one by one
STATES_IN_ORDER = (
    "done", "diverged", "running", "suspended", "queued", "requeued", "unknown", "stopped",
    "cancelled", "failed", "damaged", "newer",
)  # fmt: skip


def status(words: SweepsAndRuns) -> int:
    """Show the progress of submitted runs.

    Args:
        words: parts of the names of sweeps and runs; all sweeps without words.
    """
    folders = ResultFolders()
    sweeps = find_named_sweeps(words, folders)
    if not sweeps:
        parts = [strip_variant(word) for word in words]
        own_runs = [run for run in folders.store.list_run_ids() if any(part in run for part in parts)]
        if own_runs:
            raise ValueError(
                f"{join_first_names(own_runs)}: made on this machine, not submitted to a cluster; see "
                "`list` and `why`"
            )
        names = ", ".join(sweep.name for sweep in submission.read_sweeps(folders, lambda line: None))
        if names:
            raise ValueError(f"no sweep or run {quote(words[0])}; there are: {names}")
        say("nothing was submitted yet")
        return 0
    statuses = query_status_by_attempt(newest_attempts_in_sweeps(sweeps, folders), folders)
    for sweep in sweeps:
        attempts = newest_attempts_in_sweeps([sweep], folders)
        print(describe_sweep(sweep, {attempt: statuses[attempt] for attempt in attempts}, folders, words))
    return 0


def describe_sweep(
    sweep: Sweep, statuses: Mapping[Attempt, RunStatus], folders: ResultFolders, words: Sequence[str]
) -> str:
    """Return a summary of a sweep, and a line for each run that is not done or that a word names."""
    counts = Counter(run.display_state for run in statuses.values())
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES_IN_ORDER if counts[state])
    nodes_by_run = {run: array.nodes for array in sweep.arrays for job in array.jobs for run in job.runs}
    node_s = sum(nodes_by_run[attempt.run_id] * (_duration_s(attempt) or 0) for attempt in statuses)
    spent = f"{format_number(node_s / 3600)} node-hours spent"
    lines = [f"{sweep.name}: {len(statuses)} runs: {summary}{_describe_time_left(statuses)}; {spent}"]
    shown = [
        attempt
        for attempt, run in statuses.items()
        if run.state != "done" or run.why or any(word in attempt.run_id for word in words)
    ]
    listed_attempts = shown[:MAX_LISTED]
    for attempt, label in zip(listed_attempts, label_attempts(listed_attempts), strict=True):
        lines.append(f"  {attempt.run_id} ({label}): {_describe_run(attempt, statuses[attempt], folders)}")
    if len(shown) > MAX_LISTED:
        lines.append(f"  ... and {len(shown) - MAX_LISTED} more")
    return "\n".join(lines)


def _describe_run(attempt: Attempt, run: RunStatus, folders: ResultFolders) -> str:
    if run.state == "running":
        return f"{run.display_state} {run.why}, step {run.step}" + (f" of {run.steps}" if run.steps else "")
    if run.state == "unknown":
        return f"unknown: {run.why}"
    if run.state == "done":
        return "; ".join(filter(None, (run.display_state, run.why)))
    if run.state not in ("failed", "stopped"):
        return run.state + (f" ({run.why})" if run.why else "")
    advice = f"; {POLICIES[run.kind].advice}" if run.kind in POLICIES and POLICIES[run.kind].advice else ""
    error_logs = [path for path in find_log_files(attempt, folders) if path.suffix == ".err"]
    log_hint = f" [{error_logs[0]}]" if error_logs and run.kind == "error" else ""
    state = run.display_state if run.display_state == run.kind else f"{run.state} ({run.kind})"
    return f"{state}: {run.why}{advice}{log_hint}"


def _describe_time_left(statuses: Mapping[Attempt, RunStatus]) -> str:
    """Return the time left, from the durations of finished runs and the number of runs at a time."""
    done_attempts = [attempt for attempt, run in statuses.items() if run.state == "done"]
    durations_s = [*filter(None, map(_duration_s, done_attempts))]
    num_left = sum(run.is_under_way for run in statuses.values())
    num_running = sum(run.state == "running" for run in statuses.values())
    if not durations_s or not num_left or not num_running:
        return ""
    return f"; about {statistics.median(durations_s) * num_left / num_running / 60:.0f} min left"


def _duration_s(attempt: Attempt) -> float | None:
    """Return the seconds from an attempt's first start to its end, by the clock of one node."""
    if attempt.state == DAMAGED:
        return None
    times = [attempt.manifest.get(name) for name in ("started", "ended")]
    if not all(times):
        return None
    started, ended = msgspec.convert(times, list[Timestamp])
    return max(0.0, (ended - started).total_seconds())
