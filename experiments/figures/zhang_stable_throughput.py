"""Zhang's Stable Top-K slides: throughput, and time to a loss, of dense, Top-k, Ok-Topk and Stable Top-K.

The slides name neither machine nor link nor batch, nor how often buckets are chosen. So two things are looked
at: small models of the same families, trained and timed on virtual workers over a simulated link; and models
of their size, whose selecting is measured, whose exchange is simulated, and whose computing is left open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_keys
from analysis.stats import Estimate, final_ratio, mean_curve, phase_time, samples_per_second, step_time_ratio
from analysis.tables import Table
from analysis.times.time_to_target import (
    CrossingBySeed,
    crossing_by_seed,
    seconds_to_target,
    speedup_to_target,
)
from experiments.config.run import Run, RunSettings
from experiments.figures import _large as large
from experiments.figures import _predicted, papers
from experiments.figures._large import (
    BLOCK,
    EVERY,
    FAMILIES,
    LARGE_DENSITY,
    LINKS,
    LOOKS,
    SMALL_BLOCK,
    UNNAMED,
    WORKERS,
    methods,
)
from experiments.figures._runs import TIMED, TRAINED, setting_axis, span_grid
from experiments.figures.papers import claim

SCALE = papers.value("zhang.scale.trained")
TITLE = "Throughput and time to a loss with Stable Top-K, beside dense, Top-k and Ok-Topk"
COLUMN = "train_loss"
LABELS = {task: family.small for task, family in FAMILIES.items()} | {"cnn_digits": "small CNN, digits"}
DENSITY = 0.05  # of small models, at which Stable Top-K trains; with a learning rate at which it does
LINK = "ethernet_1g"  # for small models: there as long as computing, as with theirs
SHARED: RunSettings = {**TRAINED, "link": LINK}
_DATA = papers.item("zhang.stable-throughput")
STEPS: dict[str, RunSettings] = _DATA["steps"]
MODELS: dict[str, list[RunSettings]] = _DATA["models"]
MINUTES = {"smoke": 0.02, "laptop": 1.5, "paper": 10}  # of turns, for each small model
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": list[int]()}
LEVEL = style.MethodStyle("", "#777777", "", "")


def runs(profile: str) -> list[Run]:
    """Trainings, the same steps timed in turns, and a vector on which selecting is timed."""
    shared = {**SHARED, **TIMED, "profile": profile, "alternate.limit_min": MINUTES[profile]}
    timed = [Run({**shared, **model}, methods(DENSITY, SMALL_BLOCK)) for model in MODELS[profile]]
    return [*_trainings(profile, SEEDS[profile]), *timed, large.run(profile)]


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[Run]:
    shared, own = {**SHARED, "profile": profile, **STEPS[profile]}, methods(DENSITY, SMALL_BLOCK).values()
    return span_grid(shared, setting_axis("seed", seeds), MODELS[profile], own)


def keys(frames: Frames, task: str, method: str, validate: str = "never") -> list[str]:
    """The runs of trainings (validate: `epoch`) or of what took turns (`never`)."""
    return find_keys(frames, {"task.name": task, "method.name": method, "train.validate": validate})


def tasks(frames: Frames) -> list[str]:
    """The tasks that were both trained and timed."""
    there = captions.distinct_values(frames, "task.name")
    ordered = dict.fromkeys([*(task for task in LABELS if task in there), *there])
    return [task for task in ordered if step_s(frames, task, "dense") and trained(frames, task)]


def trained(frames: Frames, task: str) -> dict[str, list[str]]:
    found = {method: keys(frames, task, method, "epoch") for method in LOOKS}
    return {method: own for method, own in found.items() if own}


@cache_by_frames
def step_s(frames: Frames, task: str, method: str) -> Estimate | None:
    """Seconds of a step of the slowest worker, simulated."""
    return phase_time(frames, keys(frames, task, method), "slowest")


def level(frames: Frames, task: str) -> float:
    """The lowest mean loss of an epoch that every training reaches."""
    mine = [key for own in trained(frames, task).values() for key in own]
    epochs = frames.epochs[frames.epochs["key"].isin(mine)]
    return float(epochs.groupby("key")[COLUMN].min().max())


def reaching(frames: Frames, task: str, method: str) -> CrossingBySeed:
    """Steps until a mean loss of an epoch is down to `level`, by seed."""
    own = trained(frames, task).get(method, [])
    return crossing_by_seed(frames, own, COLUMN, level(frames, task), falls=True) if own else {}


def times_as_soon(frames: Frames, task: str, method: str, other: str) -> Estimate | None:
    """The other's time to the common loss over this one's, paired by seed."""
    mine, theirs = step_s(frames, task, method), step_s(frames, task, other)
    if mine is None or theirs is None:
        return None
    slow, fast = (reaching(frames, task, each) for each in (other, method))
    return speedup_to_target(slow, fast, Estimate(theirs.value / mine.value))


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (found := tasks(frames)):
        raise ValueError("nothing to draw: there is no training whose step was timed as well")
    panels = [_gains(frames, found), *(_losses(frames, task) for task in found), large.panel(frames)]
    keys = marks.dot_legend_handles({look.label: (look.marker, look.colour) for look in LOOKS.values()})
    return plots.compose_figure(panels, 2.9, keys=keys)


def _gains(frames: Frames, found: list[str]) -> plots.Panel:
    lines = []
    for group, task in enumerate(found):
        for place, method in enumerate(LOOKS):
            x, value = group + 0.27 * (place - 2), times_as_soon(frames, task, method, "dense")
            if method != "dense" and value is not None and np.isfinite(value.value):
                lines.append(plots.Curve(UNNAMED[method], [x], [value]))
            if (family := FAMILIES.get(task)) and (published := large.published(family, method)):
                lines.append(plots.Curve(UNNAMED[method], [x + 0.1], [published], marks.OPEN_MARKS))
    labels = [LABELS.get(task, task).replace(", ", "\n") for task in found]
    return plots.curves_panel(
        lines, level=1, grid=None, ylabel="Dense's time to a loss / own, simulated",
        title="Open: the slides' hours", xticks=range(len(found)), xticklabels=labels,
        xlim=(-0.6, len(found) - 0.3), ymargin=0.12,
    )  # fmt: skip


def _losses(frames: Frames, task: str) -> plots.Panel:
    lines = [plots.Curve(LEVEL, None, Estimate(level(frames, task)), plots.PUBLISHED_LINE | {"zorder": 0})]
    for method, own in trained(frames, task).items():
        seconds, table = step_s(frames, task, method), mean_curve(frames, own, COLUMN)
        if seconds is not None:
            lines.append(plots.Curve(UNNAMED[method], table["step"] * seconds.value, table))
    title = LABELS.get(task, task)
    return plots.curves_panel(lines, xlabel="Seconds, simulated", ylabel="Training loss", title=title)


def table(frames: Frames) -> list[Table]:
    rows = [
        {
            "model": LABELS.get(task, task),
            "method": LOOKS[method].label,
            "throughput": samples_per_second(frames, own),
            "dense's step / own": step_time_ratio(frames, keys(frames, task, "dense"), own),
            "loss": level(frames, task),
            "time to it": _seconds(frames, task, method),
            "dense's time / own": times_as_soon(frames, task, method, "dense"),
        }
        for task in tasks(frames)
        for method in LOOKS
        if (own := keys(frames, task, method))
    ]
    units = {"throughput": "samples/s, simulated", "time to it": "s, simulated"}
    note = "The loss is the lowest mean of an epoch that every training of a model reaches."
    return [Table.from_rows("Small models, simulated", rows, units, note), large.table(frames)]


def _seconds(frames: Frames, task: str, method: str) -> Estimate | None:
    step = step_s(frames, task, method)
    return seconds_to_target(reaching(frames, task, method), step.value) if step else None


def facts(frames: Frames) -> dict[str, object]:
    measured = captions.join_values(frames, "task.elements", format_number)
    return {
        "density": format_number(DENSITY), "links": captions.join_words(LINKS),
        "large_density": format_number(LARGE_DENSITY),
        "workers": WORKERS, "simulated": _predicted.SIMULATED, "measured": measured, "every": EVERY,
        "small_block": SMALL_BLOCK, "block": format_number(BLOCK),
    }  # fmt: skip


def claims() -> list[Claim]:
    def of(name: str, ours: Ours, *of: Any, case: str, **own: Any) -> Claim:
        return claim(f"zhang.{name}", partial(_indicated, ours), *of, case=case, **own)

    found = []
    for task, family in FAMILIES.items():
        named = {"small": family.small, "large": family.large}
        found.append(of("step-shorter", _step_ratio, task, case=task, **named))
        named_small = {"label": family.small, "quantity": "_loss_ratio"}
        found.append(claim("zhang.oktopk-hurts", _loss_ratio, task, case=task, **named_small))
        for other in ("dense", "oktopk"):
            case, label = f"{other}.{task}", LOOKS[other].label
            found.append(
                of("sooner-than", times_as_soon, task, "stable_topk", other, case=case, other=label, **named)
            )
        found.append(of("oktopk-adds-more", large.ratio, family, case=task, **named))
        for method in ("stable_topk", "oktopk"):
            here, there = family.hours["dense"], family.hours[method]
            found.append(
                of(
                    "hours", times_as_soon, task, method, "dense", case=f"{method}.{task}", **named,
                    label=LOOKS[method].label, hours=f"{here} / {there}", paper=round(here / there, 2),
                )
            )  # fmt: skip
    return found


Ours = Callable[..., Estimate | None]


def _step_ratio(frames: Frames, task: str) -> Estimate | None:
    return step_time_ratio(frames, *(keys(frames, task, method) for method in ("oktopk", "stable_topk")))


def _loss_ratio(frames: Frames, task: str) -> Estimate | None:
    """The training loss at the end with Ok-Topk over that of dense training."""
    oktopk, dense = (keys(frames, task, method, "epoch") for method in ("oktopk", "dense"))
    return final_ratio(frames, oktopk, dense, COLUMN)


def _indicated(ours: Ours, frames: Frames, *of: Any) -> Estimate | None:
    """A value without its interval: nothing simulated decides."""
    value = ours(frames, *of)
    return value and Estimate(value.value, n=value.n, sample_kind=value.sample_kind)
