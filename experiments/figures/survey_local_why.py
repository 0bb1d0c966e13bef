"""What in SparseLoCo does the work: its parts switched one at a time, in a small language model.

Not a figure of a paper; the claims are those of SparseLoCo and Streaming DiLoCo, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import NamedTuple

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import Value, final_difference, final_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _local, papers
from experiments.figures._local import COLUMN, MORE_SEEDS, SEEDS
from experiments.figures.papers import claim

TITLE = "What in SparseLoCo does the work: its parts switched one at a time"
SCALE, facts = _local.SCALE, _local.facts
_DATA = papers.item("survey.local-why")
VARIANTS: Mapping[str, RunSettings] = _DATA["variants"]
SMOKE: list[str] = _DATA["smoke"]
# How many, and the training in which all of them divide.
WORKERS: Mapping[int, str] = _DATA["workers"]
# Trainings by how values travel: bits of a value, and the squared error in percent of the squared values.
CODES: Mapping[str, Mapping[str, float]] = _DATA["codes"]
UNITS = {
    "error, bell": "%", "error, heavy tails": "%", "loss": "nats", "above": "nats", "in a round": "kB",
}  # fmt: skip
BASE, DILOCO = "paper", "DiLoCo"
FURTHEST = 1.0  # nats that are drawn; what diverged ends beyond
LINE = {"linestyle": "-", "marker": "", "lw": 1, "zorder": 1}


class Switched(NamedTuple):
    """A panel: trainings by name, each less the one of its line that begins with it."""

    title: str
    lines: list[list[str]]


QUESTIONS = [Switched(*each) for each in _DATA["questions"]]


def runs(profile: str) -> list[Run]:
    return _local.trainings(profile, _asked(profile), SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _local.trainings(profile, _asked(profile), MORE_SEEDS[profile])


def _asked(profile: str) -> list[RunSettings]:
    return [own for name, own in VARIANTS.items() if profile != "smoke" or name in SMOKE]


def keys(frames: Frames, name: str) -> list[str]:
    return _local.keys(frames, VARIANTS[name])


def above(frames: Frames, name: str, other: str) -> Value | None:
    """A training's loss at the end less that of another; paired by seed."""
    here, there = keys(frames, name), keys(frames, other)
    return final_difference(frames, here, there, COLUMN) if here and there else None


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(frames, question) for question in QUESTIONS]
    shown = [panel for panel in panels if panel is not None]
    if not shown:
        raise ValueError(plots.EMPTY)
    return plots.picture(shown, 1.8 * len(shown), rows=len(shown), keys=(), sharex=True)


def _panel(frames: Frames, question: Switched) -> plots.Panel | None:
    """How far each training ends above the first of its line; None where none of them ran."""
    found = [
        (name, first, difference)
        for first, *others in question.lines
        for name in others
        if (difference := above(frames, name, first)) is not None
    ]
    if not found:
        return None
    look = style.look("topk")._replace(label="")
    places = range(len(found))
    means = plots.Curve(look, [min(each.value, FURTHEST) for *_, each in found], places)
    intervals = [
        plots.Curve(look, (max(each.low, -FURTHEST), min(each.high, FURTHEST)), (at, at), LINE)
        for at, (*_, each) in enumerate(found)
        if each.low is not None and each.high is not None and each.low < FURTHEST
    ]
    labels = [_label(name, first, each.value) for name, first, each in found]
    zero = plots.Curve(style.look("dense")._replace(label=""), (0, 0), (-0.5, len(found) - 0.5), LINE)
    return plots.dots([zero, *intervals, means], rows=labels, grid="x", title=question.title)


def _label(name: str, first: str, above: float) -> str:
    """A training's row; with its number, or without one, where it is not drawn at its place."""
    place = "" if above <= FURTHEST else ": diverged" if isnan(above) else f": +{number(above)}"
    return f"{name}{'' if first == BASE else f' (over {first})'}{place}"


def table(frames: Frames) -> list[Table]:
    """Loss of every training at the end, and against the one that it is compared with, by question."""
    frames, tables = _local.told(frames), list[Table]()
    for question in QUESTIONS:
        rows = [row for line in question.lines for row in _rows(frames, line)]
        if rows:
            units = {name: unit for name, unit in UNITS.items() if name in rows[0]}
            tables.append(Table.of(question.title, rows, units, papers.words(_note(question))))
    return tables


def _note(question: Switched) -> str:
    return "survey.local-why.codes" if _is_of_codes(question.lines[0]) else "survey.local-why.note"


def _is_of_codes(line: list[str]) -> bool:
    return CODES.keys() == {*line}


def _rows(frames: Frames, line: list[str]) -> list[dict[str, object]]:
    first = line[0]
    return [
        {
            "training": name, **(CODES[name] if _is_of_codes(line) else {}), **_local.loss(frames, own),
            "above": above(frames, name, first) if name != first else None,
            "compared with": "" if name == first else first,
            "in a round": _local.round_kb(frames, own), "seeds": len(own),
        }
        for name in line
        if (own := keys(frames, name))
    ]  # fmt: skip


def claims() -> list[Claim]:
    return [
        claim(
            "survey.local-why.momentum-helps-dense", above, "DiLoCo, no momentum, first step alike", DILOCO
        ),
        claim(
            "survey.local-why.no-momentum-needed", least_above, ["Nesterov, first step", "Nesterov, long run"]
        ),
        *(
            claim("survey.local-why.senders", above, workers, f"{many} senders", case=str(many), many=many)
            for many, workers in WORKERS.items()
        ),
        claim("survey.local-why.two-bits", over, BASE, "fp32"),
        claim("survey.local-why.symmetric", above, BASE, "symmetric 2 bits"),
        claim("survey.local-why.four-bits", over, "E3M0, 4 bits", "fp32"),
        claim("survey.local-why.outer-evaluates", above, "a replica", BASE),
        claim("survey.local-why.decay", least_above, ["decay 0.9", "decay 1"]),
        claim("survey.local-why.which", spread, QUESTIONS[-1].lines[0][1:]),
    ]


def over(frames: Frames, name: str, other: str) -> Value | None:
    """A training's loss at the end over that of another; paired by seed."""
    here, there = keys(frames, name), keys(frames, other)
    return final_ratio(frames, here, there, COLUMN) if here and there else None


def least_above(frames: Frames, names: list[str]) -> Value | None:
    """The least of what these end above the paper's, where all ran."""
    found = [above(frames, name, BASE) for name in names]
    return None if None in found else min(filter(None, found), key=lambda each: each.value)


def spread(frames: Frames, names: list[str]) -> Value | None:
    """The most by which one of these ends apart from the paper's, above or below."""
    pairs = [pair for name in names for pair in ((name, BASE), (BASE, name))]
    found = [above(frames, *pair) for pair in pairs]
    return None if None in found else max(filter(None, found), key=lambda each: each.value)
