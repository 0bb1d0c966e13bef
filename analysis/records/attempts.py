"""Attempts as frames: the rows of their runs, and the lines of their logs as columns."""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records.columns import COLUMNS, REQUIRED_COLUMNS
from analysis.records.configs import configs_by_variant, flatten
from analysis.records.files import DamagedFileError, read_verified
from analysis.records.frames import Frames, build_runs_table, empty_table, order_and_type_columns
from analysis.records.log import decode_finished_log
from analysis.records.schema import INTEGER, EpochLine, LogLine, LookLine, StepLine, fields_by_name
from analysis.records.steps import add_outcomes
from analysis.records.store import Attempt, Store, count_logged_steps, describe_left_out

Columns = dict[str, np.ndarray]  # of a table's rows, by name
FIELDS = {line: fields_by_name(line) for line in (StepLine, EpochLine)}
MEASURED = Frames._fields[1:]  # all tables but that of the runs
PHASE = re.compile(r"[a-z_]{1,40}")
UNNAMED = re.compile(r"[A-Za-z_][\w.-]{0,80}")  # what no field is for, where it can name a column
MOST_UNNAMED = 200  # columns of a log
# Of a manifest: facts that are columns, and groups of facts, each of which is a column.
COPIED_FACTS = ("parameters", "tensors", "steps_per_epoch", "simulated", "started", "ended")
FLATTENED_FACTS = ("searching", "memory", "relay", "interface", "provenance")
# At most so many runs, with so many bytes of logs, are read together: as tables they take many times as much.
BATCH_RUNS = 250
BATCH_BYTES = 32 * 2**20


class AttemptData(NamedTuple):
    """What the logs of an attempt hold."""

    attempt: Attempt
    rows: list[dict[str, Any]]  # of `runs`, one for each variant
    tables: dict[str, list[Columns]]  # parts of the others
    notes: list[str]  # a line on each line that a killed writer left half


class LoadedFrames(NamedTuple):
    """Frames of attempts, and a line on everything that had to be left out."""

    frames: Frames
    notes: list[str]


def load_attempt(attempt: Attempt) -> LoadedFrames:
    """Read the frames of one valid attempt from its logs.

    Raises:
        DamagedFileError: a file is not as it was recorded.
    """
    data = read_attempt(attempt, attempt.read_checked_manifest())
    return LoadedFrames(build_frames([data]), data.notes)


def load_attempts(attempts: Iterable[Attempt]) -> LoadedFrames:
    """Read the frames of those of these attempts that are valid from their logs."""
    data_by_attempt = list[AttemptData]()
    notes = list[str]()
    for attempt in attempts:
        try:
            data = read_attempt(attempt, attempt.read_checked_manifest())
        except DamagedFileError as damage:
            notes.append(describe_left_out(attempt, damage.brief))
        else:
            data_by_attempt.append(data)
            notes += data.notes
    return LoadedFrames(build_frames(data_by_attempt), notes)


def load_newest(store: Store, runs: Iterable[str]) -> LoadedFrames:
    """Read the frames of each run's newest attempt that is whole from its logs, see `read_newest`."""
    data_by_attempt, notes = read_newest(store, runs)
    notes += [note for data in data_by_attempt for note in data.notes]
    return LoadedFrames(build_frames(data_by_attempt), notes)


def read_newest(store: Store, runs: Iterable[str]) -> tuple[list[AttemptData], list[str]]:
    """Read the logs of each run's newest attempt that is whole; also a line on each newer, damaged one."""
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through a million objects, none of which is in a circle, again and again
    try:
        return store.read_newest(runs, read_attempt)
    finally:
        if was_enabled:
            gc.enable()


def split_into_batches(store: Store, runs: Iterable[str]) -> Iterator[list[str]]:
    """Yield these runs in their order, so many at a time that they are in memory together."""
    batch = list[str]()
    free_bytes = BATCH_BYTES
    for run in runs:
        size = _log_bytes(store.root / run)
        if batch and (size > free_bytes or len(batch) == BATCH_RUNS):
            yield batch
            batch = []
            free_bytes = BATCH_BYTES
        batch.append(run)
        free_bytes -= size
    if batch:
        yield batch


def _log_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        return sum(path.stat().st_size for path in folder.glob("*/*.jsonl"))
    return 0


def resumed_steps(manifest: Mapping[str, Any]) -> list[int]:
    """Return the steps at which a record continues after an interruption.

    A run that went back to an older checkpoint has measured the steps after it again, so that earlier
    resumptions among those no longer count.
    """
    steps: list[int] = []
    for resumption in manifest.get("resumed", []):
        steps = [*(step for step in steps if step < resumption["step"]), resumption["step"]]
    return steps


def read_attempt(attempt: Attempt, manifest: Mapping[str, Any]) -> AttemptData:
    """Read the logs of a valid attempt.

    Raises:
        DamagedFileError: a file is not as it was recorded.
    """
    if manifest["state"] != "ok":
        raise DamagedFileError(attempt.path, "is not a whole record")
    rows = {row["variant"]: row for row in _run_rows(attempt, manifest)}
    notes, files = list[str](), manifest["files"]
    tables: dict[str, list[Columns]] = {name: [] for name in MEASURED}
    for rank in range(len(files)):
        path = attempt.rank_path(rank)
        if path.name not in files:
            break
        lines: list[LogLine]
        lines, broken = decode_finished_log(read_verified(path, files[path.name]), LogLine, path)
        if broken:
            notes.append(f"dropped {broken} broken line(s) in {attempt.name}/{path.name}")
        if strangers := {line.variant for line in lines} - rows.keys():
            raise DamagedFileError(
                path, f"has a line of variant {strangers.pop()}, which the run does not have"
            )
        for variant, row in rows.items():
            of_variant = [line for line in lines if line.variant == variant]
            steps = [line for line in of_variant if isinstance(line, StepLine)]
            epochs = [line for line in of_variant if isinstance(line, EpochLine)]
            looks = [line for line in of_variant if isinstance(line, LookLine)]
            _check_steps(steps, count_logged_steps(manifest), path)
            ranks = {"rank": np.full(len(steps), rank)}
            measured = _fields(steps, StepLine) | _phases(steps, path)
            spans = [(rank, line.step, *span) for line in steps for span in line.spans]
            seen = [
                (line.step, line.what, line.of, x, value)
                for line in looks
                for x, value in zip(line.xs, line.values, strict=True)
            ]
            parts = {
                "steps": ranks | measured | _unnamed("steps", steps, path),
                "epochs": _fields(epochs, EpochLine) | _unnamed("epochs", epochs, path),
                "spans": _columns("spans", spans),
                "looks": _columns("looks", seen),
            }
            for name, columns in parts.items():
                if length := len(next(iter(columns.values()))):
                    tables[name].append({"key": np.full(length, row["key"], dtype=object), **columns})
    return AttemptData(attempt, [*rows.values()], tables, notes)


def build_frames(every: Sequence[AttemptData]) -> Frames:
    """Return the frames of these attempts, with the outcomes of their runs."""
    tables = (_table(name, [part for data in every for part in data.tables[name]]) for name in MEASURED)
    return add_outcomes(Frames(build_runs_table([row for data in every for row in data.rows]), *tables))


def _run_rows(attempt: Attempt, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row of a run, or one row for each of its variants."""
    config = attempt.config
    variants = configs_by_variant(config)
    if not variants:
        return [_run_row(attempt, manifest, config)]
    alternated = manifest.get("alternated") or {}
    ended = flatten({name: value for name, value in alternated.items() if name != "variants"}, "alternated.")
    rows = []
    for name, of_variant in variants.items():
        own = {**manifest, **alternated.get("variants", {}).get(name, {}), "key": f"{manifest['key']}/{name}"}
        row = _run_row(attempt, own, of_variant)
        rows.append(row | {"group": manifest["key"], "variant": name, **ended})
    return rows


def _run_row(attempt: Attempt, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    row = {
        "key": manifest["key"],
        "group": None,
        "variant": None,
        "run_id": attempt.run_id,
        "attempt": attempt.number,
        **flatten(config),
        **{name: manifest.get(name) for name in COPIED_FACTS},
        "steps_total": manifest.get("steps"),
        "resumed": json.dumps(resumed_steps(manifest)) if "resumed" in manifest else None,
    }
    if manifest.get("diverged"):
        row["diverged"] = manifest["diverged"]["step"]
    for name in FLATTENED_FACTS:
        row |= flatten(manifest.get(name) or {}, f"{name}.")
    rules = manifest.get("rules")
    row["rules_json"] = json.dumps(rules, sort_keys=True) if rules else None
    row["config_json"] = json.dumps(config, sort_keys=True)
    row["provenance_json"] = json.dumps(manifest.get("provenance", {}), sort_keys=True)
    return row


def _check_steps(steps: Sequence[StepLine], expected: int | None, path: Path) -> None:
    """Raise DamagedFileError for a log in which a step is missing, or is there twice."""
    for number, line in enumerate(steps):
        if line.step != number:
            raise DamagedFileError(path, f"has step {line.step} where step {number} belongs")
    if steps and expected is not None and len(steps) != expected:
        raise DamagedFileError(path, f"has {len(steps)} of {expected} steps")


def _fields(lines: Sequence[StepLine] | Sequence[EpochLine], kind: type[StepLine | EpochLine]) -> Columns:
    """Return columns of these lines' fields; under an older name too, where it has values."""
    fields = FIELDS[kind]
    names = [*fields, *(field.was for field in fields.values() if field.was)]
    found = zip(*map(attrgetter(*names), lines), strict=True) if lines else [()] * len(names)
    columns = {}
    for name, values in zip(names, found, strict=True):
        if name in fields and fields[name].type == INTEGER:
            columns[name] = np.array(values, dtype=np.int64)
        elif name in fields or values.count(None) < len(values):
            columns[name] = np.array(values, dtype=float)
    return columns


def _unnamed(table: str, lines: Sequence[StepLine] | Sequence[EpochLine], path: Path) -> Columns:
    """Return columns of what no field is for, each of numbers or of texts.

    Raises:
        DamagedFileError: a name can't be that of a column, or there are too many.
    """
    names = dict.fromkeys(name for line in lines if line.more for name in line.more)
    for name in names:
        if not UNNAMED.fullmatch(name) or name in COLUMNS[table]:
            raise DamagedFileError(
                path, f"has a number named {name!r:.60}, which can't be a column of {table}"
            )
    if len(names) > MOST_UNNAMED:
        raise DamagedFileError(
            path, f"has {len(names)} numbers that no field is for, and {MOST_UNNAMED} are the most"
        )
    found = {name: [(line.more or {}).get(name) for line in lines] for name in names}
    texts = {name for name, values in found.items() if any(isinstance(value, str) for value in values)}
    return {
        name: np.array(values, dtype=object) if name in texts else np.array(values, dtype=float)
        for name, values in found.items()
    }


def _phases(lines: Sequence[StepLine], path: Path) -> Columns:
    """Return the seconds of each phase.

    Raises:
        DamagedFileError: the name of a phase can't be that of a column.
    """
    names = dict.fromkeys(name for line in lines for name in line.phases)
    spanned = {phase for line in lines for phase, _, _ in line.spans}
    if odd := sorted(name for name in spanned.union(names) if not PHASE.fullmatch(name)):
        raise DamagedFileError(path, f"has a phase named {odd[0]!r:.60}")
    return {f"{name}_s": np.array([line.phases.get(name) for line in lines], float) for name in names}


def _columns(table: str, rows: Sequence[tuple[Any, ...]]) -> Columns:
    """Return columns of rows whose cells are all that the table requires, but for the key."""
    _, *fields = REQUIRED_COLUMNS[table].items()
    found = zip(*rows, strict=True) if rows else [()] * len(fields)
    return {
        name: np.array(values, dtype=field.type) for (name, field), values in zip(fields, found, strict=True)
    }


def _table(name: str, parts: Sequence[Columns]) -> pd.DataFrame:
    """Join the parts of a table below each other; a column that a part lacks is NaN there."""
    if not parts:
        return empty_table(name)
    columns = [*REQUIRED_COLUMNS[name], *(column for part in parts for column in part)]
    nothing = {id(part): np.full(len(part["key"]), np.nan) for part in parts}
    joined = {
        column: np.concatenate([part.get(column, nothing[id(part)]) for part in parts])
        for column in dict.fromkeys(columns)
    }
    return order_and_type_columns(name, pd.DataFrame(joined))
