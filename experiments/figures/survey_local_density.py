"""Which share of the drift SparseLoCo should send: loss of a small language model by density.

Not a figure of a paper; the claims are SparseLoCo's, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import Value, curve, final, final_difference, over_units
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _local, papers
from experiments.figures._local import COLUMN, MORE_SEEDS, SEEDS
from experiments.figures.papers import claim

TITLE = "Which share of the drift to send: loss of a small language model by density"
SCALE = _local.SCALE
_DATA = papers.item("survey.local-density")
DENSITIES: Mapping[str, list[float]] = _DATA["densities"]
INSIDE: list[float] = _DATA["inside"]  # what is said to be best
DILOCO: RunSettings = {"method": "diloco"}


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[Run]:
    differ = [DILOCO, *({"method.density": density} for density in DENSITIES[profile])]
    return _local.trainings(profile, differ, seeds)


def keys(frames: Frames, density: float) -> list[str]:
    return _local.keys(frames, {"method.density": density})


def by_density(frames: Frames) -> dict[float, list[str]]:
    """The runs of each density, from the least on."""
    return {density: own for density in DENSITIES["paper"] if (own := keys(frames, density))}


def draw(frames: Frames, profile: str) -> plots.Figure:
    found, dense = by_density(frames), _local.keys(frames, DILOCO)
    if not found:
        raise ValueError(plots.EMPTY)
    sparse = style.look("topk")._replace(label="SparseLoCo, 2 bits")
    ends = [final(frames, own, COLUMN) for own in found.values()]
    lines = [plots.Curve(sparse, list(found), ends)]
    along = [
        plots.Curve(sparse._replace(label=f"density {number(density)}"), at["step"], at, {"alpha": shade})
        for shade, (density, own) in zip(np.linspace(0.3, 1, len(found)), found.items(), strict=True)
        if len(at := curve(frames, own, COLUMN))
    ]
    if dense:
        look = style.look("dense")._replace(label="DiLoCo, all of it in fp32")
        level = final(frames, dense, COLUMN)
        lines.append(plots.Curve(look, [min(found), max(found)], [level, level]))
        at = curve(frames, dense, COLUMN)
        along.append(plots.Curve(look._replace(label=""), at["step"], at))
    return plots.picture(
        [
            plots.layered(
                plots.shade("x", min(INSIDE), max(INSIDE)),
                plots.curves(lines, xscale="log", xlabel="Density of what is sent"),
            ),
            plots.curves(along, xlabel="Optimiser steps", xlim=(0, None)),
        ],
        3.2, ylabel="Validation loss (nats a character)", ncols=4,
    )  # fmt: skip


def table(frames: Frames) -> Table:
    """Loss at the end, by density."""
    frames = _local.told(frames)
    dense = _local.keys(frames, DILOCO)
    shown = [(number(density), own) for density, own in by_density(frames).items()]
    rows = [
        {
            "density": density, **_local.loss(frames, own),
            "above DiLoCo": _above(frames, own, dense) if own is not dense else None,
            "in a round": _local.round_kb(frames, own), "seeds": len(own),
        }
        for density, own in [*shown, *([("1 (DiLoCo)", dense)] if dense else [])]
    ]  # fmt: skip
    units = {"loss": "nats", "above DiLoCo": "nats", "in a round": "kB"}
    return Table.of("At the end of the trainings", rows, units, papers.words("survey.local-density.note"))


def facts(frames: Frames) -> dict[str, object]:
    inside = f"{number(100 * min(INSIDE))} to {number(100 * max(INSIDE))} %"
    return {**_local.facts(frames), "inside": inside}


def claims() -> list[Claim]:
    return [
        claim("survey.local-density.optimum", worse_outside),
        claim("survey.local-density.below-diloco", below_diloco),
    ]


def _above(frames: Frames, own: list[str], other: list[str]) -> Value | None:
    return final_difference(frames, own, other, COLUMN) if own and other else None


def worse_outside(frames: Frames) -> Value | None:
    """The least loss at the end of the densities outside, less the least of those inside; by seed."""
    ends = _ends(frames)
    if ends is None:
        return None
    inside = [density in INSIDE for density in ends]
    outside = [not is_in for is_in in inside]
    return over_units((ends.loc[:, outside].min(axis=1) - ends.loc[:, inside].min(axis=1)).to_numpy())


def _ends(frames: Frames) -> pd.DataFrame | None:
    """Loss at the end, a row for each seed and a column for each density; None where one did not run."""
    found = by_density(frames)
    if len(found) < len(DENSITIES["paper"]):
        return None
    seed = frames.runs.set_index("key")["seed"]
    last = frames.epochs.sort_values("epoch").groupby("key")[COLUMN].last()
    ends = pd.DataFrame({density: last[own].rename(index=seed) for density, own in found.items()})
    whole: pd.DataFrame = ends.dropna()
    return whole


def below_diloco(frames: Frames) -> Value | None:
    """DiLoCo's loss at the end less the least of SparseLoCo's at the densities that are said to be best."""
    ends, dense = _ends(frames), _local.keys(frames, DILOCO)
    if ends is None or not dense:
        return None
    best = min(INSIDE, key=lambda density: float(ends[density].mean()))
    return final_difference(frames, dense, keys(frames, best), COLUMN)
