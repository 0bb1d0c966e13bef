"""The runs of the report: those of this machine, whole, failed or damaged, and those that are shipped."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from analysis import parquet
from analysis.files import Damaged
from analysis.frames import Frames
from analysis.records import DAMAGED, Attempt
from analysis.report.runs import HERE, SHIPPED, Run, of_frames, page_id
from experiments.commands._find import last_lines, log_files
from experiments.commands._make import say
from experiments.config.folders import Folders

Items = Mapping[str, tuple[str, ...]]  # by the key of a run, the figures that are drawn from it


def every_run(folders: Folders, shipped: Frames, items: Items) -> Iterator[Run]:
    """Every run once: where this machine has its record, that one."""
    seen = set[str]()
    for run in (*_own(folders), *of_frames(shipped, SHIPPED)):
        if run.id not in seen:
            seen.add(run.id)
            yield replace(run, items=items.get(run.key, ()), commands=_commands(run))


def _own(folders: Folders) -> Iterator[Run]:
    for name in folders.store.runs():
        attempts = folders.store.attempts(name)
        valid = folders.store.newest_valid(name)
        if valid is not None:
            try:
                frames, notes = parquet.cached(valid, folders.records)
            except Damaged as damage:
                yield _unfinished(valid, folders, damage.brief)
                continue
            newer = f"A newer attempt is {attempts[-1].state}" if attempts[-1] != valid else ""
            why = "; ".join(filter(None, [*notes, *folders.store.faults(name), newer]))
            yield from (replace(run, why=why) for run in of_frames(frames, HERE))
        elif attempts:
            yield _unfinished(attempts[-1], folders, attempts[-1].fault() or "")


def _unfinished(attempt: Attempt, folders: Folders, fault: str) -> Run:
    """One that does not count, or not yet: why, and the end of its logs."""
    state = DAMAGED if fault else attempt.state
    manifest = {} if attempt.state == DAMAGED else attempt.manifest
    try:
        config, key = attempt.config, attempt.key
    except Damaged as damage:
        state, fault, config, key = DAMAGED, fault or damage.brief, {}, ""
        say(f"{attempt.name} is shown as damaged: {damage.brief}")
    logs = tuple({"name": log.name, "lines": last_lines(log)} for log in log_files(attempt, folders))
    return Run(
        id=page_id(attempt.run_id, key),
        run=attempt.run_id,
        origin=HERE,
        state=state,
        config=config,
        key=key,
        why=fault or str(manifest.get("why") or ""),
        started=str(manifest.get("started") or ""),
        simulated=bool(manifest.get("simulated")),
        logs=logs,
    )


def _commands(run: Run) -> tuple[str, ...]:
    words = ["why"] * (run.origin == HERE) + ["trace"] * bool(run.parts.get("timeline"))
    return tuple(f"python -m experiments {word} {shlex.quote(run.run)}" for word in words)
