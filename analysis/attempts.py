"""Attempts as frames: the rows of their runs, and the lines of their logs as columns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis import schemas
from analysis.files import Damaged, whole_lines
from analysis.frames import COLUMNS, LATER, WHOLE, Frames, runs_frame, typed
from analysis.leaves import flatten
from analysis.outcomes import with_outcomes
from analysis.records import Attempt, Store, left_out, read_recorded, variant_configs

Columns = dict[str, np.ndarray]  # of a table's rows, by name
SEVERAL = ("phases", "spans", "variant")  # what a line has more of than one number
FIELDS: dict[type[schemas.Line], list[str]] = {
    kind: [field.name for field in msgspec.structs.fields(kind) if field.name not in SEVERAL]
    for kind in (schemas.Step, schemas.Epoch)
}
MEASURED = Frames._fields[1:]  # all tables but that of the runs
WHOLE_NUMBERS = {name for columns in COLUMNS.values() for name, kind in columns.items() if kind is WHOLE}


def of_attempt(attempt: Attempt) -> tuple[Frames, list[str]]:
    """The frames of one valid attempt, and a note on each line that a killed writer left half.

    Raises:
        Damaged: a file is not as it was recorded.
    """
    found = _read(attempt, attempt.check())
    return _frames([found]), found.notes


def from_attempts(attempts: Iterable[Attempt]) -> tuple[Frames, list[str]]:
    """The frames of the valid attempts, and a note on everything that had to be left out."""
    found, notes = list[Read](), list[str]()
    for attempt in attempts:
        try:
            found.append(_read(attempt, attempt.check()))
        except Damaged as damage:
            notes.append(left_out(attempt, damage.brief))
        else:
            notes += found[-1].notes
    return _frames(found), notes


def newest(store: Store, runs: Iterable[str]) -> tuple[Frames, list[str]]:
    """The frames of each run's newest attempt that is whole, and a line on each newer one that is damaged."""
    found, notes = list[Read](), list[str]()
    for run in runs:
        attempts = store.attempts(run)
        if not attempts:
            notes.append(f"left out {run}: there is no attempt in it")
        for attempt in reversed(attempts):
            try:
                if (manifest := attempt.check())["state"] != "ok":
                    continue
                found.append(_read(attempt, manifest))
            except Damaged as damage:
                notes.append(left_out(attempt, damage.brief))
            else:
                notes += found[-1].notes
                break
    return _frames(found), notes


def resumptions(manifest: Mapping[str, Any]) -> list[int]:
    """The steps at which a record continues after an interruption.

    A run that went back to an older checkpoint has measured the steps after it again, so that earlier
    resumptions among those no longer count.
    """
    steps: list[int] = []
    for resumption in manifest.get("resumed", []):
        steps = [*(step for step in steps if step < resumption["step"]), resumption["step"]]
    return steps


class Read(NamedTuple):
    """What was read of an attempt: rows of its runs, parts of the other tables, notes."""

    rows: list[dict[str, Any]]
    tables: dict[str, list[Columns]]
    notes: list[str]


def _read(attempt: Attempt, manifest: Mapping[str, Any]) -> Read:
    """See `of_attempt`."""
    if manifest["state"] != "ok":
        raise Damaged(attempt.path, "is not a whole record")
    rows = {row["variant"]: row for row in _run_rows(attempt, manifest)}
    notes, files = list[str](), manifest["files"]
    tables: dict[str, list[Columns]] = {name: [] for name in MEASURED}
    for rank in itertools.takewhile(lambda rank: attempt.rank_path(rank).name in files, itertools.count()):
        path = attempt.rank_path(rank)
        lines: list[schemas.Line]
        lines, broken = whole_lines(read_recorded(path, files[path.name]), schemas.Line, path)
        if broken:
            notes.append(f"dropped {broken} broken line(s) in {attempt.name}/{path.name}")
        for variant, of_variant in _by_variant(lines, rows, path).items():
            steps = [line for line in of_variant if isinstance(line, schemas.Step)]
            _check_steps(steps, rows[variant]["steps_total"], path)
            _check_phases(steps, path)
            key = rows[variant]["key"]
            tables["steps"].append(_steps(key, rank, steps))
            if epochs := [line for line in of_variant if isinstance(line, schemas.Epoch)]:
                tables["epochs"].append({"key": _same(key, epochs), **_fields(epochs, schemas.Epoch)})
            tables["spans"].append(_spans(key, rank, steps))
            tables["looks"].append(
                _looks(key, [line for line in of_variant if isinstance(line, schemas.Look)])
            )
    return Read([*rows.values()], tables, notes)


def _frames(found: Sequence[Read]) -> Frames:
    tables = (_table(name, [part for read in found for part in read.tables[name]]) for name in MEASURED)
    return with_outcomes(Frames(runs_frame([row for read in found for row in read.rows]), *tables))


def _run_rows(attempt: Attempt, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for the run, or one for each of its variants."""
    config = attempt.config
    variants = variant_configs(config)
    if not variants:
        return [_run_row(attempt, manifest, config)]
    alternated = manifest.get("alternated", {})
    ended = flatten({name: value for name, value in alternated.items() if name != "variants"}, "alternated.")
    rows = []
    for name, of_variant in variants.items():
        own = {**manifest, **alternated.get("variants", {}).get(name, {}), "key": f"{manifest['key']}/{name}"}
        row = _run_row(attempt, own, of_variant)
        rows.append(row | {"group": manifest["key"], "variant": name, **ended})
    return rows


def _run_row(attempt: Attempt, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    provenance = manifest.get("provenance", {})
    facts = ("parameters", "tensors", "steps_per_epoch", "simulated", "started", "ended")
    return {
        "key": manifest["key"],
        "group": None,
        "variant": None,
        "run_id": attempt.run_id,
        "attempt": attempt.number,
        **flatten(config),
        **{name: manifest.get(name) for name in facts},
        "steps_total": manifest.get("steps"),
        "resumed": json.dumps(resumptions(manifest)) if "resumed" in manifest else None,
        **flatten(manifest.get("searching") or {}, "searching."),
        **flatten(provenance, "provenance."),
        "config_json": json.dumps(config, sort_keys=True),
        "provenance_json": json.dumps(provenance, sort_keys=True),
    }


def _check_steps(steps: Sequence[schemas.Step], expected: int | None, path: Path) -> None:
    """
    Raises:
        Damaged: a step is missing, or is there twice.
    """
    for number, line in enumerate(steps):
        if line.step != number:
            raise Damaged(path, f"has step {line.step} where step {number} belongs")
    if steps and expected is not None and len(steps) != expected:
        raise Damaged(path, f"has {len(steps)} of {expected} steps")


def _check_phases(steps: Sequence[schemas.Step], path: Path) -> None:
    """
    Raises:
        Damaged: what should be a phase can't name a column.
    """
    names = {*itertools.chain.from_iterable(line.phases for line in steps)}
    names |= {phase for line in steps for phase, _, _ in line.spans}
    if odd := sorted(name for name in names if not schemas.PHASE.fullmatch(name)):
        raise Damaged(path, f"has a phase named {odd[0]!r:.60}")


def _by_variant(
    lines: Sequence[schemas.Line], variants: Collection[str | None], path: Path
) -> dict[str | None, list[schemas.Line]]:
    """A log's lines, shared out.

    Raises:
        Damaged: a line is of none of these variants.
    """
    found: dict[str | None, list[schemas.Line]] = {variant: [] for variant in variants}
    for line in lines:
        if line.variant not in found:
            raise Damaged(path, f"has a line of variant {line.variant}, which the run does not have")
        found[line.variant].append(line)
    return found


def _steps(key: str, rank: int, lines: Sequence[schemas.Step]) -> Columns:
    phases = _phases([line.phases for line in lines])
    return {
        "key": _same(key, lines),
        "rank": np.full(len(lines), rank),
        **_fields(lines, schemas.Step),
        **{f"{phase}_s": took for phase, took in phases.items()},
    }


def _phases(of_lines: Sequence[Mapping[str, float]]) -> Columns:
    names = [*of_lines[0]] if of_lines else []
    if all([*phases] == names for phases in of_lines):  # as a rule; then one pass over them is enough
        numbers = itertools.chain.from_iterable(phases.values() for phases in of_lines)
        return dict(zip(names, np.fromiter(numbers, float).reshape(len(of_lines), len(names)).T, strict=True))
    return {
        phase: _numbers([phases.get(phase) for phases in of_lines])
        for phase in dict.fromkeys(itertools.chain.from_iterable(of_lines))
    }


def _spans(key: str, rank: int, lines: Sequence[schemas.Step]) -> Columns:
    found = [(line.step, *span) for line in lines for span in line.spans]
    steps, phases, starts, took = zip(*found, strict=True) if found else ((), (), (), ())
    return {
        "key": _same(key, found),
        "rank": np.full(len(found), rank),
        "step": np.array(steps, dtype=np.int64),
        "phase": np.array(phases, dtype=object),
        "start_s": _numbers(starts),
        "duration_s": _numbers(took),
    }


def _looks(key: str, lines: Sequence[schemas.Look]) -> Columns:
    found = [
        (line.step, line.what, line.of, x, value)
        for line in lines
        for x, value in zip(line.xs, line.values, strict=True)
    ]
    steps, whats, ofs, xs, values = zip(*found, strict=True) if found else ((), (), (), (), ())
    return {
        "key": _same(key, found),
        "step": np.array(steps, dtype=np.int64),
        "what": np.array(whats, dtype=object),
        "of": np.array(ofs, dtype=object),
        "x": _numbers(xs),
        "value": _numbers(values),
    }


def _fields(lines: Sequence[schemas.Line], kind: type[schemas.Line]) -> Columns:
    names = FIELDS[kind]
    found = zip(*map(attrgetter(*names), lines), strict=True) if lines else [()] * len(names)
    return {
        name: np.array(values, dtype=np.int64) if name in WHOLE_NUMBERS else _numbers(values)
        for name, values in zip(names, found, strict=True)
    }


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    """Floats; NaN for None."""
    return np.array(values, dtype=float)


def _same(key: str, rows: Sequence[Any]) -> np.ndarray:
    return np.full(len(rows), key, dtype=object)


def _table(name: str, parts: Iterable[Columns]) -> pd.DataFrame:
    """The parts below each other; what one of them lacks is NaN there."""
    filled = [part for part in parts if len(part["key"])]
    if not filled:
        return typed(name, pd.DataFrame())
    columns = [*COLUMNS[name], *LATER[name], *(column for part in filled for column in part)]
    nothing = {id(part): np.full(len(part["key"]), np.nan) for part in filled}
    joined = {
        column: np.concatenate([part.get(column, nothing[id(part)]) for part in filled])
        for column in dict.fromkeys(columns)
    }
    return typed(name, pd.DataFrame(joined))
