"""What in SparseLoCo does the work: its parts switched one at a time, in a small language model.

Not a figure of a paper; the claims are those of SparseLoCo and Streaming DiLoCo, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isnan

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _trainings, papers
from experiments.figures._trainings import MORE_SEEDS, SEEDS, Trainings
from experiments.figures.papers import claim

TITLE = "What in SparseLoCo does the work: its parts switched one at a time"
SCALE = _trainings.SCALE
_DATA = papers.item("survey.local-why")
VARIANTS: Mapping[str, RunSettings] = _DATA["variants"]
# Trainings by how values travel: bits of a value, and the squared error in percent of the squared values.
CODES: Mapping[str, Mapping[str, float]] = _DATA["codes"]
QUESTIONS: list[tuple[str, list[list[str]]]] = _DATA[
    "questions"
]  # titles; trainings, each less its line's first
UNITS = {
    "error, bell": "%", "error, heavy tails": "%", "loss": "nats", "above": "nats", "in a round": "kB",
}  # fmt: skip
BASE, DILOCO = "paper", "DiLoCo"
FURTHEST = 1.0  # nats that are drawn; what diverged ends beyond
LINE = {"linestyle": "-", "marker": "", "lw": 1, "zorder": 1}


def whole(own: RunSettings) -> RunSettings:
    """All settings by which a training is told from the others, given those in which it differs."""
    return {**_DATA["diloco" if own.get("method") == "diloco" else "sparseloco"], **own}


TRAININGS = Trainings("local-why", {name: whole(own) for name, own in VARIANTS.items()})
above, over = TRAININGS.above, TRAININGS.over


def runs(profile: str, seeds: dict[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(profile, seeds[profile], _DATA["smoke"] if profile == "smoke" else VARIANTS)


more_runs = partial(runs, seeds=MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [panel for question in QUESTIONS if (panel := _panel(frames, *question))]
    return plots.compose_figure(panels, 1.8 * len(panels), rows=len(panels), keys=(), sharex=True)


def _panel(frames: Frames, title: str, lines: list[list[str]]) -> plots.Panel | None:
    """How far each training ends above the first of its line; None where none of them ran."""
    pairs = [(name, first) for first, *others in lines for name in others]
    found = [(*pair, ends) for pair in pairs if (ends := above(frames, *pair)) is not None]
    if not found:
        return None
    look, none = style.method_style("topk")._replace(label=""), style.method_style("dense")._replace(label="")
    means = plots.Curve(look, [min(each.value, FURTHEST) for *_, each in found], range(len(found)))
    intervals = [
        plots.Curve(look, (max(each.low, -FURTHEST), min(each.high, FURTHEST)), (at, at), LINE)
        for at, (*_, each) in enumerate(found)
        if each.low is not None and each.high is not None and each.low < FURTHEST
    ]
    zero = plots.Curve(none, (0, 0), (-0.5, len(found) - 0.5), LINE)
    return plots.dots_panel(
        [zero, *intervals, means], rows=[_label(*each) for each in found], grid="x", title=title
    )


def _label(name: str, first: str, ends: Estimate) -> str:
    """A training's row; with its number, or without one, where it is not drawn at its place."""
    place = (
        ""
        if ends.value <= FURTHEST
        else ": diverged"
        if isnan(ends.value)
        else f": +{format_number(ends.value)}"
    )
    return f"{name}{'' if first == BASE else f' (over {first})'}{place}"


def table(frames: Frames) -> list[Table]:
    """Loss of every training at the end, and against the one that it is compared with, by question."""
    frames = _trainings.told(frames)
    there, tables = TRAININGS.found(frames), list[Table]()
    for title, lines in QUESTIONS:
        is_of_codes = CODES.keys() == {*lines[0]}
        rows = [
            {
                "training": name, **(CODES[name] if is_of_codes else {}), **TRAININGS.cells(frames, name),
                "above": above(frames, name, line[0]) if name != line[0] else None,
                "compared with": "" if name == line[0] else line[0], **TRAININGS.sent(frames, name),
            }
            for line in lines for name in line if name in there
        ]  # fmt: skip
        if rows:
            units = {name: unit for name, unit in UNITS.items() if name in rows[0]}
            note = papers.words(f"survey.local-why.{'codes' if is_of_codes else 'note'}")
            tables.append(Table.of(title, rows, units, note))
    return tables


def facts(frames: Frames) -> dict[str, object]:
    every = int(_DATA["sparseloco"]["method.every"])
    return {
        **_trainings.facts(frames),
        "every": every,
        "rounds": f"{int(frames.epochs['step'].max()) // every:,}",
    }


def claims() -> list[Claim]:
    about = partial(claim, "survey.local-why.momentum-helps-dense")
    return [
        about(above, "DiLoCo, no momentum, first step alike", DILOCO),
        claim(
            "survey.local-why.no-momentum-needed", least_above, ["Nesterov, first step", "Nesterov, long run"]
        ),
        *(
            claim("survey.local-why.senders", above, workers, f"{many} senders", case=str(many), many=many)
            for many, workers in _DATA["workers"].items()
        ),
        claim("survey.local-why.two-bits", over, BASE, "fp32"),
        claim("survey.local-why.symmetric", above, BASE, "symmetric 2 bits"),
        claim("survey.local-why.four-bits", over, "E3M0, 4 bits", "fp32"),
        claim("survey.local-why.outer-evaluates", above, "a replica", BASE),
        claim("survey.local-why.decay", least_above, ["decay 0.9", "decay 1"]),
        claim("survey.local-why.which", spread, QUESTIONS[-1][1][0][1:]),
    ]


def least_above(frames: Frames, names: list[str]) -> Estimate | None:
    """The least of what these end above the paper's, where all ran."""
    found = [above(frames, name, BASE) for name in names]
    return None if None in found else min(filter(None, found), key=lambda each: each.value)


def spread(frames: Frames, names: list[str]) -> Estimate | None:
    """The most by which one of these ends apart from the paper's, above or below."""
    pairs = [pair for name in names for pair in ((name, BASE), (BASE, name))]
    found = [above(frames, *pair) for pair in pairs]
    return None if None in found else max(filter(None, found), key=lambda each: each.value)
