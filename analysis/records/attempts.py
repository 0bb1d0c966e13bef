"""Reading of attempts into frames: a row for each run, and the lines of logs as columns."""

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
from analysis.records.files import DamagedFileError, read_bytes_checking_digest
from analysis.records.frames import Frames, build_runs_table, empty_table, order_and_type_columns
from analysis.records.log import decode_finished_log
from analysis.records.schema import (
    INTEGER,
    EpochLine,
    LogLine,
    SelectionObservationLine,
    StepLine,
    field_descriptions_by_name,
)
from analysis.records.steps import add_missing_outcomes
from analysis.records.store import Attempt, Store, describe_left_out, expected_logged_steps

Columns = dict[str, np.ndarray]  # of a table's rows, by name
FIELDS_BY_LINE = {line: field_descriptions_by_name(line) for line in (StepLine, EpochLine)}
MEASURED_TABLES = Frames._fields[1:]  # all tables but that of the runs
PHASE_NAME = re.compile(r"[a-z_]{1,40}")
COLUMN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,80}")  # what no field is for, where it can name a column
MAX_UNKNOWN = 200  # columns of a log
# Of a manifest: facts that are columns, and groups of facts, each of which is a column.
COPIED_FACTS = ("parameters", "tensors", "steps_per_epoch", "simulated", "created", "started", "ended")
FLATTENED_FACTS = ("searching", "memory", "relay", "interface", "provenance")
# At most so many runs, with so many bytes of logs, are read together: as tables they take many times as much.
BATCH_RUNS = 250
BATCH_BYTES = 32 * 2**20


class AttemptData(NamedTuple):
    """Rows and columns from the manifest and the logs of an attempt."""

    attempt: Attempt
    run_rows: list[dict[str, Any]]  # of `runs`, one for each variant
    parts_by_table: dict[str, list[Columns]]  # of the other tables
    notes: list[str]  # a line on each line that a killed writer left half


class LoadedFrames(NamedTuple):
    """Frames of attempts, and a line on everything that had to be left out."""

    frames: Frames
    notes: list[str]


def load_attempt(attempt: Attempt) -> LoadedFrames:
    """Read the frames of one whole attempt from its logs.

    Raises:
        DamagedFileError: a file is not as it was recorded.
    """
    data = read_attempt_logs(attempt, attempt.read_checked_manifest())
    return LoadedFrames(build_frames_with_outcomes([data]), data.notes)


def load_valid_attempts(attempts: Iterable[Attempt]) -> LoadedFrames:
    """Read the frames of attempts from their logs; damaged ones are left out, with a note each."""
    attempts_data = list[AttemptData]()
    notes = list[str]()
    for attempt in attempts:
        try:
            data = read_attempt_logs(attempt, attempt.read_checked_manifest())
        except DamagedFileError as damage:
            notes.append(describe_left_out(attempt, damage.message_without_folder))
        else:
            attempts_data.append(data)
            notes += data.notes
    return LoadedFrames(build_frames_with_outcomes(attempts_data), notes)


def load_newest_attempts(store: Store, run_ids: Iterable[str]) -> LoadedFrames:
    """Read the frames of each run's newest attempt that is whole from its logs."""
    attempts_data, notes = read_newest_attempt_logs(store, run_ids)
    notes += [note for data in attempts_data for note in data.notes]
    return LoadedFrames(build_frames_with_outcomes(attempts_data), notes)


def read_newest_attempt_logs(store: Store, run_ids: Iterable[str]) -> tuple[list[AttemptData], list[str]]:
    """Read the logs of each run's newest attempt that is whole; also a line on each newer, damaged one."""
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through a million objects, none of which is in a circle, again and again
    try:
        return store.read_newest_valid(run_ids, read_attempt_logs)
    finally:
        if was_enabled:
            gc.enable()


def batch_runs_by_log_size(store: Store, run_ids: Iterable[str]) -> Iterator[list[str]]:
    """Yield these runs in their order, as many at a time as fit into memory together."""
    batch = list[str]()
    free_bytes = BATCH_BYTES
    for run_id in run_ids:
        size = _log_bytes(store.root / run_id)
        if batch and (size > free_bytes or len(batch) == BATCH_RUNS):
            yield batch
            batch = []
            free_bytes = BATCH_BYTES
        batch.append(run_id)
        free_bytes -= size
    if batch:
        yield batch


def _log_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        return sum(path.stat().st_size for path in folder.glob("*/*.jsonl"))
    return 0


def effective_resumption_steps(manifest: Mapping[str, Any]) -> list[int]:
    """Return the steps at which a record continues after an interruption.

    A run that went back to an older checkpoint has measured the steps after it again, so that earlier
    resumptions among those no longer count.
    """
    steps: list[int] = []
    for resumption in manifest.get("resumed", []):
        steps = [*(step for step in steps if step < resumption["step"]), resumption["step"]]
    return steps


def read_attempt_logs(attempt: Attempt, manifest: Mapping[str, Any]) -> AttemptData:
    """Read the logs of a whole attempt.

    Args:
        manifest: what `read_checked_manifest` returned for it.

    Raises:
        DamagedFileError: the attempt is not whole, or a file is not as it was recorded.
    """
    if manifest["state"] != "ok":
        raise DamagedFileError(attempt.path, "is not a whole record")
    row_by_variant = {row["variant"]: row for row in _build_run_rows(attempt, manifest)}
    parts_by_table: dict[str, list[Columns]] = {name: [] for name in MEASURED_TABLES}
    notes = list[str]()
    for rank in range(len(manifest["files"])):
        path = attempt.rank_log_path(rank)
        facts = manifest["files"].get(path.name)
        if facts is None:
            break
        lines: list[LogLine]
        lines, broken = decode_finished_log(read_bytes_checking_digest(path, facts["sha256"]), LogLine, path)
        if broken:
            notes.append(f"dropped {broken} broken line(s) in {attempt.name}/{path.name}")
        unknown_variants = {line.variant for line in lines} - row_by_variant.keys()
        if unknown_variants:
            raise DamagedFileError(
                path, f"has a line of variant {unknown_variants.pop()}, which the run does not have"
            )
        for variant, row in row_by_variant.items():
            lines_of_variant = [line for line in lines if line.variant == variant]
            for name, columns in _read_tables(lines_of_variant, rank, manifest, path).items():
                length = len(next(iter(columns.values())))
                if length:
                    parts_by_table[name].append({"key": np.full(length, row["key"], dtype=object), **columns})
    return AttemptData(attempt, [*row_by_variant.values()], parts_by_table, notes)


def _read_tables(
    lines: Sequence[LogLine], rank: int, manifest: Mapping[str, Any], path: Path
) -> dict[str, Columns]:
    """Return the columns of each table, but for the key, from a rank's lines of one variant."""
    steps = [line for line in lines if isinstance(line, StepLine)]
    epochs = [line for line in lines if isinstance(line, EpochLine)]
    _check_step_numbers(steps, expected_logged_steps(manifest), path)
    spans = [(rank, line.step, *span) for line in steps for span in line.spans]
    looks = [
        (line.step, line.what, line.of, x, value)
        for line in lines
        if isinstance(line, SelectionObservationLine)
        for x, value in zip(line.xs, line.values, strict=True)
    ]
    return {
        "steps": {
            "rank": np.full(len(steps), rank),
            **_field_columns(steps, StepLine),
            **_phase_columns(steps, path),
            **_unknown_columns("steps", steps, path),
        },
        "epochs": {**_field_columns(epochs, EpochLine), **_unknown_columns("epochs", epochs, path)},
        "spans": _required_columns("spans", spans),
        "looks": _required_columns("looks", looks),
    }


def build_frames_with_outcomes(attempts_data: Sequence[AttemptData]) -> Frames:
    """Return the frames of these attempts, with the outcomes of their runs."""
    runs = build_runs_table([row for data in attempts_data for row in data.run_rows])
    tables = (
        _join_parts(name, [part for data in attempts_data for part in data.parts_by_table[name]])
        for name in MEASURED_TABLES
    )
    return add_missing_outcomes(Frames(runs, *tables))


def _build_run_rows(attempt: Attempt, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row of a run, or one row for each of its variants."""
    config = attempt.config
    variants = configs_by_variant(config)
    if not variants:
        return [_build_run_row(attempt, manifest, config)]
    alternated = manifest.get("alternated") or {}
    end = flatten({name: value for name, value in alternated.items() if name != "variants"}, "alternated.")
    rows = []
    for name, config_of_variant in variants.items():
        facts = {**manifest, **alternated.get("variants", {}).get(name, {})}
        row = _build_run_row(attempt, {**facts, "key": f"{manifest['key']}/{name}"}, config_of_variant)
        rows.append(row | {"group": manifest["key"], "variant": name, **end})
    return rows


def _build_run_row(
    attempt: Attempt, manifest: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    row = {
        "key": manifest["key"],
        "group": None,
        "variant": None,
        "run_id": attempt.run_id,
        "attempt": attempt.number,
        **flatten(config),
        **{name: manifest.get(name) for name in COPIED_FACTS},
        "steps_total": manifest.get("steps"),
        "resumed": json.dumps(effective_resumption_steps(manifest)) if "resumed" in manifest else None,
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


def _check_step_numbers(steps: Sequence[StepLine], expected: int | None, path: Path) -> None:
    """Raise DamagedFileError for a log in which a step is missing, or is there twice."""
    for number, line in enumerate(steps):
        if line.step != number:
            raise DamagedFileError(path, f"has step {line.step} where step {number} belongs")
    if steps and expected is not None and len(steps) != expected:
        raise DamagedFileError(path, f"has {len(steps)} of {expected} steps")


def _field_columns(
    lines: Sequence[StepLine] | Sequence[EpochLine], kind: type[StepLine | EpochLine]
) -> Columns:
    """Return columns of these lines' fields; under an older name too, where it has values."""
    fields = FIELDS_BY_LINE[kind]
    names = [*fields, *(field.former_name for field in fields.values() if field.former_name)]
    values_by_field = zip(*map(attrgetter(*names), lines), strict=True) if lines else [()] * len(names)
    columns = {}
    for name, values in zip(names, values_by_field, strict=True):
        if name in fields and fields[name].dtype == INTEGER:
            columns[name] = np.array(values, dtype=np.int64)
        elif name in fields or values.count(None) < len(values):
            columns[name] = np.array(values, dtype=float)
    return columns


def _unknown_columns(table: str, lines: Sequence[StepLine] | Sequence[EpochLine], path: Path) -> Columns:
    """Return columns of what no field is for, each of numbers or of texts.

    Raises:
        DamagedFileError: a name can't be that of a column, or there are too many.
    """
    names = dict.fromkeys(name for line in lines if line.more for name in line.more)
    for name in names:
        if not COLUMN_NAME.fullmatch(name) or name in COLUMNS[table]:
            raise DamagedFileError(
                path, f"has a number named {name!r:.60}, which can't be a column of {table}"
            )
    if len(names) > MAX_UNKNOWN:
        raise DamagedFileError(
            path, f"has {len(names)} numbers that no field is for, and {MAX_UNKNOWN} are the most"
        )
    columns = {}
    for name in names:
        values = [(line.more or {}).get(name) for line in lines]
        has_texts = any(isinstance(value, str) for value in values)
        columns[name] = np.array(values, dtype=object if has_texts else float)
    return columns


def _phase_columns(lines: Sequence[StepLine], path: Path) -> Columns:
    """Return the seconds of each phase.

    Raises:
        DamagedFileError: the name of a phase can't be that of a column.
    """
    names = dict.fromkeys(name for line in lines for name in line.phases)
    span_phases = {phase for line in lines for phase, _, _ in line.spans}
    odd = sorted(name for name in span_phases.union(names) if not PHASE_NAME.fullmatch(name))
    if odd:
        raise DamagedFileError(path, f"has a phase named {odd[0]!r:.60}")
    return {f"{name}_s": np.array([line.phases.get(name) for line in lines], float) for name in names}


def _required_columns(table: str, rows: Sequence[tuple[Any, ...]]) -> Columns:
    """Return columns of rows whose cells are all that the table requires, but for the key."""
    _, *fields = REQUIRED_COLUMNS[table].items()
    values_by_field = zip(*rows, strict=True) if rows else [()] * len(fields)
    return {
        name: np.array(values, dtype=field.dtype)
        for (name, field), values in zip(fields, values_by_field, strict=True)
    }


def _join_parts(name: str, parts: Sequence[Columns]) -> pd.DataFrame:
    """Join the parts of a table below each other; a column that a part lacks is NaN there."""
    if not parts:
        return empty_table(name)
    columns = [*REQUIRED_COLUMNS[name], *(column for part in parts for column in part)]
    joined = {}
    for column in dict.fromkeys(columns):
        arrays = [part[column] if column in part else np.full(len(part["key"]), np.nan) for part in parts]
        joined[column] = np.concatenate(arrays)
    return order_and_type_columns(name, pd.DataFrame(joined))
