"""Differences between two runs, ordered by how likely they explain a difference in time.

For a result that could not be reproduced. Takes two manifests (run.json), each with its run's config under
``config``. Records of older schemas lack fields; a field that only one side recorded proves nothing, and is
listed separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, NamedTuple

from analysis.pictures.numbers import format_number, format_with_unit
from analysis.records.columns import OUTCOME_LABELS

NOT_RECORDED = "not recorded"
NOT_SET = "not set"  # in a config: the default, or the method has no such setting
EXPLAINS, MAY_EXPLAIN, ONE_SIDED, WITHIN_TOLERANCE, EXPLAINS_NOTHING = WEIGHTS = (
    "can explain a difference in time",
    "may have a part in it",
    "recorded on one side only",
    "the same within tolerance",
    "explains nothing",
)
# Most important first. config is what was asked for, machine what experiments/worker/hardware.py found before
# the run.
EXPLAINING_FIELDS = (
    ("config.*", "simulated", "machine.mismatch"),
    (
        "gpu",
        "precision",
        "machine.workers.gpu",
        "machine.topology",
        "machine.peer_access",
        "machine.workers.nvlinks",
    ),
    ("machine.bus_bandwidth", "machine.nccl*", "nccl", "*.driver*", "*.clocks*"),
    ("image*", "versions.*", "commit", "dirty", "data.*"),
    ("cpu", "cores", "alone", "machine.hosts", "host", "*.load", "slurm.*PARTITION", "slurm.*NODES"),
)
# Names and dates, and results of a run rather than its conditions.
IDLE_FIELDS = (
    ("attempt", "created", "started", "ended", "run_id", "key", "schema", "state", "failure", "why"),
    ("files.*", "weights", "agreed", "steps*", "parameters", "tensors"),
    ("slurm.*JOB_ID", "machine.probe_s", "machine.workers.bus"),
)
# Relative. The clock rates of a busy GPU vary; a bandwidth probe of milliseconds is not precise.
TOLERANCE_BY_FIELD = {"*.clocks.sm": 0.03, "*.clocks.mem": 0.03, "machine.bus_bandwidth": 0.1}
VALUE_WIDTH = 34  # characters of a value in the table


class RunDifference(NamedTuple):
    """A field in which two runs differ."""

    field: str  # dotted; without the prefix `provenance.`
    a: Any
    b: Any
    weight: str  # one of WEIGHTS


def find_run_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[RunDifference]:
    """Return the differences of two manifests, the most important first."""
    differences = [
        RunDifference(*change, _weigh_difference(*change)) for change in _walk_differences("", a, b)
    ]
    return sorted(differences, key=_importance)


def shared_outcomes_text(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the outcomes that two rows of `Frames.runs` share, side by side; empty without any."""
    lines = []
    for column, labels in OUTCOME_LABELS.items():
        values = [value for value in (a.get(column), b.get(column)) if value is not None and isfinite(value)]
        if not labels.comparison_label or len(values) < 2:
            continue
        text_a, text_b = (format_with_unit(labels.display_factor * value, labels.unit) for value in values)
        change = _change_text(values[0], values[1], labels.unit)
        lines.append(f"  {labels.comparison_label:22}{text_a:{VALUE_WIDTH}}  {text_b:18}  {change}")
    simulated = "; step times are simulated" * bool(a.get("simulated") or b.get("simulated"))
    heading = f"  {'':22}{'A':{VALUE_WIDTH}}  {'B':18}  from A to B"
    return "\n".join([f"what they came to{simulated}", heading, *lines]) if lines else ""


def _change_text(a: float, b: float, unit: str) -> str:
    """Return '+1.2 points', or 'x 0.87'."""
    if unit == "%":
        return f"{'+' * (b >= a)}{format_number(b - a)} points"
    return f"x {format_number(b / a)}" if a else "-"


def differences_text(differences: Sequence[RunDifference], name_a: str, name_b: str) -> str:
    """Return the differences as a table, under the names of the runs; idle fields are only named."""
    lines = [f"A: {name_a}", f"B: {name_b}", ""]
    if not any(difference.weight == EXPLAINS for difference in differences):
        lines += ["nothing that both runs recorded explains a difference in time", ""]
    listed_differences = [difference for difference in differences if difference.weight != EXPLAINS_NOTHING]
    column = max((len(difference.field) for difference in listed_differences), default=0) + 2
    heading = f"  {'':{column}}{'A':{VALUE_WIDTH}}  B"
    for weight in WEIGHTS[:-1]:
        rows = [difference for difference in listed_differences if difference.weight == weight]
        table = [f"  {row.field:{column}}{_shorten(row.a):{VALUE_WIDTH}}  {_shorten(row.b)}" for row in rows]
        lines += [weight, heading, *table, ""] if rows else []
    idle_fields = dict.fromkeys(
        row.field.partition(".")[0] for row in differences if row.weight == EXPLAINS_NOTHING
    )
    return "\n".join(
        [*lines, f"{EXPLAINS_NOTHING}: {', '.join(idle_fields)}"] if idle_fields else lines
    ).rstrip()


def _importance(difference: RunDifference) -> tuple[int, int, str]:
    return (
        WEIGHTS.index(difference.weight),
        _matching_tier(difference.field, EXPLAINING_FIELDS),
        difference.field,
    )


def _walk_differences(field: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, value of a and value of b wherever two JSON values differ, below `field`."""
    a = _merge_workers(a)
    b = _merge_workers(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        absent = NOT_SET if field.startswith("config") else NOT_RECORDED
        for key in {**a, **b}:
            inner_field = f"{field}.{key}".lstrip(".").removeprefix("provenance.")
            yield from _walk_differences(inner_field, a.get(key, absent), b.get(key, absent))
    elif a != b:
        yield field, a, b


def _merge_workers(value: Any) -> Any:
    """Return a list of workers' objects as an object of lists; `8 x NVIDIA H200` where workers agree."""
    if not isinstance(value, list) or not value or not all(isinstance(worker, Mapping) for worker in value):
        return value
    keys = dict.fromkeys(key for worker in value for key in worker)
    return {key: _agreed_value([worker.get(key) for worker in value]) for key in keys}


def _agreed_value(facts: list[Any]) -> str | list[Any]:
    return facts if any(fact != facts[0] for fact in facts) else f"{len(facts)} x {_value_text(facts[0])}"


def _weigh_difference(field: str, a: Any, b: Any) -> str:
    if _matching_tier(field, IDLE_FIELDS) < len(IDLE_FIELDS):
        return EXPLAINS_NOTHING
    if NOT_RECORDED in (a, b):
        return ONE_SIDED
    tolerance = next(
        (share for pattern, share in TOLERANCE_BY_FIELD.items() if fnmatchcase(field, pattern)), None
    )
    if tolerance is not None and _is_near(a, b, tolerance):
        return WITHIN_TOLERANCE
    return EXPLAINS if _matching_tier(field, EXPLAINING_FIELDS) < len(EXPLAINING_FIELDS) else MAY_EXPLAIN


def _matching_tier(field: str, tiers: Sequence[Sequence[str]]) -> int:
    """Return the first tier with a pattern that matches; their number where none does."""
    for number, patterns in enumerate(tiers):
        if any(fnmatchcase(field, pattern) for pattern in patterns):
            return number
    return len(tiers)


def _is_near(a: Any, b: Any, share: float) -> bool:
    try:
        x, y = float(a), float(b)
    except (TypeError, ValueError):  # None, or [N/A] where the driver does not know
        return False
    return abs(x - y) <= share * max(abs(x), abs(y))


def _shorten(value: Any) -> str:
    word = _value_text(value)
    return word if len(word) <= VALUE_WIDTH else f"{word[: VALUE_WIDTH - 4]} ..."


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_value_text, value))
    return "none" if value is None else " ".join(str(value).split())
