"""Zhang's Stable Top-K slides: training loss by bucket size B and steps N between two selections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, find_keys
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_ratio, final_value
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import TRAINED, setting_axis, span_grid
from experiments.figures.papers import claim

Cell = tuple[int, int]  # B and N
TITLE = "Stable Top-K by bucket size and steps between selections, beside Ok-Topk and dense"
COLUMN = "train_loss"
SIZES, PERIODS = (1, 10, 100, 500), (1, 10, 50, 200)  # B, N
COLOURS = dict(zip(SIZES, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True))
TICKS = (1, 1.5, *range(2, 11), 20, 50)
OTHERS = ("dense", "oktopk")
SHOWN = 4.0  # times the losses of those: beyond, a training diverged, and its loss may be any number
ARROW = {"linestyle": "", "marker": "^", "label": None, "markersize": 7, "zorder": 5}
MARGIN = 1.12  # of the axis, beyond what is drawn
END = style.MethodStyle("", "#777777", "", "")  # the line at SHOWN
APART = 0.06  # of N, between what the picture shows of one N
SCALE = papers.value("zhang.scale.trained")
TRAININGS: dict[str, RunSettings] = papers.item("zhang.stable-sweep")["trainings"]
DENSITY = {"smoke": 0.2, "laptop": 0.05, "paper": 0.01}
SEEDS = {"smoke": [0], "laptop": [0, 1, 2], "paper": [0, 1, 2]}


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


def keys(frames: Frames, method: str, size: int = 0, period: int = 0) -> list[str]:
    """The runs of a method; of Stable Top-K those with this B and N."""
    cell = {"method.block": size, "method.every": period} if size else {}
    return find_keys(frames, {"method.name": method, **cell})


def cells(frames: Frames) -> list[tuple[int, int]]:
    """B and N of what was trained."""
    if not (found := keys(frames, "stable_topk")):
        return []
    of_stable = frames.runs.set_index("key").loc[found]
    pairs = of_stable[["method.block", "method.every"]].astype(int).drop_duplicates()
    return sorted(map(tuple, pairs.to_numpy().tolist()))


def loss(frames: Frames, found: Sequence[str]) -> Estimate | None:
    """Geometric mean of the training loss of the last epoch; infinite ones, of trainings that diverged,
    make no mean.
    """
    return final_value(frames, found, COLUMN, geometric=True)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (pairs := cells(frames)):
        raise ValueError("nothing to draw: there is no run of Stable Top-K")
    known = {cell: value for cell in pairs if (value := loss(frames, keys(frames, "stable_topk", *cell)))}
    others = {method: value for method in OTHERS if (value := loss(frames, keys(frames, method)))}
    end = SHOWN * max((value.value for value in others.values()), default=math.inf)
    least = min(value.value for value in (*known.values(), *others.values()))
    sizes, periods = (sorted(set(each)) for each in zip(*pairs, strict=True))
    lines: list[plots.Curve] = []
    for at, size in enumerate(sizes):
        aside = 1 + APART * (at - (len(sizes) - 1) / 2)
        found = {period * aside: known[size, period] for period in periods if (size, period) in known}
        look = style.MethodStyle(f"B = {size:,}", COLOURS.get(size, "#555555"), "o", "")
        beyond = [x for x, value in found.items() if value.value > end]
        lines.append(plots.Curve(look, list(found), [_drawn(value, least, end) for value in found.values()]))
        lines.append(plots.Curve(look, beyond, [end] * len(beyond), ARROW))
    for method, value in others.items():
        lines.append(plots.Curve(style.method_style(method), None, value))
    limits: dict[str, Any] = {}
    if math.isfinite(end):
        lines.append(plots.Curve(END, None, Estimate(end), plots.PUBLISHED_LINE))
        limits["ylim"] = (least / MARGIN, end * MARGIN)
    panel = plots.curves_panel(
        lines, log=TICKS, grid=None, xlabel="N, steps between two selections",
        ylabel="Training loss, last epoch", xscale="log", xticks=periods, xticklabels=periods, **limits,
    )  # fmt: skip
    return plots.compose_figure([panel], 2.9, loc="outside right center", ncols=1)


def _drawn(value: Estimate, least: float, end: float) -> Estimate:
    """The value at most at the end; its interval within what is drawn, and none of what lies beyond."""
    if value.value > end:
        return Estimate(end)
    if value.low is None or value.high is None:
        return value
    return value._replace(low=max(value.low, least / MARGIN), high=min(value.high, end))


def table(frames: Frames) -> Table:
    rows: list[dict[str, object]] = [
        {
            "method": style.method_style(method).label,
            "B": None,
            "N": None,
            "training loss": loss(frames, found),
        }
        for method in OTHERS
        for found in [keys(frames, method)]
    ]
    rows += [
        {"method": "Stable Top-K", "B": size, "N": period, "training loss": loss(frames, found)}
        for size, period in cells(frames)
        if (found := keys(frames, "stable_topk", size, period))
    ]
    return Table.from_rows("Training loss in the last epoch", rows)


def caption(frames: Frames, profile: str) -> str:
    own = {"density": format_number(DENSITY[profile]), "shown": format_number(SHOWN)}
    return captions.fill_caption(papers.words("zhang.stable-sweep"), frames, own)


def claims() -> list[Claim]:
    """Each is of one loss over another, the first of which the text names; over the whole sweep."""
    at_sizes = [((SIZES[0], period), (size, period)) for period in PERIODS for size in SIZES[1:]]
    at_periods = [((size, PERIODS[-1]), (size, period)) for size in SIZES for period in PERIODS[:-1]]
    return [
        claim("zhang.small-buckets", over_cells, at_sizes),
        claim("zhang.selecting-seldom", over_cells, at_periods),
        claim("zhang.lower-loss-than-oktopk", over_best, "oktopk"),
        claim("zhang.nearly-baseline", best_over, "dense"),
        claim("zhang.oktopk-hurts", _hurts, label="small CNN", quantity="_hurts"),
    ]


def by_seed(frames: Frames, found: Sequence[str]) -> dict[int, float]:
    """The training loss of the last epoch of each run; infinite of what has no number any more."""
    if not found:
        return {}
    seeds = frames.runs.set_index("key")["seed"]
    ends = {int(seeds[key]): final_value(frames, [key], COLUMN) for key in found}
    return {
        seed: math.inf if math.isnan(value.value) else value.value for seed, value in ends.items() if value
    }


def counted(frames: Frames) -> dict[Cell, dict[int, float]]:
    """The loss by which each cell's trainings count, by seed: at most `SHOWN` times that of the others."""
    others = [by_seed(frames, keys(frames, method)) for method in OTHERS]
    ends = {
        seed: SHOWN * max(of_seed)
        for seed in set.intersection(*map(set, others))
        if math.isfinite(max(of_seed := [each[seed] for each in others]))
    }
    losses = {cell: by_seed(frames, keys(frames, "stable_topk", *cell)) for cell in cells(frames)}
    return {
        cell: {seed: min(loss, ends[seed]) for seed, loss in of_cell.items() if seed in ends}
        for cell, of_cell in losses.items()
    }


def over_cells(frames: Frames, pairs: Sequence[tuple[Cell, Cell]]) -> Estimate | None:
    """The loss in one cell of each pair over that in the other: the geometric mean over pairs, by seed."""
    found = counted(frames)
    trained = [(found[one], found[other]) for one, other in pairs if {one, other} <= set(found)]
    if not trained:
        return None
    seeds = sorted(set.intersection(*(set(each) for pair in trained for each in pair)))
    means = [fmean(math.log(one[seed] / other[seed]) for one, other in trained) for seed in seeds]
    return estimate_mean([math.exp(mean) for mean in means], POSITIVE) if seeds else None


def best(frames: Frames) -> dict[int, float]:
    """The loss of each seed in the cell that trains best with the other seeds."""
    found = counted(frames)
    seeds = sorted(set.intersection(*map(set, found.values()))) if found else []
    losses = {}
    for seed in seeds:
        choosing = [each for each in seeds if each != seed] or seeds
        chosen = min(found, key=lambda cell: sum(math.log(found[cell][each]) for each in choosing))
        losses[seed] = found[chosen][seed]
    return losses


def best_over(frames: Frames, other: str) -> Estimate | None:
    """Loss of Stable Top-K at its best over that of another method."""
    theirs = by_seed(frames, keys(frames, other))
    ratios = [loss / theirs[seed] for seed, loss in best(frames).items() if seed in theirs]
    return estimate_mean(ratios, POSITIVE) if ratios else None


def over_best(frames: Frames, other: str) -> Estimate | None:
    """Loss of another method over that of Stable Top-K at its best."""
    theirs = by_seed(frames, keys(frames, other))
    ratios = [theirs[seed] / loss for seed, loss in best(frames).items() if seed in theirs]
    return estimate_mean(ratios, POSITIVE) if ratios else None


def _hurts(frames: Frames) -> Estimate | None:
    return final_ratio(frames, keys(frames, "oktopk"), keys(frames, "dense"), COLUMN)
