"""Records as tidy frames: one row per run; per run, rank and step; per epoch; per span of a drawn step.

Statistics, claims and figures read frames, never records. analysis/parquet.py stores them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from analysis import schemas
from analysis.files import Damaged, whole_lines
from analysis.records import Attempt, left_out, read_recorded, variant_configs

# In the order of a step. `synchronize` and `validate` occur in mode as_published only.
PHASES = (
    "io", "forward", "backward", "check", "select", "exchange", "wait", "transfer", "synchronize", "scatter",
    "update", "validate",
)  # fmt: skip
STEP_NUMBERS = (
    "start_s", "step_s", *(f"{phase}_s" for phase in PHASES),
    "wire_bytes", "host_syncs", "density", "update_density", "residual_norm", "loss", "lr",
)  # fmt: skip
EPOCH_MEANS = ("wire_bytes", "host_syncs", "density", "update_density")  # of rank 0's steps
TEXT, WHOLE, NUMBER = object, np.int64, np.float64
COLUMNS: dict[str, dict[str, type]] = {
    "runs": {"key": TEXT, "run_id": TEXT},
    "steps": {
        "key": TEXT, "rank": WHOLE, "step": WHOLE, "epoch": WHOLE, **dict.fromkeys(STEP_NUMBERS, NUMBER)
    },
    "epochs": {
        "key": TEXT, "epoch": WHOLE, "step": WHOLE,
        **dict.fromkeys(("train_loss", "val_loss", "val_top1", "val_top5", "wall_s", *EPOCH_MEANS), NUMBER),
    },
    "spans": {
        "key": TEXT, "rank": WHOLE, "step": WHOLE, "phase": TEXT, "start_s": NUMBER, "duration_s": NUMBER
    },
}  # fmt: skip
# Columns that older tables lack; `group` is the run that variants share, `block` in which of their turns.
LATER: dict[str, dict[str, type]] = {
    "runs": {"group": TEXT, "variant": TEXT},
    "steps": {"block": NUMBER},  # NaN in ordinary runs; 0: warm-up
    "epochs": dict.fromkeys(("captured_energy", "test_loss", "test_top1"), NUMBER),
    "spans": {},
}


class Frames(NamedTuple):
    """What runs measured. `key` names the run in every frame, and of variants that took turns in one run each
    has a key of its own; times are seconds, accuracies percent.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    epochs: pd.DataFrame
    spans: pd.DataFrame


def empty() -> Frames:
    """Frames of no runs, with all their columns."""
    return Frames(*(typed(name, pd.DataFrame()) for name in Frames._fields))


def of_attempt(attempt: Attempt) -> tuple[Frames, list[str]]:
    """The frames of one valid attempt, and a note on each line that a killed writer left half.

    Raises:
        Damaged: a file is not as it was recorded.
    """
    manifest = attempt.check()
    if manifest["state"] != "ok":
        raise Damaged(attempt.path, "is not a whole record")
    rows = {row["variant"]: row for row in _run_rows(attempt, manifest)}
    notes, files = list[str](), manifest["files"]
    tables: dict[str, list[dict[str, Any]]] = {"steps": [], "epochs": [], "spans": []}
    for rank in itertools.takewhile(lambda rank: attempt.rank_path(rank).name in files, itertools.count()):
        path = attempt.rank_path(rank)
        lines: list[schemas.Line]
        lines, broken = whole_lines(read_recorded(path, files[path.name]), schemas.Line, path)
        if broken:
            notes.append(f"dropped {broken} broken line(s) in {attempt.name}/{path.name}")
        for variant, of_variant in _by_variant(lines, rows, path).items():
            own = _rank_rows(rows[variant]["key"], rank, of_variant)
            _check_steps(own["steps"], rows[variant]["steps_total"], path)
            for name, of_rank in own.items():
                tables[name] += of_rank
    return Frames(
        _runs_frame([*rows.values()]), *(typed(name, pd.DataFrame(rows)) for name, rows in tables.items())
    ), notes


def from_attempts(attempts: Iterable[Attempt]) -> tuple[Frames, list[str]]:
    """The frames of the valid attempts, and a note on everything that had to be left out."""
    parts, notes = list[Frames](), list[str]()
    for attempt in attempts:
        try:
            frames, own_notes = of_attempt(attempt)
        except Damaged as damage:
            notes.append(left_out(attempt, damage.brief))
        else:
            parts.append(frames)
            notes += own_notes
    return stack(parts), notes


def restrict(frames: Frames, keys: Collection[str]) -> Frames:
    """The rows of these runs only."""
    wanted = set(keys)
    return Frames(*(frame[frame["key"].isin(wanted)].reset_index(drop=True) for frame in frames))


def combine(old: Frames, new: Frames) -> Frames:
    """The rows of both; a run that is in both is taken from `new` only."""
    return stack([restrict(old, set(old.runs["key"]) - set(new.runs["key"])), new])


def stack(parts: Sequence[Frames]) -> Frames:
    """The rows of all, which have no run in common."""
    runs = _runs_frame([row for part in parts for row in _records(part.runs)])
    tables = {name: [getattr(part, name) for part in parts] for name in ("steps", "epochs", "spans")}
    return Frames(runs, *(_stack(name, of_parts) for name, of_parts in tables.items()))


def with_provenance(frames: Frames, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Frames:
    """The frames with another provenance of each run."""
    rows = []
    for row in _records(frames.runs):
        provenance = change(json.loads(row["provenance_json"]))
        kept = {name: value for name, value in row.items() if not name.startswith("provenance")}
        text = json.dumps(provenance, sort_keys=True)
        rows.append({**kept, **flatten(provenance, "provenance."), "provenance_json": text})
    return frames._replace(runs=_runs_frame(rows))


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists become JSON text, so that every cell is one plain value."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _run_rows(attempt: Attempt, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for the run, or one for each of its variants."""
    variants = variant_configs(attempt.config)
    if not variants:
        return [_run_row(attempt, manifest, attempt.config)]
    alternated = manifest.get("alternated", {})
    ended = flatten({name: value for name, value in alternated.items() if name != "variants"}, "alternated.")
    rows = []
    for name, config in variants.items():
        own = {**manifest, **alternated.get("variants", {}).get(name, {}), "key": f"{manifest['key']}/{name}"}
        rows.append(_run_row(attempt, own, config) | {"group": manifest["key"], "variant": name, **ended})
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


def resumptions(manifest: Mapping[str, Any]) -> list[int]:
    """The steps at which a record continues after an interruption.

    A run that went back to an older checkpoint has measured the steps after it again, so that earlier
    resumptions among those no longer count.
    """
    steps: list[int] = []
    for resumption in manifest.get("resumed", []):
        steps = [*(step for step in steps if step < resumption["step"]), resumption["step"]]
    return steps


def _check_steps(steps: Sequence[Mapping[str, Any]], expected: int | None, path: Path) -> None:
    """
    Raises:
        Damaged: a step is missing, or is there twice.
    """
    for number, row in enumerate(steps):
        if row["step"] != number:
            raise Damaged(path, f"has step {row['step']} where step {number} belongs")
    if steps and expected is not None and len(steps) != expected:
        raise Damaged(path, f"has {len(steps)} of {expected} steps")


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


def _rank_rows(key: str, rank: int, lines: Sequence[schemas.Line]) -> dict[str, list[dict[str, Any]]]:
    steps = [line for line in lines if isinstance(line, schemas.Step)]
    epochs = [line for line in lines if isinstance(line, schemas.Epoch)]
    return {
        "steps": [
            {"key": key, "rank": rank, **_fields(line), **{f"{name}_s": s for name, s in line.phases.items()}}
            for line in steps
        ],
        "epochs": [{"key": key, **_fields(line)} for line in epochs],
        "spans": [
            {
                "key": key,
                "rank": rank,
                "step": line.step,
                "phase": phase,
                "start_s": start,
                "duration_s": took,
            }
            for line in steps
            for phase, start, took in line.spans
        ],
    }


def _fields(line: schemas.Line) -> dict[str, Any]:
    """Those that have one value."""
    return {
        name: value
        for name, value in msgspec.structs.asdict(line).items()
        if name not in ("phases", "spans", "variant")
    }


def typed(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The `COLUMNS` of this frame first, in their order and type, then whatever else was recorded."""
    columns = COLUMNS[name] | LATER[name]
    extra = [column for column in frame.columns if column not in columns]
    kinds = {column: kind for column, kind in columns.items() if kind is not TEXT}
    if name == "steps":
        kinds |= dict.fromkeys(extra, NUMBER)
    ordered: pd.DataFrame = frame.reindex(columns=[*columns, *extra]).astype(kinds)
    for column in columns.keys() - kinds.keys() - set(frame.columns):
        ordered[column] = np.full(len(frame), None, dtype=object)  # not NaN, which is no text
    return ordered


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as objects; columns are named by text, which pandas does not promise."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _stack(name: str, tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    if not filled:
        return typed(name, pd.DataFrame())
    columns = list(dict.fromkeys(column for table in filled for column in table.columns))
    return pd.concat([typed(name, table.reindex(columns=columns)) for table in filled], ignore_index=True)


def _runs_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One type per column: where configs disagree (a number here, a word there), the column becomes text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [None if _missing(row.get(name)) else row[name] for row in rows] for name in names}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:
            columns[name] = [_as_text(value) for value in values]
    return typed("runs", pd.DataFrame(columns))


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))
