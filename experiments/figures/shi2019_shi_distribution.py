"""Shi et al. 2019: how what Top-k selects from, gradient plus residual, is distributed during training."""

from __future__ import annotations

from functools import partial
from math import erf, sqrt
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.records.schema import ALL
from analysis.stats import PERCENT
from analysis.tables import Table
from experiments.figures import _selection_looks as looks
from experiments.figures.papers import make_claim, make_claims_by_case, published_value

TITLE = "What Top-k selects from: gradients plus residuals, from the first step to the last"
SCALE = published_value("shi2019.scale.training")
SHADES = ("#BBBBBB", "#88CCEE", "#4477AA", "#332288")  # from the first step to the last
NORMAL = style.MethodStyle("normal", "black", "", "")
TENSOR = style.MethodStyle("each tensor, last step", "#999999", "", "")
EDGES = (0.2, 0.4, 0.6, 0.8, 1.0)  # RMS: each of them is near zero
LARGE = 10_000  # elements: below, the counts in a histogram are too few to tell a rise from chance
FLOOR = 1e-4  # of the drawn densities
runs = looks.training_runs_with_looks


def draw(frames: Frames, profile: str) -> plots.Figure:
    firsts = {model: looks.select_first_run(runs) for model, runs in looks.frames_by_model(frames).items()}
    over_all = [_panel(_step_curves(run), title=model) for model, run in firsts.items()]
    by_tensor = [_panel(_tensor_curves(run)) for run in firsts.values()]
    labels = ("Density, all tensors", "Density, tensor by tensor")
    return plots.compose_figure(
        [*over_all, *by_tensor], 4.2, num_rows=2, ylabel=labels, legend_columns=6, sharey=True
    )


def _step_curves(run: Frames) -> list[plots.Curve]:
    """Return the whole model's densities at some steps."""
    table = looks.select_looks(run, "histogram", ALL)
    steps = looks.select_evenly_spaced(list(table["step"]))
    by_step = {step: table[table["step"] == step] for step in steps}
    return [
        plots.Curve(
            style.MethodStyle(f"step {step + 1}", colour, "", ""),
            by_step[step]["x"],
            _clip_density(by_step[step]),
        )
        for colour, step in zip(SHADES, steps, strict=False)
    ]


def _tensor_curves(run: Frames) -> list[plots.Curve]:
    return [
        plots.Curve(TENSOR, histogram["x"], _clip_density(histogram), {"linewidth": 0.5})
        for histogram in last_histogram_by_tensor(run).values()
    ]


def _clip_density(density: pd.DataFrame) -> pd.Series[float]:
    return density["value"].clip(lower=FLOOR / 2)


def _panel(lines: list[plots.Curve], **words: Any) -> plots.Panel:
    x = np.linspace(-6, 6, 241)
    normal = plots.Curve(NORMAL, x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), {"linestyle": ":"})
    words |= {"yscale": "log", "ylim": (FLOOR, 20), "xlabel": "Value / RMS"}
    return plots.curves_panel([*lines, normal], grid=None, **words)


def last_histogram_by_tensor(run: Frames) -> dict[str, pd.DataFrame]:
    """Return the last histogram of each tensor, the whole model's apart."""
    histograms = looks.select_looks(run, "histogram")
    last = histograms[histograms["of"].ne(ALL) & histograms["step"].eq(histograms["step"].max())]
    return {str(name): histogram for name, histogram in last.groupby("of")}


def table(frames: Frames) -> Table:
    measures: looks.Measures = {
        "rise, all tensors": (mean_rise_beyond_peak_percent, PERCENT),
        "rise, worst tensor": (worst_tensor_rise_beyond_peak_percent, PERCENT),
        **{
            f"within {edge} RMS": (partial(mean_percent_within_rms, edge_rms=edge), PERCENT) for edge in EDGES
        },
    }
    units = dict.fromkeys(measures, "%") | {name: "% of the peak" for name in measures if "rise" in name}
    normal = captions.join_with_and(
        format_number(round(share, 1)) for share in map(normal_percent_within_deviations, EDGES)
    )
    note = f"Of a normal distribution {normal} % lie so near."
    return Table.from_rows(
        "How the values lie, mean over steps", looks.rows_of_means_by_model(frames, measures), units, note
    )


def mean_rise_beyond_peak_percent(run: Frames, tensor: str = ALL) -> float:
    """Return the most by which the density rises again on the way from its peak outwards.

    In percent of the peak: 0 of a bell. The mean over steps.
    """
    table = looks.select_looks(run, "histogram", tensor).sort_values(["step", "x"])
    return float(
        np.mean(
            [100 * _outward_rise(histogram["value"].to_numpy()) for _, histogram in table.groupby("step")]
        )
    )


def worst_tensor_rise_beyond_peak_percent(run: Frames) -> float:
    """Return the rise of the tensor that is least like a bell, of those that are large."""
    sizes = looks.select_looks(run, "size").drop_duplicates("of").set_index("of")["value"]
    large = [str(name) for name in sizes.index[sizes >= LARGE] if name != ALL]
    return max((mean_rise_beyond_peak_percent(run, name) for name in large), default=float("nan"))


def _outward_rise(density: np.ndarray) -> float:
    peak = int(density.argmax())
    sides = (density[peak:], density[peak::-1])
    rises = [float((side - np.minimum.accumulate(side)).max()) for side in sides]
    return max(rises) / float(density.max())


def mean_percent_within_rms(run: Frames, edge_rms: float) -> float:
    """Return the percent of values no further from 0 than `edge_rms` times their RMS, the mean over steps."""
    table = looks.select_looks(run, "histogram", ALL)
    width = float(np.diff(np.unique(table["x"]))[0])
    inside = table[table["x"].abs() < edge_rms]
    return 100 * width * float(inside.groupby("step")["value"].sum().mean())


def normal_percent_within_deviations(deviations: float) -> float:
    """Return the percent of a normal distribution within this number of standard deviations."""
    return 100 * erf(deviations / sqrt(2))


def least_points_near_zero_above_normal(run: Frames) -> float:
    """Return the least of points by which more values are near zero than of a normal distribution."""
    return min(mean_percent_within_rms(run, edge) - normal_percent_within_deviations(edge) for edge in EDGES)


def claims() -> list[Claim]:
    return [
        *make_claims_by_case(
            "shi2019.bell",
            looks.mean_over_task_runs,
            looks.MODELS,
            worst_tensor_rise_beyond_peak_percent,
            PERCENT,
        ),
        *(
            make_claim(
                "zhang.near-zero",
                looks.mean_over_task_runs,
                task,
                least_points_near_zero_above_normal,
                (-100.0, 100.0),
                case=task,
                label=label,
                answers=("zhang.26", *looks.MORE_ANSWERS.get(task, ())),
            )
            for task, label in looks.MODELS.items()
        ),
    ]
