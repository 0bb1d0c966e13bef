"""Zhang's Stable Top-K slides: training loss by bucket size B and steps N between two selections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames, keys_of
from analysis.stats import Value, final, final_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import TRAINED, crossed, each
from experiments.figures.papers import claim

TITLE = "Stable Top-K by bucket size and steps between selections, beside Ok-Topk and dense"
COLUMN = "train_loss"
SIZES, PERIODS = (1, 10, 100, 500), (1, 10, 50, 200)  # B, N
SMALL, USUAL, SELDOM = SIZES[0], SIZES[2], PERIODS[-1]
SOON, OFTEN = PERIODS[1:3]
COLOURS = dict(zip(SIZES, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True))
TICKS = (1, 1.5, *range(2, 11), 20, 50)
OTHERS = ("dense", "oktopk")
SHOWN = 4.0  # times the losses of those: beyond, a training diverged, and its loss may be any number
ARROW = {"linestyle": "", "marker": "^", "label": None, "clip_on": False, "zorder": 5}
APART = 0.06  # of N, between what the picture shows of one N
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
    return crossed(shared, each("seed", SEEDS[profile]), methods)


def keys(frames: Frames, method: str, size: int = 0, period: int = 0) -> list[str]:
    """The runs of a method; of Stable Top-K those with this B and N."""
    cell = {"method.block": size, "method.every": period} if size else {}
    return keys_of(frames, {"method.name": method, **cell})


def cells(frames: Frames) -> list[tuple[int, int]]:
    """B and N of what was trained."""
    if not (found := keys(frames, "stable_topk")):
        return []
    of_stable = frames.runs.set_index("key").loc[found]
    pairs = of_stable[["method.block", "method.every"]].astype(int).drop_duplicates()
    return sorted(map(tuple, pairs.to_numpy().tolist()))


def loss(frames: Frames, found: Sequence[str]) -> Value | None:
    """Geometric mean of the training loss of the last epoch; infinite ones, of trainings that diverged,
    make no mean.
    """
    return final(frames, found, COLUMN, geometric=True)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (pairs := cells(frames)):
        raise ValueError("nothing to draw: there is no run of Stable Top-K")
    known = {cell: value for cell in pairs if (value := loss(frames, keys(frames, "stable_topk", *cell)))}
    others = {method: value for method in OTHERS if (value := loss(frames, keys(frames, method)))}
    end = SHOWN * max((value.value for value in others.values()), default=math.inf)
    sizes, periods = (sorted(set(each)) for each in zip(*pairs, strict=True))
    lines: list[plots.Curve] = []
    for at, size in enumerate(sizes):
        aside = 1 + APART * (at - (len(sizes) - 1) / 2)
        found = {period * aside: known[size, period] for period in periods if (size, period) in known}
        look = style.Look(f"B = {size:,}", COLOURS.get(size, "#555555"), "o", "")
        beyond = [x for x, value in found.items() if value.value > end]
        lines.append(plots.Curve(look, list(found), list(found.values())))
        lines.append(plots.Curve(look, beyond, [end] * len(beyond), ARROW))
    for method, value in others.items():
        lines.append(plots.Curve(style.look(method), None, value))
    limits: dict[str, Any] = {}
    if math.isfinite(end):
        limits["ylim"] = (min(value.value for value in (*known.values(), *others.values())) / 1.1, end)
    panel = plots.curves(
        lines, log=TICKS, grid=None, xlabel="N, steps between two selections",
        ylabel="Training loss, last epoch", xscale="log", xticks=periods, xticklabels=periods, **limits,
    )  # fmt: skip
    return plots.picture([panel], 2.9, loc="outside right center", ncols=1)


def table(frames: Frames) -> Table:
    rows: list[dict[str, object]] = [
        {"method": style.look(method).label, "B": None, "N": None, "training loss": loss(frames, found)}
        for method in OTHERS
        for found in [keys(frames, method)]
    ]
    rows += [
        {"method": "Stable Top-K", "B": size, "N": period, "training loss": loss(frames, found)}
        for size, period in cells(frames)
        if (found := keys(frames, "stable_topk", size, period))
    ]
    return Table.of("Training loss in the last epoch", rows)


def caption(frames: Frames, profile: str) -> str:
    own = {"density": number(DENSITY[profile]), "shown": number(SHOWN)}
    return captions.filled(papers.words("zhang.stable-sweep"), frames, own)


def claims() -> list[Claim]:
    """Each is of one loss over another: the worse one over the better one, or theirs over ours."""
    single, usual, seldom, best = (
        ("stable_topk", *cell) for cell in ((SMALL, OFTEN), (USUAL, OFTEN), (USUAL, SELDOM), (USUAL, SOON))
    )
    return [
        claim("zhang.small-buckets", _ratio, single, usual),
        claim("zhang.selecting-seldom", _ratio, seldom, best),
        claim("zhang.lower-loss-than-oktopk", _ratio, ("oktopk",), best),
    ]


def _ratio(frames: Frames, here: tuple[Any, ...], there: tuple[Any, ...]) -> Value | None:
    return final_ratio(frames, keys(frames, *here), keys(frames, *there), COLUMN)
