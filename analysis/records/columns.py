"""The meaning of each column of the frames, from which docs/records.md is written.

columns.yaml has those of no line of a log; the others are the fields of schema.py and the phases. A name with
a star stands for as many columns as there are settings of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from analysis.records.phases import PHASES
from analysis.records.schema import (
    NUMBER,
    EpochLine,
    FieldDescription,
    StepLine,
    StepOrEpochLine,
    field_descriptions_by_name,
)


class OutcomeLabels(Struct, frozen=True):
    """Names of an outcome where people read it; "" where it is not shown."""

    label: str  # in a sentence, along an axis
    comparison_label: str = ""  # before the values of two runs
    column_heading: str = ""  # above the values of many runs
    display_factor: float = 1.0  # of the values that are shown there
    unit: str = ""  # of them
    unit_suffix: str = ""  # behind the unit, where the heading does not say it


def _with_scope(fields: Mapping[str, FieldDescription], when: str) -> dict[str, FieldDescription]:
    """Return these fields with more to their meaning: over which lines they were taken."""
    return {name: replace(field, meaning=f"{field.meaning}, {when}") for name, field in fields.items()}


def _outcomes_among(fields: Mapping[str, FieldDescription], when: str) -> dict[str, FieldDescription]:
    """Return the outcomes of a run among a line's fields."""
    return _with_scope(
        {name: replace(field, former_name="") for name, field in fields.items() if field.is_run_outcome}, when
    )


_YAML = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes())
OUTCOME_LABELS = msgspec.convert(_YAML["outcome_labels"], dict[str, OutcomeLabels])
_YAML_COLUMNS = msgspec.convert(_YAML["columns"], dict[str, dict[str, FieldDescription]])
_STEP = field_descriptions_by_name(StepLine)
_EPOCH = field_descriptions_by_name(EpochLine)
_PHASES = {
    f"{phase.name}_s": FieldDescription("s", f"of these for {phase.meaning}", since=phase.since, dtype=NUMBER)
    for phase in PHASES
}
_FIRST = {name: _STEP[name] for name in ("step", "epoch", "start_s", "step_s")}
MEAN_OUTCOMES = _outcomes_among(_STEP, "mean of its steps")
LAST_EPOCH_OUTCOMES = {
    name: field
    for name, field in _outcomes_among(_EPOCH, "at the last epoch").items()
    if name not in MEAN_OUTCOMES
}
_QUALITY = _YAML_COLUMNS["quality"]
_TIMES = _YAML_COLUMNS["times"]
_ROUNDS = _YAML_COLUMNS["rounds"]
RUN_COLUMNS = {
    **_YAML_COLUMNS["settings"],
    **LAST_EPOCH_OUTCOMES,
    **_QUALITY,
    **_TIMES,
    **MEAN_OUTCOMES,
    **_ROUNDS,
    **_YAML_COLUMNS["facts"],
}
OUTCOMES = (*LAST_EPOCH_OUTCOMES, *_QUALITY, *_TIMES, *MEAN_OUTCOMES, *_ROUNDS, "took_s")
COLUMNS: dict[str, dict[str, FieldDescription]] = {
    "runs": RUN_COLUMNS,
    "steps": {**_YAML_COLUMNS["steps"], **_FIRST, **_PHASES, **_STEP},
    "epochs": {
        **_YAML_COLUMNS["epochs"],
        **_EPOCH,
        **_with_scope(field_descriptions_by_name(StepOrEpochLine), "mean"),
    },
    "spans": _YAML_COLUMNS["spans"],
    "looks": _YAML_COLUMNS["looks"],
}
# Those that every table has, also one without rows; of runs the others follow from their configurations.
REQUIRED_COLUMNS = {
    **COLUMNS,
    "runs": {name: RUN_COLUMNS[name] for name in ("key", "run_id", "group", "variant")},
}
# What settings mean that records of before they were added lack; so these keep their keys.
IMPLIED_SETTINGS: dict[str, Any] = {
    "comm": "torch", "container": "none", "train.evaluate": "anchor", "collectives": "auto",
    **{name: field.implied_value for name, field in RUN_COLUMNS.items() if field.implied_value is not UNSET},
    "variants": {}, "late": {"draw": "none", "s": 0, "spread": 0, "rank": None},
}  # fmt: skip
# Shares of a core, and of the packets, from which on a relay held its link up.
BUSY_SHARE = 0.9
LATE_SHARE = 0.1
BEGIN_MARK = "<!-- columns: written by `python -m analysis.records.columns` -->"
END_MARK = "<!-- end of columns -->"
RECORDS_PAGE = Path(__file__).parent.parent.parent / "docs" / "records.md"


def find_column_description(table: str, column: str) -> FieldDescription | None:
    """Return the description of a column, else of its kind; None where nothing describes it."""
    described = COLUMNS[table]
    kinds = (field for kind, field in described.items() if "*" in kind and fnmatchcase(column, kind))
    return described.get(column) or next(kinds, None)


def unit_of_run_column(column: str) -> str:
    """Return the unit of a column of `runs`; "" where nothing describes it."""
    field = find_column_description("runs", column)
    return field.unit if field else ""


def is_relay_bottleneck(relay: Mapping[str, float]) -> bool:
    """Tell whether the relay of an emulated link, rather than the link, limited what was sent.

    Args:
        relay: the columns `relay.*` of a run by their last words; empty where there was none.
    """
    if not relay.get("packets"):
        return False
    return relay["cpu_s"] > BUSY_SHARE * relay["seconds"] or relay["late"] > LATE_SHARE * relay["packets"]


def column_table_lines() -> Iterator[str]:
    """Yield tables that describe all columns in Markdown, line by line."""
    head = ("", "| column | unit | meaning |", "|---|---|---|")
    for table, fields in COLUMNS.items():
        yield from ("", f"### {table}", "", _YAML["rows"][table], *head)
        yield from (f"| `{name}` | {field.unit} | {field.meaning} |" for name, field in fields.items())


def render_records_page() -> str:
    """Return the text of docs/records.md with the tables of today between its two marks."""
    head, _, rest = RECORDS_PAGE.read_text().partition(BEGIN_MARK)
    tail = rest.partition(END_MARK)[2]
    return f"{head}{BEGIN_MARK}\n{chr(10).join(column_table_lines()).strip()}\n\n{END_MARK}{tail}"


if __name__ == "__main__":
    RECORDS_PAGE.write_text(render_records_page())
