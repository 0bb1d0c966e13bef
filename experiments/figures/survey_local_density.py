"""Which share of the drift SparseLoCo should send: loss of a small language model by density.

Not a figure of a paper; the claims are SparseLoCo's, at a scale far below theirs.
"""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate, estimate_mean
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _trainings, papers
from experiments.figures import survey_local_why as why
from experiments.figures._trainings import COLUMN, MORE_SEEDS, SEEDS, Trainings
from experiments.figures.papers import claim

TITLE = "Which share of the drift to send: loss of a small language model by density"
SCALE = _trainings.SCALE
DENSITIES, INSIDE = (papers.item("survey.local-density")[name] for name in ("densities", "inside"))
ALL, DILOCO = DENSITIES["paper"], "DiLoCo"
TRAININGS = Trainings(
    "local-why",
    {each: why.whole({"method.density": each}) for each in ALL} | {DILOCO: why.whole({"method": "diloco"})},
)


def runs(profile: str, seeds: dict[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(profile, seeds[profile], [DILOCO, *DENSITIES[profile]])


more_runs = partial(runs, seeds=MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = [name for name in TRAININGS.found(frames) if name != DILOCO]
    if not found:
        raise ValueError(plots.NOTHING_TO_DRAW)
    sparse = style.method_style("topk")._replace(label="SparseLoCo, 2 bits")
    dense = style.method_style("dense")._replace(label="DiLoCo, all of it in fp32")
    ends = [plots.Curve(sparse, found, [TRAININGS.end(frames, density) for density in found])]
    if level := TRAININGS.end(frames, DILOCO):
        ends.append(plots.Curve(dense, [min(found), max(found)], [level, level]))
    along = [
        line
        for density, shade in _trainings.shades(found).items()
        for line in TRAININGS.along(
            frames, density, sparse._replace(label=f"density {format_number(density)}"), {"alpha": shade}
        )
    ]
    along += TRAININGS.along(frames, DILOCO, dense._replace(label=""), {})
    by_density = plots.curves_panel(ends, xscale="log", xlabel="Density of what is sent")
    panels = [
        plots.overlay_panels(plots.shaded_span_panel("x", min(INSIDE), max(INSIDE)), by_density),
        plots.curves_panel(along, xlabel="Optimiser steps", xlim=(0, None)),
    ]
    return plots.compose_figure(panels, 3.2, ylabel="Validation loss (nats a character)", ncols=4)


def table(frames: Frames) -> Table:
    """Loss at the end, by density."""
    frames = _trainings.told(frames)
    rows = [
        {
            "density": "1 (DiLoCo)" if name == DILOCO else format_number(name),
            **TRAININGS.cells(frames, name),
            "above DiLoCo": TRAININGS.above(frames, name, DILOCO) if name != DILOCO else None,
            **TRAININGS.sent(frames, name),
        }
        for name in TRAININGS.found(frames)
    ]  # fmt: skip
    units = {"loss": "nats", "above DiLoCo": "nats", "in a round": "kB"}
    return Table.of("At the end of the trainings", rows, units, papers.words("survey.local-density.note"))


def facts(frames: Frames) -> dict[str, object]:
    return {
        **why.facts(frames),
        "inside": f"{format_number(100 * min(INSIDE))} to {format_number(100 * max(INSIDE))} %",
    }


def claims() -> list[Claim]:
    return [
        claim("survey.local-density.optimum", worse_outside),
        claim("survey.local-density.below-diloco", below_diloco),
    ]


def worse_outside(frames: Frames) -> Estimate | None:
    """The least loss at the end of the densities outside, less the least of those inside; by seed."""
    ends = _ends(frames)
    if ends is None:
        return None
    inside, outside = (ends[[each for each in ALL if (each in INSIDE) is is_in]] for is_in in (True, False))
    return estimate_mean((outside.min(axis=1) - inside.min(axis=1)).to_numpy())


def _ends(frames: Frames) -> pd.DataFrame | None:
    """Loss at the end, a row for each seed and a column for each density; None where one did not run."""
    found = TRAININGS.found(frames)
    if not {*ALL} <= {*found}:
        return None
    seed = frames.runs.set_index("key")["seed"]
    last = frames.epochs.sort_values("epoch").groupby("key")[COLUMN].last()
    ends: pd.DataFrame = pd.DataFrame({name: last[found[name]].rename(index=seed) for name in ALL}).dropna()
    return ends


def below_diloco(frames: Frames) -> Estimate | None:
    """DiLoCo's loss at the end less the least of SparseLoCo's at the densities that are said to be best."""
    ends = _ends(frames)
    best = None if ends is None else min(INSIDE, key=lambda density: float(ends[density].mean()))
    return TRAININGS.above(frames, DILOCO, best) if best else None
