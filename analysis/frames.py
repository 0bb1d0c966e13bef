"""Records as tidy frames: one row per run; per run, rank and step; per epoch; per span of a drawn step; per
number that was looked for in gradients.

Statistics, claims and figures read frames, never records. analysis/parquet.py stores them.
"""

from __future__ import annotations

import difflib
import json
import keyword
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.leaves import flatten, labels

# In the order of a step. `synchronize` and `validate` occur in mode as_published only, `late` on purpose.
PHASES = (
    "io", "forward", "backward", "late", "check", "select", "exchange", "wait", "transfer", "synchronize",
    "scatter", "update", "validate",
)  # fmt: skip
STEP_NUMBERS = (
    "start_s", "step_s", *(f"{phase}_s" for phase in PHASES if phase != "late"),
    "wire_bytes", "host_syncs", "density", "update_density", "residual_norm", "loss", "lr",
)  # fmt: skip
EPOCH_MEANS = ("wire_bytes", "host_syncs", "density", "update_density")  # of rank 0's steps
# In an expression: a text, or a name with its dots; not the exponent of a number.
NAMES = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|(?<![\w.@])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*""")
WORDS = {*keyword.kwlist, "nan"}
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
    "looks": {"key": TEXT, "step": WHOLE, "what": TEXT, "of": TEXT, "x": NUMBER, "value": NUMBER},
}  # fmt: skip
# Columns that older tables lack; `group` is the run that variants share, `block` in which of their turns.
LATER: dict[str, dict[str, type]] = {
    "runs": {"group": TEXT, "variant": TEXT},
    # block: NaN in ordinary runs, 0 in warm-up
    "steps": dict.fromkeys(("block", "messages", "predicted_s", "late_s"), NUMBER),
    "epochs": dict.fromkeys(("captured_energy", "test_loss", "test_top1"), NUMBER),
    "spans": {},
    "looks": {},
}
NO_LOOKS = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in COLUMNS["looks"].items()})


class Frames(NamedTuple):
    """What runs measured. `key` names the run in every frame, and of variants that took turns in one run each
    has a key of its own; times are seconds, accuracies percent.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    epochs: pd.DataFrame
    spans: pd.DataFrame
    looks: pd.DataFrame = NO_LOOKS


def empty() -> Frames:
    """Frames of no runs, with all their columns."""
    return Frames(*(typed(name, pd.DataFrame()) for name in Frames._fields))


def restrict(frames: Frames, keys: Collection[str]) -> Frames:
    """The rows of these runs only."""
    wanted = set(keys)
    return Frames(*(frame[frame["key"].isin(wanted)].reset_index(drop=True) for frame in frames))


def combine(old: Frames, new: Frames) -> Frames:
    """The rows of both; a run that is in both is taken from `new` only."""
    return stack([restrict(old, set(old.runs["key"]) - set(new.runs["key"])), new])


def stack(parts: Sequence[Frames]) -> Frames:
    """The rows of all, which have no run in common."""
    runs = runs_frame([row for part in parts for row in records(part.runs)])
    tables = {name: [getattr(part, name) for part in parts] for name in Frames._fields[1:]}
    return Frames(runs, *(_stack(name, of_parts) for name, of_parts in tables.items()))


def query(frames: Frames, expression: str) -> Frames:
    """The runs for which an expression is true, with their steps, epochs and spans.

        query(frames, "method.name == 'topk' and method.density <= 0.01")

    Args:
        expression: what `pandas.DataFrame.query` takes, over the columns of `runs`; dotted names need no
            quotes.

    Raises:
        ValueError: it names a column that there is not, or can't be read.
    """
    quoted = NAMES.sub(lambda found: _as_column(found[0], list(frames.runs.columns)), expression)
    try:
        chosen = frames.runs.query(quoted, engine="python")
    except Exception as error:  # whatever Python and pandas raise for what is no expression over columns
        raise ValueError(f"{expression!r} can't be evaluated: {error}") from error
    if not isinstance(chosen, pd.DataFrame):
        raise ValueError(f"{expression!r} says of no run whether it is meant")
    return restrict(frames, chosen["key"])


def label(runs: pd.DataFrame) -> pd.Series[Any]:
    """By key, a label of each of these runs that shows what varies among them: `topk density=0.01 seed=2`."""
    configs = [json.loads(text) for text in runs["config_json"]]
    variants = runs["variant"] if "variant" in runs else pd.Series(None, runs.index, dtype=object)
    texts = [
        f"{variant}:{text}" if isinstance(variant, str) and not text.startswith(variant) else text
        for variant, text in zip(variants, labels(configs), strict=True)
    ]
    by_key: pd.Series[Any] = pd.Series(texts, index=runs["key"], dtype=object)
    return by_key


def _as_column(word: str, columns: Sequence[str]) -> str:
    """A name of an expression as `DataFrame.query` wants it; texts, numbers and words of Python as they are.

    Raises:
        ValueError: no such column.
    """
    if word[0] in "'\"`" or word in WORDS:
        return word
    parts = word.split(".")
    for length in range(len(parts), 0, -1):  # `items.str.contains`: a column, and what pandas does with it
        if (name := ".".join(parts[:length])) in columns:
            return ".".join([f"`{name}`", *parts[length:]])
    close = difflib.get_close_matches(word, columns, 3)
    advice = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(
        f"no column {word!r} in runs{advice} (docs/records.md lists them; texts stand in quotes)"
    )


def with_provenance(frames: Frames, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Frames:
    """The frames with another provenance of each run."""
    rows = []
    for row in records(frames.runs):
        provenance = change(json.loads(row["provenance_json"]))
        kept = {name: value for name, value in row.items() if not name.startswith("provenance")}
        text = json.dumps(provenance, sort_keys=True)
        rows.append({**kept, **flatten(provenance, "provenance."), "provenance_json": text})
    return frames._replace(runs=runs_frame(rows))


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
    # astype leaves each column by itself, and pandas warns of adding one to more than a hundred such.
    return ordered.copy() if name == "runs" else ordered


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as objects; columns are named by text, which pandas does not promise."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _stack(name: str, tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    if not filled:
        return typed(name, pd.DataFrame())
    columns = list(dict.fromkeys(column for table in filled for column in table.columns))
    return pd.concat([typed(name, table.reindex(columns=columns)) for table in filled], ignore_index=True)


def runs_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
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
