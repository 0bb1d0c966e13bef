"""The runs of the report: those of this machine, whole, failed or damaged, and those that are shipped."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from analysis.attempts import from_attempts
from analysis.files import Damaged
from analysis.frames import Frames
from analysis.records import DAMAGED, Attempt
from analysis.report.runs import HERE, SHIPPED, Run, of_frames, page_id
from experiments.commands._find import last_lines, log_files
from experiments.commands._make import say
from experiments.config.folders import Folders

BATCH = 250  # runs whose steps are in memory at a time
Items = Mapping[str, tuple[str, ...]]  # by the key of a run, the figures that are drawn from it


def every_run(folders: Folders, shipped: Frames, items: Items) -> Iterator[Run]:
    """Every run once: where this machine has its record, that one."""
    seen = set[str]()
    for run in (*_own(folders), *of_frames(shipped, SHIPPED)):
        if run.id not in seen:
            seen.add(run.id)
            yield replace(run, items=items.get(run.key, ()), commands=_commands(run))


def _own(folders: Folders) -> Iterator[Run]:
    names = folders.store.runs()
    for first in range(0, len(names), BATCH):
        yield from _batch(names[first : first + BATCH], folders)


def _batch(names: Sequence[str], folders: Folders) -> Iterator[Run]:
    """So many runs read together, which takes a fifth of the time of one by one."""
    valid = {name: attempt for name in names if (attempt := folders.store.newest_valid(name))}
    frames, notes = from_attempts(valid.values())
    found = defaultdict[str, list[Run]](list)
    for run in of_frames(frames, HERE):
        found[run.run].append(run)
    for name in names:
        attempts = folders.store.attempts(name)
        if name in found:
            told = [note for note in notes if valid[name].name in note]
            newer = [f"a newer attempt is {attempts[-1].state}"] * (attempts[-1] != valid[name])
            why = "; ".join([*told, *folders.store.faults(name), *newer])
            yield from (replace(run, why=why) for run in found[name])
        elif attempts:
            shown = valid.get(name, attempts[-1])
            yield _unfinished(shown, folders, shown.fault(verify=True) or "")


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
