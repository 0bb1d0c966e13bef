"""Parts of SparseLoCo, switched one at a time in a small language model, to see which does the work.

Not a figure of a paper; the claims are those of SparseLoCo and Streaming DiLoCo, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isnan
from typing import NamedTuple

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _trainings, papers
from experiments.figures._trainings import MORE_SEEDS, SEEDS, NamedTrainings
from experiments.figures.papers import make_claim

TITLE = "What in SparseLoCo does the work: its parts switched one at a time"
SCALE = _trainings.SCALE
_DATA = papers.item_settings("survey.local-why")
VARIANTS: Mapping[str, RunSettings] = _DATA["variants"]
# Trainings by how values travel: bits of a value, and the squared error in percent of the squared values.
CODES: Mapping[str, Mapping[str, float]] = _DATA["codes"]
# Titles, and lines of trainings, which are compared with the first of their line.
QUESTIONS: list[tuple[str, list[list[str]]]] = _DATA["questions"]
UNITS = {
    "error, bell": "%", "error, heavy tails": "%", "loss": "nats", "above": "nats", "in a round": "kB",
}  # fmt: skip
BASE, DILOCO = "paper", "DiLoCo"
MAX_DRAWN_NATS = 1.0  # what diverged ends beyond
LINE = {"linestyle": "-", "marker": "", "lw": 1, "zorder": 1}


def complete_training_settings(changes: RunSettings) -> RunSettings:
    """Return all settings by which a training is told from the others, given those in which it differs."""
    return {**_DATA["diloco" if changes.get("method") == "diloco" else "sparseloco"], **changes}


TRAININGS = NamedTrainings(
    "local-why", {name: complete_training_settings(changes) for name, changes in VARIANTS.items()}
)


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(
        profile, seeds_by_profile[profile], _DATA["smoke"] if profile == "smoke" else VARIANTS
    )


more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


class FinalLossDifference(NamedTuple):
    """Loss by which a training ends above the baseline, the first of its line."""

    name: str
    baseline: str
    nats: Estimate

    @property
    def label(self) -> str:
        """Name of its row; with its number, or without one, where it is not drawn at its place."""
        value = self.nats.value
        place = ""
        if not value <= MAX_DRAWN_NATS:
            place = ": diverged" if isnan(value) else f": +{format_number(value)}"
        return f"{self.name}{'' if self.baseline == BASE else f' (over {self.baseline})'}{place}"


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = []
    for title, lines in QUESTIONS:
        pairs = [(name, baseline) for baseline, *names in lines for name in names]
        estimates = [(*pair, TRAININGS.final_loss_difference(frames, *pair)) for pair in pairs]
        differences = [
            FinalLossDifference(name, baseline, nats) for name, baseline, nats in estimates if nats
        ]
        if differences:
            panels.append(_panel(title, differences))
    return plots.compose_figure(
        panels, 1.8 * len(panels), num_rows=len(panels), first_legend_entries=(), sharex=True
    )


def _panel(title: str, differences: list[FinalLossDifference]) -> plots.Panel:
    look, zero_look = (style.method_style(name)._replace(label="") for name in ("topk", "dense"))
    means = [min(difference.nats.value, MAX_DRAWN_NATS) for difference in differences]
    curves = [plots.Curve(zero_look, (0, 0), (-0.5, len(differences) - 0.5), LINE)]
    for row, (_, _, nats) in enumerate(differences):
        if nats.low is not None and nats.high is not None and nats.low < MAX_DRAWN_NATS:
            ends = (max(nats.low, -MAX_DRAWN_NATS), min(nats.high, MAX_DRAWN_NATS))
            curves.append(plots.Curve(look, ends, (row, row), LINE))
    curves.append(plots.Curve(look, means, range(len(differences))))
    labels = [difference.label for difference in differences]
    return plots.dots_panel(curves, row_labels=labels, grid="x", title=title)


def table(frames: Frames) -> list[Table]:
    """Return the loss of every training at the end, and against the one of its comparison, by question."""
    frames = _trainings.with_outcome_columns(frames)
    keys_by_name = TRAININGS.run_keys_by_name(frames)
    tables = []
    for title, lines in QUESTIONS:
        is_of_codes = CODES.keys() == {*lines[0]}
        rows = []
        for baseline, *names in lines:
            for name in filter(keys_by_name.__contains__, (baseline, *names)):
                is_baseline = name == baseline
                rows.append(
                    {
                        "training": name,
                        **(CODES[name] if is_of_codes else {}),
                        **TRAININGS.loss_cells(frames, name),
                        "above": None
                        if is_baseline
                        else TRAININGS.final_loss_difference(frames, name, baseline),
                        "compared with": "" if is_baseline else baseline,
                        **TRAININGS.sent_bytes_and_seeds_cells(frames, name),
                    }
                )
        if rows:
            units = {name: unit for name, unit in UNITS.items() if name in rows[0]}
            note = papers.text_template_or_empty(f"survey.local-why.{'codes' if is_of_codes else 'note'}")
            tables.append(Table.from_rows(title, rows, units, note))
    return tables


def facts(frames: Frames) -> dict[str, object]:
    every = int(_DATA["sparseloco"]["method.every"])
    rounds = f"{_trainings.longest_training_steps(frames) // every:,}"
    return {**_trainings.training_facts(frames), "every": every, "rounds": rounds}


def claims() -> list[Claim]:
    family = "survey.local-why"
    above = TRAININGS.final_loss_difference
    over = TRAININGS.final_loss_ratio
    return [
        make_claim(f"{family}.momentum-helps-dense", above, "DiLoCo, no momentum, first step alike", DILOCO),
        make_claim(
            f"{family}.no-momentum-needed",
            least_loss_above_paper,
            ["Nesterov, first step", "Nesterov, long run"],
        ),
        *(
            make_claim(f"{family}.senders", above, workers, f"{many} senders", case=str(many), many=many)
            for many, workers in _DATA["workers"].items()
        ),
        make_claim(f"{family}.two-bits", over, BASE, "fp32"),
        make_claim(f"{family}.symmetric", above, BASE, "symmetric 2 bits"),
        make_claim(f"{family}.four-bits", over, "E3M0, 4 bits", "fp32"),
        make_claim(f"{family}.outer-evaluates", above, "a replica", BASE),
        make_claim(f"{family}.decay", least_loss_above_paper, ["decay 0.9", "decay 1"]),
        make_claim(f"{family}.which", largest_loss_distance_from_paper, QUESTIONS[-1][1][0][1:]),
    ]


def least_loss_above_paper(frames: Frames, names: list[str]) -> Estimate | None:
    """Return the least by which one of these ends above the paper's, where all ran."""
    differences = [TRAININGS.final_loss_difference(frames, name, BASE) for name in names]
    return None if None in differences else min(filter(None, differences), key=lambda nats: nats.value)


def largest_loss_distance_from_paper(frames: Frames, names: list[str]) -> Estimate | None:
    """Return the most by which one of these ends apart from the paper's, above or below, where all ran."""
    pairs = [pair for name in names for pair in ((name, BASE), (BASE, name))]
    differences = [TRAININGS.final_loss_difference(frames, *pair) for pair in pairs]
    return None if None in differences else max(filter(None, differences), key=lambda nats: nats.value)
