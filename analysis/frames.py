"""Records into tidy frames: one row per run; per run, rank and step; per epoch; per span of a drawn step.

Frames are what statistics, claims and figures read. They travel as Parquet, so that a picture can be drawn
again without the records, and without torch.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.records import Attempt, read_lines, write_atomic

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
# These need more than the seven digits of a float32: a clock that runs for hours, and exact byte counts.
FULL_PRECISION = ("start_s", "wire_bytes")


class Frames(NamedTuple):
    """What some runs left. `key` names the run in every frame; times in seconds, accuracies in percent."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    epochs: pd.DataFrame
    spans: pd.DataFrame


def empty() -> Frames:
    return Frames(*(_typed(name, pd.DataFrame()) for name in Frames._fields))


def from_attempts(attempts: Iterable[Attempt]) -> tuple[Frames, list[str]]:
    """The frames of the valid attempts, and a sentence for whatever had to be left out."""
    runs: list[dict[str, Any]] = []
    tables: dict[str, list[pd.DataFrame]] = {"steps": [], "epochs": [], "spans": []}
    notes: list[str] = []
    for attempt in attempts:
        if not attempt.is_valid():
            notes.append(f"left out {attempt.run_id}/{attempt.path.name}: it is not a whole record")
            continue
        run = _run_row(attempt)
        runs.append(run)
        for path in attempt.rank_paths():
            lines, broken = read_lines(path)
            if broken:
                notes.append(
                    f"dropped {broken} broken line(s) in {attempt.run_id}/{attempt.path.name}/{path.name}"
                )
            for name, rows in _rank_rows(run["key"], int(path.stem[len("rank") :]), lines).items():
                tables[name].append(_typed(name, pd.DataFrame(rows)))
    return Frames(
        _runs_frame(runs), *(_stack(name, tables[name]) for name in ("steps", "epochs", "spans"))
    ), notes


def of_attempt(attempt: Attempt, folder: Path) -> tuple[Frames, list[str]]:
    """`from_attempts` of one attempt, kept as Parquet below `folder`, where it is read 20 times faster.

    A valid attempt never changes, so what was kept stays true.
    """
    kept = folder / "attempts" / f"{attempt.run_id}-{attempt.number:03d}"
    if attempt.is_valid() and (kept / "spans.parquet").is_file():  # the last to be written
        return read_parquet(kept), []
    frames, notes = from_attempts([attempt])
    if len(frames.runs) and not notes:
        write_parquet(frames, kept)
        frames = read_parquet(kept)  # the same digits whether kept or not
    return frames, notes


def together(attempts: Iterable[Attempt], folder: Path) -> tuple[Frames, list[str]]:
    """All these attempts, each through `of_attempt`."""
    frames, notes = empty(), list[str]()
    for attempt in attempts:
        one, remarks = of_attempt(attempt, folder)
        frames, notes = combine(frames, one), [*notes, *remarks]
    return frames, notes


def restrict(frames: Frames, keys: Collection[str]) -> Frames:
    """The rows of these runs only."""
    wanted = set(keys)
    return Frames(*(frame[frame["key"].isin(wanted)].reset_index(drop=True) for frame in frames))


def combine(old: Frames, new: Frames) -> Frames:
    """Both together; a run that is in both is taken whole from `new`."""
    kept = restrict(old, set(old.runs["key"]) - set(new.runs["key"]))
    runs = _runs_frame([*kept.runs.to_dict("records"), *new.runs.to_dict("records")])
    tables = {name: (getattr(kept, name), getattr(new, name)) for name in ("steps", "epochs", "spans")}
    return Frames(runs, *(_stack(name, pair) for name, pair in tables.items()))


def write_parquet(frames: Frames, folder: Path) -> list[Path]:
    """One file per frame, each replaced whole. Steps and spans shrink to float32: seven digits are plenty."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, frame in frames._asdict().items():
        floats = [column for column, kind in frame.dtypes.items() if kind == NUMBER]
        if name in ("steps", "spans"):
            frame = frame.astype({column: np.float32 for column in floats if column not in FULL_PRECISION})
        # Without pandas' own metadata pandas 2 reads what pandas 3 wrote.
        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        buffer = io.BytesIO()
        pq.write_table(
            table,
            buffer,
            compression="zstd",
            use_dictionary=[column for column in frame.columns if column not in floats],
            use_byte_stream_split=floats,  # floats compress by a third better byte by byte
        )
        path = folder / f"{name}.parquet"
        write_atomic(path, buffer.getvalue())
        paths.append(path)
    return paths


def read_parquet(folder: Path) -> Frames:
    """The frames in `folder`; a frame whose file is not there is empty."""
    return Frames(*(_read_table(name, folder / f"{name}.parquet") for name in Frames._fields))


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists become JSON text, so that every cell is one plain value."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _run_row(attempt: Attempt) -> dict[str, Any]:
    config, manifest = attempt.config, attempt.manifest
    provenance = manifest.get("provenance", {})
    facts = ("parameters", "tensors", "steps_per_epoch", "simulated", "started", "ended")
    return {
        "key": manifest["key"],
        "run_id": attempt.run_id,
        "attempt": attempt.number,
        **flatten(config),
        **{name: manifest.get(name) for name in facts},
        "steps_total": manifest.get("steps"),
        "resumed": json.dumps(resumptions(manifest)) if "resumed" in manifest else None,
        **flatten(provenance, "provenance."),
        "config_json": json.dumps(config, sort_keys=True),
        "provenance_json": json.dumps(provenance, sort_keys=True),
    }


def resumptions(manifest: Mapping[str, Any]) -> list[int]:
    """The steps at which a record goes on after an interruption. A run that went back to an older checkpoint
    has measured the steps after that one again."""
    steps: list[int] = []
    for again in manifest.get("resumed", []):
        steps = [*(step for step in steps if step < again["step"]), again["step"]]
    return steps


def _rank_rows(key: str, rank: int, lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {"steps": [], "epochs": [], "spans": []}
    for line in lines:
        kind = line.pop("kind")
        if kind == "epoch":
            rows["epochs"].append({"key": key, **line})
        elif kind == "step":
            phases, spans = line.pop("phases", {}), line.pop("spans", [])
            seconds = {f"{phase}_s": value for phase, value in phases.items()}
            rows["steps"].append({"key": key, "rank": rank, **line, **seconds})
            rows["spans"] += [
                {
                    "key": key,
                    "rank": rank,
                    "step": line["step"],
                    "phase": phase,
                    "start_s": start,
                    "duration_s": took,
                }
                for phase, start, took in spans
            ]
    return rows


def _typed(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of this frame first, in their order and type; what else was recorded stays behind them."""
    columns = COLUMNS[name]
    extra = [column for column in frame.columns if column not in columns]
    frame = frame.reindex(columns=[*columns, *extra])
    numbers = dict.fromkeys(extra, NUMBER) if name == "steps" else {}
    return frame.astype({column: kind for column, kind in columns.items() if kind is not TEXT} | numbers)


def _stack(name: str, tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    if not filled:
        return _typed(name, pd.DataFrame())
    columns = list(dict.fromkeys(column for table in filled for column in table.columns))
    return pd.concat([_typed(name, table.reindex(columns=columns)) for table in filled], ignore_index=True)


def _runs_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One type per column: where configs disagree (a number here, a word there) the column becomes text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [None if _missing(row.get(name)) else row[name] for row in rows] for name in names}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:
            columns[name] = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
    return _typed("runs", pd.DataFrame(columns))


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _read_table(name: str, path: Path) -> pd.DataFrame:
    if not path.is_file():
        return _typed(name, pd.DataFrame())
    try:
        frame = pq.read_table(path).to_pandas()
    except pa.ArrowInvalid as error:
        message = f"{path} is not a whole Parquet file; `python -m experiments collect` writes it again"
        raise ValueError(message) from error
    floats = {column: NUMBER for column, kind in frame.dtypes.items() if kind == np.float32}
    return _typed(name, frame.astype(floats))
