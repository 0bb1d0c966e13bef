"""Which share of the drift SparseLoCo should send: loss of a small language model by density.

Not a figure of a paper; the claims are SparseLoCo's, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from experiments.figures._trainings import COLUMN, MORE_SEEDS, SEEDS, NamedTrainings
from experiments.figures.papers import make_claim

TITLE = "Which share of the drift to send: loss of a small language model by density"
SCALE = _trainings.SCALE
_DATA = papers.item_settings("survey.local-density")
DENSITIES: Mapping[str, list[float]] = _DATA["densities"]
INSIDE: list[float] = _DATA["inside"]  # said to be best
ALL_DENSITIES = DENSITIES["paper"]
DILOCO = "DiLoCo"
TRAININGS = NamedTrainings(
    "local-why",
    {density: why.complete_training_settings({"method.density": density}) for density in ALL_DENSITIES}
    | {DILOCO: why.complete_training_settings({"method": "diloco"})},
)


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(profile, seeds_by_profile[profile], [DILOCO, *DENSITIES[profile]])


more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    densities = [name for name in TRAININGS.run_keys_by_name(frames) if name != DILOCO]
    if not densities:
        raise ValueError(plots.NOTHING_TO_DRAW)
    sparse = style.method_style("topk")._replace(label="SparseLoCo, 2 bits")
    dense = style.method_style("dense")._replace(label="DiLoCo, all of it in fp32")
    ends = [TRAININGS.mean_final_loss(frames, density) for density in densities]
    by_density = [plots.Curve(sparse, densities, ends)]
    level = TRAININGS.mean_final_loss(frames, DILOCO)
    if level:
        by_density.append(plots.Curve(dense, [min(densities), max(densities)], [level, level]))
    by_steps = []
    for density, position in _trainings.relative_position_by_name(densities).items():
        look = sparse._replace(label=f"density {density:g}")
        by_steps += TRAININGS.loss_curves(frames, density, look, {"alpha": 0.3 + 0.7 * position})
    by_steps += TRAININGS.loss_curves(frames, DILOCO, dense._replace(label=""), {})
    panels = [
        plots.overlay_panels(
            plots.shaded_span_panel("x", min(INSIDE), max(INSIDE)),
            plots.curves_panel(by_density, xscale="log", xlabel="Density of what is sent"),
        ),
        plots.curves_panel(by_steps, xlabel="Optimiser steps", xlim=(0, None)),
    ]
    return plots.compose_figure(panels, 3.2, ylabel="Validation loss (nats a character)", legend_columns=4)


def table(frames: Frames) -> Table:
    """Return the loss at the end, by density."""
    frames = _trainings.with_outcome_columns(frames)
    rows = [
        {
            "density": "1 (DiLoCo)" if name == DILOCO else f"{name:g}",
            **TRAININGS.loss_cells(frames, name),
            "above DiLoCo": TRAININGS.final_loss_difference(frames, name, DILOCO) if name != DILOCO else None,
            **TRAININGS.sent_bytes_and_seeds_cells(frames, name),
        }
        for name in TRAININGS.run_keys_by_name(frames)
    ]
    units = {"loss": "nats", "above DiLoCo": "nats", "in a round": "kB"}
    note = papers.text_template_or_empty("survey.local-density.note")
    return Table.from_rows("At the end of the trainings", rows, units, note)


def facts(frames: Frames) -> dict[str, object]:
    lowest, highest = (format_number(100 * end(INSIDE)) for end in (min, max))
    return {**why.facts(frames), "inside": f"{lowest} to {highest} %"}


def claims() -> list[Claim]:
    return [
        make_claim("survey.local-density.optimum", least_loss_outside_above_inside),
        make_claim("survey.local-density.below-diloco", diloco_loss_above_best_inside),
    ]


def least_loss_outside_above_inside(frames: Frames) -> Estimate | None:
    """Return the least loss at densities outside less the least at those inside, by seed."""
    losses = _final_losses(frames)
    if losses is None:
        return None
    outside = losses.drop(columns=INSIDE).min(axis=1)
    return estimate_mean((outside - losses[INSIDE].min(axis=1)).to_numpy())


def _final_losses(frames: Frames) -> pd.DataFrame | None:
    """Return the loss at the end, a row per seed and a column per density; None where one did not run."""
    keys_by_name = TRAININGS.run_keys_by_name(frames)
    if not {*ALL_DENSITIES} <= {*keys_by_name}:
        return None
    seeds = frames.runs.set_index("key")["seed"]
    last = frames.epochs.sort_values("epoch").groupby("key")[COLUMN].last()
    by_density = {name: last[keys_by_name[name]].rename(index=seeds) for name in ALL_DENSITIES}
    losses: pd.DataFrame = pd.DataFrame(by_density).dropna()
    return losses


def diloco_loss_above_best_inside(frames: Frames) -> Estimate | None:
    """Return DiLoCo's loss at the end less the least of SparseLoCo's at the densities said to be best."""
    losses = _final_losses(frames)
    return (
        None
        if losses is None
        else TRAININGS.final_loss_difference(frames, DILOCO, losses[INSIDE].mean().idxmin())
    )
