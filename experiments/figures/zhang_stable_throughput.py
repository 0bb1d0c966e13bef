"""Zhang's Stable Top-K slides: throughput, and time to a loss, of dense, Top-k, Ok-Topk and Stable Top-K.

The slides name neither machine nor link nor batch, nor how often buckets are chosen. So two things are looked
at: small models of the same families, trained and timed on virtual workers over a simulated link; and models
of their size, whose selecting is measured, whose exchange is simulated, and whose computing is left open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames, restrict
from analysis.numbers import number
from analysis.remembered import remembered
from analysis.stats import POSITIVE, Value, curve, of_phases, slowdown, throughput
from analysis.tables import Table
from experiments.figures import _predicted
from experiments.figures._predicted import Parts
from experiments.figures._reaching import Steps, seconds_to, sooner, steps_to
from sparsify import cost

TITLE = "Throughput and time to a loss with Stable Top-K, beside dense, Top-k and Ok-Topk"
COLUMN = "train_loss"


class Family(NamedTuple):
    """A model of the slides, and the small one that stands for it."""

    small: str
    large: str  # the slides'
    elements: int  # of the large one
    hours: Mapping[str, float]  # of its training, as published, by method


FAMILIES = {
    "berttiny_ptb64": Family(
        "BERT-Tiny, PTB", "BERT-Large", 345_000_000,
        {"dense": 84.3, "oktopk": 52.4, "stable_topk": 41.8},
    ),
    "maetiny_cifar10": Family(
        "MAE-Tiny, CIFAR-10", "MAE of ViT-Large", 329_239_296,
        {"dense": 20.3, "oktopk": 13.3, "stable_topk": 11.0},
    ),
}  # fmt: skip
LABELS = {task: family.small for task, family in FAMILIES.items()} | {"cnn_digits": "small CNN, digits"}
LOOKS = {
    "dense": style.look("dense"),
    "topk": style.look("topk"),
    "oktopk": style.look("oktopk"),
    "stable_topk": style.Look("Stable Top-K", "#E69F00", "D", "xx"),
}
DENSITY = 0.05  # of small models, at which Stable Top-K trains; with a learning rate at which it does
LARGE_DENSITY = 0.01
EVERY = 10  # N, steps between two choices; B is that of the sweep, and of models as large as theirs their own
SMALL_BLOCK, BLOCK = 100, 10_000
LINK = "ethernet_1g"  # for small models: there as long as computing, as with theirs
SHARED = ["recipe=none", "cluster=virtual", f"link={LINK}"]
_LAPTOP = ["workers=4", "train.epoch_steps=50", "train.epochs=6", "task.lr=0.02"]
_PAPER = ["workers=8", "train.epoch_steps=500", "train.epochs=20", "task.lr=0.02"]
TRAININGS = {
    "smoke": {
        "cnn_digits": [
            "workers=2", "task.batch_size=16", "train.epoch_steps=10", "train.epochs=2", "task.lr=0.01",
        ],
    },
    "laptop": {
        "berttiny_ptb64": [*_LAPTOP, "task.batch_size=4"],
        "maetiny_cifar10": [*_LAPTOP, "task.batch_size=8"],
    },
    "paper": {
        "berttiny_ptb64": [*_PAPER, "task.batch_size=16"],
        "maetiny_cifar10": [*_PAPER, "task.batch_size=32"],
    },
}  # fmt: skip
MINUTES = {"smoke": 0.02, "laptop": 1.5, "paper": 10}  # of turns, for each small model
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": list[int]()}
# What the large models' selecting is scaled from.
SELECTING = {
    "smoke": ["task.elements=200000", "cluster=local", "workers=2", "alternate.limit_min=0.02"],
    "laptop": ["task.elements=10000000", "cluster=local", "workers=2", "alternate.limit_min=2"],
    "paper": ["task.elements=100000000", "cluster=virtual", "workers=2", "alternate.limit_min=10"],
}
WORKERS = 16  # that exchange in the prediction
LINKS = {"10 Gbit/s": _predicted.ethernet(10), "100 Gbit/s": _predicted.ethernet(100)}
DASHES = dict(zip(LINKS, ("-", "--"), strict=True))
COMPUTING = np.geomspace(0.03, 30, 61)  # seconds of a step


def runs(profile: str) -> list[list[str]]:
    return [*_trainings(profile, SEEDS[profile]), *_in_turns(profile), _selecting(profile)]


def more_runs(profile: str) -> list[list[str]]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[list[str]]:
    return [
        [f"profile={profile}", *SHARED, "timing.mode=production", "data.fallback=refuse", f"task={task}",
         *words, *method.split(), f"seed={seed}"]
        for seed in seeds
        for task, words in TRAININGS[profile].items()
        for method in _methods(DENSITY, SMALL_BLOCK).values()
    ]  # fmt: skip


def _in_turns(profile: str) -> list[list[str]]:
    """The same steps, timed."""
    variants = _variants(DENSITY, SMALL_BLOCK)
    return [
        [f"profile={profile}", *SHARED, "timing.mode=serialised", "data.fallback=refuse", f"task={task}",
         *(word for word in words if word.startswith(("workers=", "task."))), "train.validate=never",
         "timing.warmup_steps=2", f"alternate.limit_min={MINUTES[profile]}", variants]
        for task, words in TRAININGS[profile].items()
    ]  # fmt: skip


def _selecting(profile: str) -> list[str]:
    block = BLOCK if profile != "smoke" else SMALL_BLOCK
    return [
        f"profile={profile}", "recipe=none", "task=vector", *SELECTING[profile], "train.validate=never",
        "timing.mode=serialised", "timing.warmup_steps=2", _variants(LARGE_DENSITY, block),
    ]  # fmt: skip


def _methods(density: float, block: int) -> dict[str, str]:
    sparse = f"method.density={density}"
    return {
        "dense": "method=dense",
        "topk": f"method=topk {sparse}",
        "oktopk": f"method=oktopk {sparse}",
        "stable_topk": f"method=stable_topk {sparse} method.block={block} method.every={EVERY}",
    }


def _variants(density: float, block: int) -> str:
    named = (f"{name}:'{words}'" for name, words in _methods(density, block).items())
    return f"variants={{{','.join(named)}}}"


# --- small models, trained and timed
# ------------------------------------------------------------------------------------


def keys(frames: Frames, task: str, method: str, validate: str) -> list[str]:
    """Of trainings (validate: `epoch`) or of what took turns (`never`)."""
    runs = frames.runs
    if not len(runs):
        return []
    mine = runs["task.name"].eq(task) & runs["method.name"].eq(method) & runs["train.validate"].eq(validate)
    return list(runs["key"][mine])


def tasks(frames: Frames) -> list[str]:
    """Those that were both trained and timed."""
    there = captions.values(frames, "task.name")
    ordered = [*(task for task in LABELS if task in there), *(task for task in there if task not in LABELS)]
    return [task for task in ordered if step_s(frames, task, "dense") and trained(frames, task)]


def trained(frames: Frames, task: str) -> dict[str, list[str]]:
    found = {method: keys(frames, task, method, "epoch") for method in LOOKS}
    return {method: own for method, own in found.items() if own}


@remembered
def step_s(frames: Frames, task: str, method: str) -> Value | None:
    """Of the slowest worker, simulated."""
    own = keys(frames, task, method, "never")
    return of_phases(frames, own, ("slowest",), lambda seconds: seconds, POSITIVE)


def level(frames: Frames, task: str) -> float:
    """The lowest mean loss of an epoch that every training reaches."""
    mine = [key for own in trained(frames, task).values() for key in own]
    epochs = frames.epochs[frames.epochs["key"].isin(mine)]
    return float(epochs.groupby("key")[COLUMN].min().max())


def reaching(frames: Frames, task: str, method: str) -> Steps:
    """Steps until a mean loss of an epoch is down to `level`, by seed."""
    own = trained(frames, task).get(method, [])
    return steps_to(frames, own, COLUMN, level(frames, task), falls=True) if own else {}


def times_as_soon(frames: Frames, task: str, method: str, other: str) -> Value | None:
    """The other's time to the common loss over this one's, paired by seed."""
    mine, theirs = step_s(frames, task, method), step_s(frames, task, other)
    if mine is None or theirs is None:
        return None
    slow, fast = (reaching(frames, task, each) for each in (other, method))
    return sooner(slow, fast, Value(theirs.value / mine.value))


# --- models as large as theirs, predicted
# ------------------------------------------------------------------------------------


@remembered
def added(frames: Frames, elements: int) -> dict[str, Parts]:
    """By method: what was measured without a network, selecting scaled to so many elements."""
    vectors = [*frames.runs["key"][frames.runs["task.name"].eq("vector")]] if len(frames.runs) else []
    found = restrict(frames, vectors)
    parts = {method: _predicted.measured(found, method, elements) for method in LOOKS if vectors}
    return {method: own for method, own in parts.items() if own is not None}


def added_s(parts: Mapping[str, Parts], method: str, elements: int, link: cost.Link) -> float:
    """What a method adds to computing: selecting and exchanging."""
    exchange = _predicted.exchange_s(method, elements, LARGE_DENSITY, WORKERS, link)
    return parts[method].select_s + exchange


def speedup(
    parts: Mapping[str, Parts], method: str, elements: int, link: cost.Link, compute_s: np.ndarray
) -> np.ndarray:
    """(computing,) a dense step over one of this method, by the time that both compute."""
    dense, own = (added_s(parts, each, elements, link) for each in ("dense", method))
    ratios: np.ndarray = (compute_s + dense) / (compute_s + own)
    return ratios


def computing_for(ratio: float, dense_s: float, own_s: float) -> float | None:
    """Seconds of computing at which the speed-up is this ratio; None where no computing gives it."""
    seconds = (dense_s - ratio * own_s) / (ratio - 1)
    return seconds if seconds > 0 else None


# --- what is shown
# ------------------------------------------------------------------------------------


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = tasks(frames)
    if not found:
        raise ValueError("nothing to draw: there is no training whose step was timed as well")
    with plots.canvas(style.two_columns(2.9), 1, 2 + len(found)) as (figure, (gains, *curves, predicted)):
        _draw_gains(gains, frames, found)
        for axes, task in zip(curves, found, strict=True):
            _draw_curves(axes, frames, task)
        _draw_predicted(predicted, frames)
        handles = plots.dot_keys({look.label: (look.marker, look.colour) for look in LOOKS.values()})
        figure.legend(handles=handles, loc="outside lower center", ncols=len(LOOKS))
    return figure


def _draw_gains(axes: plots.Axes, frames: Frames, found: list[str]) -> None:
    sparse = [method for method in LOOKS if method != "dense"]
    for group, task in enumerate(found):
        for place, method in enumerate(sparse):
            x, value = group + 0.27 * (place - 1), times_as_soon(frames, task, method, "dense")
            if value is not None and np.isfinite(value.value):
                plots.points(axes, [x], [value], LOOKS[method])
            if (family := FAMILIES.get(task)) and (published := _published(family, method)):
                plots.published_points(axes, x + 0.1, [published], LOOKS[method])
    axes.axhline(1, color="#777777", linewidth=0.6, zorder=0)
    axes.set_xticks(range(len(found)), [LABELS.get(task, task).replace(", ", "\n") for task in found])
    axes.set(ylabel="Dense's time to a loss / own, simulated", title="Open: the slides' hours")
    axes.set_xlim(-0.6, len(found) - 0.3)
    axes.margins(y=0.12)


def _draw_curves(axes: plots.Axes, frames: Frames, task: str) -> None:
    for method, own in trained(frames, task).items():
        seconds, table = step_s(frames, task, method), curve(frames, own, COLUMN)
        if seconds is not None and len(table):
            plots.curve(axes, table["step"] * seconds.value, table, LOOKS[method])
    axes.axhline(level(frames, task), color="#777777", linewidth=0.6, linestyle=(0, (1, 1.2)), zorder=0)
    axes.set(xlabel="Seconds, simulated", ylabel="Training loss", title=LABELS.get(task, task))
    axes.grid(True)


def _draw_predicted(axes: plots.Axes, frames: Frames) -> None:
    family = next(iter(FAMILIES.values()))
    parts = added(frames, family.elements)
    for method in (each for each in parts if each != "dense"):
        for link, joined in LINKS.items():
            ratios = speedup(parts, method, family.elements, joined, COMPUTING)
            axes.plot(COMPUTING, ratios, color=LOOKS[method].colour, linestyle=DASHES[link])
        if published := _published(family, method):
            axes.axhline(published, color=LOOKS[method].colour, linewidth=0.8, linestyle=(0, (1, 1.2)))
    axes.set_xscale("log")
    plots.log_ticks(axes, (0.2, 0.5, 1, 2, 5, 10, 20, 50))
    axes.set(xlabel="Computing in a step (s)", ylabel="Dense's step / own, simulated")
    axes.set_title(f"{family.large}'s size\n{', dashed '.join(LINKS).replace(' Gbit/s', '', 1)}")
    axes.grid(True)


def table(frames: Frames) -> list[Table]:
    trained_here = [
        {
            "model": LABELS.get(task, task),
            "method": LOOKS[method].label,
            "throughput": throughput(frames, own),
            "dense's step / own": slowdown(frames, keys(frames, task, "dense", "never"), own),
            "loss": level(frames, task),
            "time to it": _seconds(frames, task, method),
            "dense's time / own": times_as_soon(frames, task, method, "dense"),
        }
        for task in tasks(frames)
        for method in LOOKS
        if (own := keys(frames, task, method, "never"))
    ]
    units = {"throughput": "samples/s, simulated", "time to it": "s, simulated"}
    predicted = [
        {
            "model": family.large,
            "method": LOOKS[method].label,
            "link": link,
            "selecting": 1e3 * parts[method].select_s,
            "adds to computing": 1e3 * added_s(parts, method, family.elements, joined),
            "published hours, dense / own": _published(family, method),
            "computing that gives this": _computing(parts, family, method, joined),
        }
        for family in FAMILIES.values()
        if (parts := added(frames, family.elements))
        for method in parts
        for link, joined in LINKS.items()
    ]
    return [
        Table("Small models, simulated", pd.DataFrame(trained_here), units, COMMON),
        Table(
            "Models as large as theirs, simulated", pd.DataFrame(predicted),
            dict.fromkeys(("selecting", "adds to computing"), "ms") | {"computing that gives this": "s"},
            "The last column: seconds of computing in a step at which the speed-up over dense would be that "
            "of the published hours, were as many steps needed; a dash where there are none.",
        ),
    ]  # fmt: skip


COMMON = "The loss is the lowest mean of an epoch that every training of a model reaches."


def _seconds(frames: Frames, task: str, method: str) -> Value | None:
    step = step_s(frames, task, method)
    return seconds_to(reaching(frames, task, method), step.value) if step else None


def _published(family: Family, method: str) -> float | None:
    own = family.hours.get(method)
    return family.hours["dense"] / own if own and method != "dense" else None


def _computing(
    parts: Mapping[str, Parts], family: Family, method: str, link: cost.Link
) -> float | None:  # fmt: skip
    ratio = _published(family, method)
    if ratio is None:
        return None
    dense, own = (added_s(parts, each, family.elements, link) for each in ("dense", method))
    return computing_for(ratio, dense, own)


def caption(frames: Frames, profile: str) -> str:
    links = captions.listed(LINKS)
    measured = captions.listed(map(number, captions.values(frames, "task.elements")))
    return (
        "Left: how many times as soon as dense training a method has the lowest training loss that all reach "
        "(a dotted line in the next panels); open marks: hours of dense over those of the method, of the "
        "slides' BERT-Large and MAE. Middle: training loss against time, steps times what a step takes; "
        f"density {number(DENSITY)}. Right: a step of a model as large as theirs with dense gradients over "
        f"one with the method, {links} (solid, dashed), density {number(LARGE_DENSITY)}, {WORKERS} workers, "
        "against the time that computing takes, which the slides do not "
        f"say; dotted: the slides' ratios of hours. {_predicted.SIMULATED} There selecting is measured at "
        f"{measured} elements and scaled; words by the published formulas, of Ok-Topk the upper end, and of "
        "Stable Top-K without scores, which are a thousandth. Stable Top-K chooses every "
        f"{EVERY} steps, buckets of {SMALL_BLOCK} elements in small models and of {number(BLOCK)} in large "
        f"ones. {captions.setting(frames)} {captions.timing(frames)}"
    )


# --- claims
# ------------------------------------------------------------------------------------

SHORTEST = "slide 'For both BERT and MAE, stable TopK trains in the shortest time'"
FASTER = "slide 'Since S-TopK doesn't compute the TopK indices every iteration'"


def claims() -> list[Claim]:
    return [claim for task, family in FAMILIES.items() for claim in _claims(task, family)]


def _claims(task: str, family: Family) -> list[Claim]:
    return [
        _ordering(
            f"a step of Stable Top-K is shorter than one of Ok-Topk, {family.small}",
            "its throughput is higher than OkTopK",
            FASTER,
            lambda frames: slowdown(
                frames, *(keys(frames, task, method, "never") for method in ("oktopk", "stable_topk"))
            ),
        ),
        *(
            _ordering(
                f"Stable Top-K is down to the same loss before {LOOKS[other].label}, {family.small}",
                "trains in the shortest time",
                SHORTEST,
                _before(task, other),
            )
            for other in ("dense", "oktopk")
        ),
        _ordering(
            f"Ok-Topk adds more to computing than Stable Top-K, of {family.large}'s size on 10 Gbit/s",
            "its throughput is higher than OkTopK",
            FASTER,
            lambda frames: _predicted_ratio(frames, family),
        ),
        *(_hours(task, family, method) for method in ("stable_topk", "oktopk")),
    ]


def _before(task: str, other: str) -> Callable[[Frames], Value | None]:
    return lambda frames: times_as_soon(frames, task, "stable_topk", other)


def _ordering(text: str, paper: str, source: str, ours: Callable[[Frames], Value | None]) -> Claim:
    return Claim(
        text=f"{text}: how many times, simulated",
        paper=paper,
        unit="x",
        source=source,
        kind="ordering",
        tolerance=1.0,
        reason="More than once. A shape only: time over the link follows from a model of it.",
        ours=lambda frames: _only_indicated(ours(frames)),
        timed=True,
    )


def _hours(task: str, family: Family, method: str) -> Claim:
    ratio, label = family.hours["dense"] / family.hours[method], LOOKS[method].label
    return Claim(
        text=f"hours of dense training over those of {label}, {family.large}; ours of {family.small}, "
        "simulated",
        paper=round(ratio, 2),
        unit="x",
        source=f"last table: {family.hours['dense']} / {family.hours[method]} hours",
        kind="ratio",
        tolerance=0.1,
        reason="One training each. The slides name neither GPUs nor link, and no simulated time is theirs.",
        ours=lambda frames: _only_indicated(times_as_soon(frames, task, method, "dense")),
        accelerator=ANY_GPU,
        timed=True,
    )


def _predicted_ratio(frames: Frames, family: Family) -> Value | None:
    parts, link = added(frames, family.elements), LINKS["10 Gbit/s"]
    if not {"oktopk", "stable_topk"} <= set(parts):
        return None
    other, own = (added_s(parts, method, family.elements, link) for method in ("oktopk", "stable_topk"))
    return Value(other / own)


def _only_indicated(value: Value | None) -> Value | None:
    """Without its interval: nothing simulated decides."""
    return None if value is None else Value(value.value, n=value.n, of=value.of)
