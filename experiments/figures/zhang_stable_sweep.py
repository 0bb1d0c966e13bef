"""Zhang's Stable Top-K slides: training loss by bucket size B and steps N between two selections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import Value, final, final_ratio
from analysis.tables import Table

TITLE = "Stable Top-K by bucket size and steps between selections, beside Ok-Topk and dense"
COLUMN = "train_loss"
SIZES, PERIODS = (1, 10, 100, 500), (1, 10, 50, 200)  # B, N
SMALL, USUAL, SELDOM = SIZES[0], SIZES[2], PERIODS[-1]
SOON = PERIODS[1]
COLOURS = dict(zip(SIZES, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True))
OTHERS = {"dense": "dense", "oktopk": "Ok-Topk"}
SHOWN = 4.0  # times the losses of those: beyond, a training diverged, and its loss may be any number
APART = 0.06  # of N, between what the picture shows of one N
SHARED = ["recipe=none", "cluster=virtual", "timing.mode=production", "data.fallback=refuse"]
# k is 1,700 of 34,058 elements, so that three of the largest buckets fit.
TRAININGS = {
    "smoke": [
        "task=cnn_digits", "workers=2", "task.batch_size=16", "train.epoch_steps=20", "train.epochs=2",
        "task.lr=0.01",
    ],
    "laptop": [
        "task=cnn_cifar10", "workers=4", "task.batch_size=16", "train.epoch_steps=200", "train.epochs=5",
        "task.lr=0.02", "task.lr_warmup_epochs=0", "task.lr_milestones=[]",
    ],
}  # fmt: skip
TRAININGS["paper"] = [
    "task=berttiny_ptb64", "workers=8", "task.batch_size=16", "train.epoch_steps=500", "train.epochs=20",
]  # fmt: skip
DENSITY = {"smoke": 0.2, "laptop": 0.05, "paper": 0.01}
SEEDS = {"smoke": [0], "laptop": [0, 1, 2], "paper": [0, 1, 2]}


def runs(profile: str) -> list[list[str]]:
    shared = [f"profile={profile}", *SHARED, *TRAININGS[profile]]
    density = f"method.density={DENSITY[profile]}"
    sizes, periods = (SIZES, PERIODS) if profile != "smoke" else (SIZES[1:3], PERIODS[1:3])
    methods = [
        ["method=dense"],
        ["method=oktopk", density],
        *(
            ["method=stable_topk", density, f"method.block={size}", f"method.every={period}"]
            for size in sizes
            for period in periods
        ),
    ]
    return [[*shared, *words, f"seed={seed}"] for seed in SEEDS[profile] for words in methods]


def keys(frames: Frames, method: str, size: int = 0, period: int = 0) -> list[str]:
    """The runs of a method; of Stable Top-K those with this B and N."""
    runs = frames.runs
    if not len(runs):
        return []
    chosen = runs["method.name"].eq(method)
    if size:
        chosen &= runs["method.block"].eq(size) & runs["method.every"].eq(period)
    return list(runs["key"][chosen])


def cells(frames: Frames) -> list[tuple[int, int]]:
    """B and N of what was trained."""
    of_stable = frames.runs[frames.runs["method.name"] == "stable_topk"]
    pairs = of_stable[["method.block", "method.every"]].astype(int).drop_duplicates()
    return sorted(map(tuple, pairs.to_numpy().tolist()))


def loss(frames: Frames, found: Sequence[str]) -> Value | None:
    """Geometric mean of the training loss of the last epoch; infinite ones, of trainings that diverged,
    make no mean.
    """
    return final(frames, found, COLUMN, geometric=True)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs) or not cells(frames):
        raise ValueError("nothing to draw: there is no run of Stable Top-K")
    with plots.canvas(style.two_columns(2.9), 1, 1) as (figure, axes):
        pairs = cells(frames)
        known = {cell: value for cell in pairs if (value := loss(frames, keys(frames, "stable_topk", *cell)))}
        others = {method: value for method in OTHERS if (value := loss(frames, keys(frames, method)))}
        end = SHOWN * max((value.value for value in others.values()), default=math.inf)
        sizes, periods = (sorted(set(each)) for each in zip(*pairs, strict=True))
        for at, size in enumerate(sizes):
            aside = 1 + APART * (at - (len(sizes) - 1) / 2)
            found = {period * aside: known[size, period] for period in periods if (size, period) in known}
            look = style.Look(f"B = {size:,}", COLOURS.get(size, "#555555"), "o", "")
            plots.points(axes, list(found), list(found.values()), look)
            beyond = [x for x, value in found.items() if value.value > end]
            axes.plot(beyond, [end] * len(beyond), "^", color=look.colour, clip_on=False, zorder=5)
        for method, value in others.items():
            plots.across(axes, value, style.look(method)._replace(label=OTHERS[method]))
        plots.log_ticks(axes, (1, 1.5, *range(2, 11), 20, 50))
        if math.isfinite(end):
            lowest = min(value.value for value in (*known.values(), *others.values()))
            axes.set_ylim(lowest / 1.1, end)
        axes.set(xscale="log", xlabel="N, steps between two selections", ylabel="Training loss, last epoch")
        axes.set_xticks(periods, [str(period) for period in periods])
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
    return figure


def table(frames: Frames) -> Table:
    rows: list[dict[str, object]] = [
        {"method": label, "B": None, "N": None, "training loss": loss(frames, keys(frames, method))}
        for method, label in OTHERS.items()
    ]
    rows += [
        {"method": "Stable Top-K", "B": size, "N": period, "training loss": loss(frames, found)}
        for size, period in cells(frames)
        if (found := keys(frames, "stable_topk", size, period))
    ]
    return Table("Training loss in the last epoch", pd.DataFrame(rows))


def caption(frames: Frames, profile: str) -> str:
    return (
        "Training loss of the last epoch with Stable Top-K (geometric mean), by bucket size and steps "
        "between two selections, "
        f"with Ok-Topk at the same density ({number(DENSITY[profile])}) and with dense training. "
        f"Arrows: more than {number(SHOWN)} times the loss of those two; what diverged ends anywhere. "
        f"{captions.setting(frames)} {captions.training(frames)}"
    )


def claims() -> list[Claim]:
    return [
        _claim(
            "small buckets train worse: loss with single elements over that with buckets of 100",
            "diverges where buckets are too small",
            "slide on bucket size",
            lambda frames: _cells_ratio(frames, (SMALL, PERIODS[2]), (USUAL, PERIODS[2])),
            f"Both with {PERIODS[2]} steps between selections.",
        ),
        _claim(
            f"selecting seldom trains worse: loss with {SELDOM} steps between selections over that "
            f"with {SOON}",
            "stable regions decay where selections are too rare",
            "slide on sampling frequency",
            lambda frames: _cells_ratio(frames, (USUAL, SELDOM), (USUAL, SOON)),
            f"Both with buckets of {USUAL}.",
        ),
        _claim(
            f"Stable Top-K (B = {USUAL}, N = {SOON}) trains to a lower loss than Ok-Topk: theirs over its",
            "maintains a lower training loss",
            "slide on throughput",
            lambda frames: _ratio(frames, keys(frames, "oktopk"), keys(frames, "stable_topk", USUAL, SOON)),
            "The same density; theirs are BERT-Large and MAE.",
        ),
    ]


def _cells_ratio(frames: Frames, worse: tuple[int, int], better: tuple[int, int]) -> Value | None:
    return _ratio(frames, *(keys(frames, "stable_topk", *cell) for cell in (worse, better)))


def _ratio(frames: Frames, here: list[str], there: list[str]) -> Value | None:
    return final_ratio(frames, here, there, COLUMN) if here and there else None


def _claim(text: str, paper: str, source: str, ours: Callable[[Frames], Value | None], reason: str) -> Claim:
    return Claim(
        text=text, paper=paper, unit="x", source=source, kind="ordering", tolerance=1.0,
        reason=f"More than once is worse. {reason}", ours=ours,
    )  # fmt: skip
