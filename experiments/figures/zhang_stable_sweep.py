"""Zhang's Stable Top-K slides: training loss by bucket size B and steps N between two selections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, find_run_keys, value_of_run
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_mean, final_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import TRAINED, setting_axis, span_grid
from experiments.figures.papers import make_claim

Cell = tuple[int, int]  # B and N
TITLE = "Stable Top-K by bucket size and steps between selections, beside Ok-Topk and dense"
COLUMN = "train_loss"
SIZES, PERIODS = (1, 10, 100, 500), (1, 10, 50, 200)  # B, N
COLOURS = dict(zip(SIZES, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True))
TICKS = (1, 1.5, *range(2, 11), 20, 50)
STABLE = "stable_topk"
OTHERS = ("dense", "oktopk")
SHOWN = 4.0  # times the losses of those: beyond, a training diverged, and its loss may be any number
ARROW = {"linestyle": "", "marker": "^", "label": None, "markersize": 7, "zorder": 5}
MARGIN = 1.12  # of the axis, beyond what is drawn
END = style.MethodStyle("", "#777777", "", "")  # the line at SHOWN
APART = 0.06  # of N, between what the picture shows of one N
SCALE = papers.published_value("zhang.scale.trained")
TRAININGS: dict[str, RunSettings] = papers.item_settings("zhang.stable-sweep")["trainings"]
DENSITY = {"smoke": 0.2, "laptop": 0.05, "paper": 0.01}
# On a laptop seeds that nobody had seen when the claims' rules were written.
SEEDS = {"smoke": [0], "laptop": [5, 6, 7, 8, 9], "paper": [0, 1, 2]}


def runs(profile: str) -> list[Run]:
    shared = {**TRAINED, "profile": profile, **TRAININGS[profile]}
    density = {"method.density": DENSITY[profile]}
    sizes, periods = (SIZES, PERIODS) if profile != "smoke" else (SIZES[1:3], PERIODS[1:3])
    methods: list[RunSettings] = [
        {"method": "dense"},
        {"method": "oktopk", **density},
        *(
            {"method": "stable_topk", **density, "method.block": size, "method.every": period}
            for size in sizes
            for period in periods
        ),
    ]
    return span_grid(shared, setting_axis("seed", SEEDS[profile]), methods)


def training_run_keys(frames: Frames, method: str, block: int = 0, every: int = 0) -> list[str]:
    """Return the runs of a method; of Stable Top-K those with this B and N."""
    cell = {"method.block": block, "method.every": every} if block else {}
    return find_run_keys(frames, {"method.name": method, **cell})


def trained_cells(frames: Frames) -> list[Cell]:
    """Return B and N of what was trained."""
    keys = training_run_keys(frames, STABLE)
    if not keys:
        return []
    runs = frames.runs[frames.runs["key"].isin(keys)]
    return sorted(set(zip(runs["method.block"].astype(int), runs["method.every"].astype(int), strict=True)))


def geometric_mean_final_loss(frames: Frames, method: str, *cell: int) -> Estimate | None:
    """Return the geometric mean of the training loss of the last epoch.

    Infinite losses, of trainings that diverged, make no mean.
    """
    return final_mean(frames, training_run_keys(frames, method, *cell), COLUMN, is_geometric=True)


def draw(frames: Frames, profile: str) -> plots.Figure:
    cells = trained_cells(frames)
    if not cells:
        raise ValueError("nothing to draw: there is no run of Stable Top-K")
    means = {cell: mean for cell in cells if (mean := geometric_mean_final_loss(frames, STABLE, *cell))}
    others = {method: mean for method in OTHERS if (mean := geometric_mean_final_loss(frames, method))}
    end = SHOWN * max((mean.value for mean in others.values()), default=math.inf)
    least = min(mean.value for mean in (*means.values(), *others.values()))
    sizes, periods = (sorted(set(values)) for values in zip(*cells, strict=True))
    lines = []
    for place, size in enumerate(sizes):
        aside = 1 + APART * (place - (len(sizes) - 1) / 2)
        shown = {period * aside: mean for (block, period), mean in means.items() if block == size}
        look = style.MethodStyle(f"B = {size:,}", COLOURS.get(size, "#555555"), "o", "")
        beyond = [x for x, mean in shown.items() if mean.value > end]
        lines.append(
            plots.Curve(look, list(shown), [_clip_to_axis(mean, least, end) for mean in shown.values()])
        )
        lines.append(plots.Curve(look, beyond, [end] * len(beyond), ARROW))
    lines += [plots.Curve(style.method_style(method), None, mean) for method, mean in others.items()]
    limits: dict[str, Any] = {}
    if math.isfinite(end):
        lines.append(plots.Curve(END, None, Estimate(end), plots.PUBLISHED_LINE))
        limits["ylim"] = (least / MARGIN, end * MARGIN)
    panel = plots.curves_panel(
        lines, log_y_ticks=TICKS, grid=None, xlabel="N, steps between two selections",
        ylabel="Training loss, last epoch", xscale="log", xticks=periods, xticklabels=periods, **limits,
    )  # fmt: skip
    return plots.compose_figure([panel], 2.9, legend_loc="outside right center", legend_columns=1)


def _clip_to_axis(mean: Estimate, least: float, end: float) -> Estimate:
    """Return a mean at most at the end; its interval within what is drawn, and none of what lies beyond."""
    if mean.value > end:
        return Estimate(end)
    if mean.low is None or mean.high is None:
        return mean
    return mean._replace(low=max(mean.low, least / MARGIN), high=min(mean.high, end))


def table(frames: Frames) -> Table:
    rows: list[dict[str, object]] = [
        {
            "method": style.method_style(method).label, "B": None, "N": None,
            "training loss": geometric_mean_final_loss(frames, method),
        }
        for method in OTHERS
    ]  # fmt: skip
    rows += [
        {"method": "Stable Top-K", "B": size, "N": period,
         "training loss": geometric_mean_final_loss(frames, STABLE, size, period)}
        for size, period in trained_cells(frames)
    ]  # fmt: skip
    return Table.from_rows("Training loss in the last epoch", rows)


def caption(frames: Frames, profile: str) -> str:
    facts = {"density": format_number(DENSITY[profile]), "shown": format_number(SHOWN)}
    return captions.fill_caption(papers.text_template_or_empty("zhang.stable-sweep"), frames, facts)


def claims() -> list[Claim]:
    """Return claims on one loss over another, the first of which the text names; over the whole sweep."""
    at_sizes = [((SIZES[0], period), (size, period)) for period in PERIODS for size in SIZES[1:]]
    at_periods = [((size, PERIODS[-1]), (size, period)) for size in SIZES for period in PERIODS[:-1]]
    return [
        make_claim("zhang.small-buckets", mean_loss_ratio_of_cells, at_sizes),
        make_claim("zhang.selecting-seldom", mean_loss_ratio_of_cells, at_periods),
        make_claim("zhang.lower-loss-than-oktopk", loss_over_best_stable, "oktopk"),
        make_claim("zhang.nearly-baseline", best_stable_loss_over, "dense"),
        make_claim("zhang.oktopk-hurts", oktopk_loss_over_dense, label="small CNN", quantity="_hurts"),
    ]


def final_loss_or_inf_by_seed(frames: Frames, method: str, *cell: int) -> pd.Series[float]:
    """Return the training loss of the last epoch of each run; infinite where it is no number any more."""
    losses = {}
    for key in training_run_keys(frames, method, *cell):
        end = final_mean(frames, [key], COLUMN)
        if end:
            losses[int(value_of_run(frames, key, "seed"))] = end.value
    return pd.Series(losses, dtype=float).fillna(math.inf)


def capped_loss_by_seed_and_cell(frames: Frames) -> pd.DataFrame:
    """Return the loss by which each cell's trainings count: (seeds, cells).

    At most `SHOWN` times that of the other methods.
    """
    other_losses = pd.concat(
        [final_loss_or_inf_by_seed(frames, method) for method in OTHERS], axis="columns", join="inner"
    )
    limits = SHOWN * other_losses.max(axis="columns")
    limits = limits[np.isfinite(limits)]
    losses = {cell: final_loss_or_inf_by_seed(frames, STABLE, *cell) for cell in trained_cells(frames)}
    table: pd.DataFrame = pd.DataFrame(losses).reindex(limits.index)
    clipped: pd.DataFrame = table.clip(upper=limits, axis="index")
    return clipped


def mean_loss_ratio_of_cells(frames: Frames, pairs: Sequence[tuple[Cell, Cell]]) -> Estimate | None:
    """Return the loss in one cell of each pair over that in the other: geometric over pairs, by seed."""
    logs = np.log(capped_loss_by_seed_and_cell(frames))
    trained = [(cell, other) for cell, other in pairs if {cell, other} <= {*logs}]
    if not trained:
        return None
    ratios = pd.concat([logs[cell] - logs[other] for cell, other in trained], axis="columns").dropna()
    return _mean_over_seeds(np.exp(ratios.mean(axis="columns")))


def best_cell_loss_by_seed(frames: Frames) -> pd.Series[float]:
    """Return the loss of each seed in the cell that trains best with the other seeds."""
    losses = capped_loss_by_seed_and_cell(frames).dropna()
    best = dict[Any, float]()
    for seed in losses.index:
        choosing = losses.drop(index=seed) if len(losses) > 1 else losses
        best[seed] = losses.loc[seed][np.log(choosing).sum().idxmin()]
    by_seed: pd.Series[float] = pd.Series(best, dtype=float)
    return by_seed


def best_stable_loss_over(frames: Frames, other: str) -> Estimate | None:
    """Return the loss of Stable Top-K at its best over that of another method."""
    return _mean_over_seeds(best_cell_loss_by_seed(frames) / final_loss_or_inf_by_seed(frames, other))


def loss_over_best_stable(frames: Frames, other: str) -> Estimate | None:
    """Return the loss of another method over that of Stable Top-K at its best."""
    return _mean_over_seeds(final_loss_or_inf_by_seed(frames, other) / best_cell_loss_by_seed(frames))


def _mean_over_seeds(ratios: pd.Series[float]) -> Estimate | None:
    samples = ratios.dropna().to_numpy()
    return estimate_mean(samples, POSITIVE) if len(samples) else None


def oktopk_loss_over_dense(frames: Frames) -> Estimate | None:
    """Return Ok-Topk's training loss at the end over dense training's."""
    return final_ratio(
        frames, training_run_keys(frames, "oktopk"), training_run_keys(frames, "dense"), COLUMN
    )
