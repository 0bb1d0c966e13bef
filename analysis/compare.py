"""What differs between two runs, by what it may do to their times: for a number that does not come out again.

Takes two manifests (run.json), each with its run's config under ``config``. Records of older schemas lack
fields; what only one side recorded proves nothing, and is listed apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

NOT_RECORDED = "not recorded"
NOT_SET = "not set"  # of a config, where it means the default, or that this method has no such thing
EXPLAINS, PERHAPS, UNKNOWN, WITHIN, NOTHING = WEIGHTS = (
    "can explain a difference in time",
    "may have a part in it",
    "recorded on one side only",
    "the same within tolerance",
    "explains nothing",
)
# The weightiest first. config is what was asked, machine what experiments/machine.py found before the run.
EXPLAINING = (
    ("config.*", "simulated", "machine.mismatch"),
    ("gpu", "machine.workers.gpu", "machine.topology", "machine.peer_access", "machine.workers.nvlinks"),
    ("machine.bus_bandwidth", "machine.nccl*", "nccl", "*.driver*", "*.clocks*"),
    ("image*", "versions.*", "commit", "dirty", "data.*"),
    ("cpu", "cores", "alone", "machine.hosts", "host", "*.load", "slurm.*PARTITION", "slurm.*NODES"),
)
# Names and dates, and what a run did rather than what it met.
IDLE = (
    ("attempt", "created", "started", "ended", "run_id", "key", "schema", "state", "failure", "why"),
    ("files.*", "weights", "agreed", "steps*", "parameters", "tensors"),
    ("slurm.*JOB_ID", "machine.probe_s", "machine.workers.bus"),
)
# Relative. Clocks of a busy GPU wander; a probe of milliseconds is no benchmark.
TOLERANCES = {"*.clocks.sm": 0.03, "*.clocks.mem": 0.03, "machine.bus_bandwidth": 0.1}
WIDTH = 34  # of a value in the table


class Difference(NamedTuple):
    field: str  # dotted; what belongs to the provenance without that word
    a: Any
    b: Any
    weight: str  # of WEIGHTS


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """What differs, the weightiest first."""
    found = [Difference(*one, _weight(*one)) for one in _walk("", a, b)]
    return sorted(found, key=lambda one: (WEIGHTS.index(one.weight), _tier(one.field, EXPLAINING), one.field))


def text(differences: Sequence[Difference], a: str, b: str) -> str:
    """A table for people, under the names of the two runs; what explains nothing is only named."""
    lines = [f"A: {a}", f"B: {b}", ""]
    if not any(one.weight == EXPLAINS for one in differences):
        lines += ["nothing that both runs recorded explains a difference in time", ""]
    shown = [one for one in differences if one.weight != NOTHING]
    column = max((len(one.field) for one in shown), default=0) + 2
    heading = f"  {'':{column}}{'A':{WIDTH}}  B"
    for weight in WEIGHTS[:-1]:
        rows = [one for one in shown if one.weight == weight]
        table = [f"  {one.field:{column}}{_shown(one.a):{WIDTH}}  {_shown(one.b)}" for one in rows]
        lines += [weight, heading, *table, ""] if rows else []
    idle = dict.fromkeys(one.field.partition(".")[0] for one in differences if one.weight == NOTHING)
    return "\n".join([*lines, f"{NOTHING}: {', '.join(idle)}"] if idle else lines).rstrip()


def _walk(field: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    a, b = _columns(a), _columns(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        absent = NOT_SET if field.startswith("config") else NOT_RECORDED
        for key in {**a, **b}:
            below = f"{field}.{key}".lstrip(".").removeprefix("provenance.")
            yield from _walk(below, a.get(key, absent), b.get(key, absent))
    elif a != b:
        yield field, a, b


def _columns(value: Any) -> Any:
    """Of a list with an object for each worker, each fact over all; `8 x NVIDIA H200` where they agree."""
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        return value
    facts = {key: [other.get(key) for other in value] for one in value for key in one}
    return {
        key: f"{len(each)} x {_plain(each[0])}" if all(one == each[0] for one in each) else each
        for key, each in facts.items()
    }


def _weight(field: str, a: Any, b: Any) -> str:
    if _tier(field, IDLE) < len(IDLE):
        return NOTHING
    if NOT_RECORDED in (a, b):
        return UNKNOWN
    tolerance = next((share for pattern, share in TOLERANCES.items() if fnmatchcase(field, pattern)), None)
    if tolerance is not None and _near(a, b, tolerance):
        return WITHIN
    return EXPLAINS if _tier(field, EXPLAINING) < len(EXPLAINING) else PERHAPS


def _tier(field: str, tiers: Sequence[Sequence[str]]) -> int:
    matching = (at for at, tier in enumerate(tiers) if any(fnmatchcase(field, pattern) for pattern in tier))
    return next(matching, len(tiers))


def _near(a: Any, b: Any, share: float) -> bool:
    try:
        one, other = float(a), float(b)
    except (TypeError, ValueError):  # none, or [N/A] where the driver does not say
        return False
    return abs(one - other) <= share * max(abs(one), abs(other))


def _shown(value: Any) -> str:
    word = _plain(value)
    return word if len(word) <= WIDTH else f"{word[: WIDTH - 4]} ..."


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_plain, value))
    return "none" if value is None else " ".join(str(value).split())
