"""Zhang's Stable Top-K slides: throughput, and time to a loss, of dense, Top-k, Ok-Topk and Stable Top-K.

The slides name neither machine nor link nor batch, nor how often buckets are chosen. So two things are looked
at: small models of the same families, trained and timed on virtual workers over a simulated link; and models
of their size, whose selecting is measured, whose exchange is simulated, and whose computing is left open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_run_keys
from analysis.stats import Estimate, final_ratio, mean_curve, phase_time, samples_per_second, step_time_ratio
from analysis.tables import Table
from analysis.times.time_to_target import (
    CrossingBySeed,
    crossing_by_seed,
    seconds_to_target,
    speedup_to_target,
)
from experiments.config.run import Run, RunSettings
from experiments.figures import _large_models as large
from experiments.figures import _predicted, papers
from experiments.figures._large_models import (
    BLOCK,
    EVERY,
    FAMILIES,
    LARGE_DENSITY,
    LINKS,
    LOOKS,
    SMALL_BLOCK,
    UNNAMED,
    WORKERS,
    settings_by_method,
)
from experiments.figures._runs import TIMED, TRAINED, setting_axis, setting_values_text, span_grid
from experiments.figures.papers import make_claim

SCALE = papers.published_value("zhang.scale.trained")
TITLE = "Throughput and time to a loss with Stable Top-K, beside dense, Top-k and Ok-Topk"
COLUMN = "train_loss"
LABELS = {task: family.small_label for task, family in FAMILIES.items()} | {"cnn_digits": "small CNN, digits"}
DENSITY = 0.05  # of small models, at which Stable Top-K trains; with a learning rate at which it does
LINK = "ethernet_1g"  # for small models: there as long as computing, as with theirs
SHARED: RunSettings = {**TRAINED, "link": LINK}
_DATA = papers.item_settings("zhang.stable-throughput")
STEPS: dict[str, RunSettings] = _DATA["steps"]
MODELS: dict[str, list[RunSettings]] = _DATA["models"]
MINUTES = {"smoke": 0.02, "laptop": 1.5, "paper": 10}  # of turns, for each small model
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": list[int]()}
LEVEL = style.MethodStyle("", "#777777", "", "")


def runs(profile: str) -> list[Run]:
    """Return trainings, the same steps timed in turns, and a vector on which selecting is timed."""
    shared = {**SHARED, **TIMED, "profile": profile, "alternate.limit_min": MINUTES[profile]}
    variants = settings_by_method(DENSITY, SMALL_BLOCK)
    timed = [Run({**shared, **model}, variants) for model in MODELS[profile]]
    return [*more_runs(profile, SEEDS), *timed, large.selection_timing_run(profile)]


def more_runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = MORE_SEEDS) -> list[Run]:
    shared = {**SHARED, "profile": profile, **STEPS[profile]}
    variants = settings_by_method(DENSITY, SMALL_BLOCK).values()
    return span_grid(shared, setting_axis("seed", seeds_by_profile[profile]), MODELS[profile], variants)


def run_keys(
    frames: Frames, task: str, method: str, validate: Literal["epoch", "never"] = "never"
) -> list[str]:
    """Return the runs of trainings (validate: `epoch`) or of what took turns (`never`)."""
    return find_run_keys(frames, {"task.name": task, "method.name": method, "train.validate": validate})


def compared_tasks(frames: Frames) -> list[str]:
    """Return the tasks that were both trained and timed."""
    present = captions.distinct_values(frames, "task.name")
    ordered = dict.fromkeys([*(task for task in LABELS if task in present), *present])
    return [
        task
        for task in ordered
        if slowest_worker_step_s(frames, task, "dense") and training_run_keys_by_method(frames, task)
    ]


def training_run_keys_by_method(frames: Frames, task: str) -> dict[str, list[str]]:
    """Return the trainings of each method that has any."""
    keys_by_method = {method: run_keys(frames, task, method, "epoch") for method in LOOKS}
    return {method: keys for method, keys in keys_by_method.items() if keys}


@cache_by_frames
def slowest_worker_step_s(frames: Frames, task: str, method: str) -> Estimate | None:
    """Return the seconds of a step of the slowest worker, simulated."""
    return phase_time(frames, run_keys(frames, task, method), "slowest")


def lowest_common_loss(frames: Frames, task: str) -> float:
    """Return the lowest mean loss of an epoch that every training reaches."""
    trained = [key for keys in training_run_keys_by_method(frames, task).values() for key in keys]
    epochs = frames.epochs[frames.epochs["key"].isin(trained)]
    return float(epochs.groupby("key")[COLUMN].min().max())


def steps_to_common_loss_by_seed(frames: Frames, task: str, method: str) -> CrossingBySeed:
    """Return the steps until a mean loss of an epoch is down to the common one, by seed."""
    keys = run_keys(frames, task, method, "epoch")
    return crossing_by_seed(frames, keys, COLUMN, lowest_common_loss(frames, task), falls=True)


def speedup_to_common_loss(frames: Frames, task: str, method: str, other: str) -> Estimate | None:
    """Return the other method's time to the common loss over this one's, paired by seed."""
    method_s, other_s = (slowest_worker_step_s(frames, task, name) for name in (method, other))
    if method_s is None or other_s is None:
        return None
    slow, fast = (steps_to_common_loss_by_seed(frames, task, name) for name in (other, method))
    return speedup_to_target(slow, fast, Estimate(other_s.value / method_s.value))


def draw(frames: Frames, profile: str) -> plots.Figure:
    tasks = compared_tasks(frames)
    if not tasks:
        raise ValueError("nothing to draw: there is no training whose step was timed as well")
    losses = [_losses_panel(frames, task) for task in tasks]
    panels = [_speedups_panel(frames, tasks), *losses, large.first_family_speedups_panel(frames)]
    keys = marks.dot_legend_handles({look.label: (look.marker, look.colour) for look in LOOKS.values()})
    return plots.compose_figure(panels, 2.9, first_legend_entries=keys)


def _speedups_panel(frames: Frames, tasks: list[str]) -> plots.Panel:
    """Return dense's time to a loss over each method's, beside the published hours."""
    lines = []
    for group, task in enumerate(tasks):
        for place, method in enumerate(LOOKS):
            x = group + 0.27 * (place - 2)
            speedup = speedup_to_common_loss(frames, task, method, "dense")
            if method != "dense" and speedup is not None and np.isfinite(speedup.value):
                lines.append(plots.Curve(UNNAMED[method], [x], [speedup]))
            published = FAMILIES[task].published_speedup_over_dense(method) if task in FAMILIES else None
            if published:
                lines.append(plots.Curve(UNNAMED[method], [x + 0.1], [published], marks.OPEN_MARKS))
    labels = [LABELS.get(task, task).replace(", ", "\n") for task in tasks]
    return plots.curves_panel(
        lines, reference_y=1, grid=None, ylabel="Dense's time to a loss / own, simulated",
        title="Open: the slides' hours", xticks=range(len(tasks)), xticklabels=labels,
        xlim=(-0.6, len(tasks) - 0.3), ymargin=0.12,
    )  # fmt: skip


def _losses_panel(frames: Frames, task: str) -> plots.Panel:
    """Return the loss of each method against time."""
    level = plots.PUBLISHED_LINE | {"zorder": 0}
    lines = [plots.Curve(LEVEL, None, Estimate(lowest_common_loss(frames, task)), level)]
    for method, keys in training_run_keys_by_method(frames, task).items():
        step = slowest_worker_step_s(frames, task, method)
        table = mean_curve(frames, keys, COLUMN)
        if step is not None:
            lines.append(plots.Curve(UNNAMED[method], table["step"] * step.value, table))
    title = LABELS.get(task, task)
    return plots.curves_panel(lines, xlabel="Seconds, simulated", ylabel="Training loss", title=title)


def table(frames: Frames) -> list[Table]:
    rows = []
    for task in compared_tasks(frames):
        for method, look in LOOKS.items():
            keys = run_keys(frames, task, method)
            step = slowest_worker_step_s(frames, task, method)
            if keys:
                rows.append(
                    {
                        "model": LABELS.get(task, task),
                        "method": look.label,
                        "throughput": samples_per_second(frames, keys),
                        "dense's step / own": step_time_ratio(frames, run_keys(frames, task, "dense"), keys),
                        "loss": lowest_common_loss(frames, task),
                        "time to it": seconds_to_target(
                            steps_to_common_loss_by_seed(frames, task, method), step.value
                        )
                        if step
                        else None,
                        "dense's time / own": speedup_to_common_loss(frames, task, method, "dense"),
                    }
                )
    units = {"throughput": "samples/s, simulated", "time to it": "s, simulated"}
    note = "The loss is the lowest mean of an epoch that every training of a model reaches."
    small = Table.from_rows("Small models, simulated", rows, units, note)
    return [small, large.large_models_table(frames)]


def facts(frames: Frames) -> dict[str, object]:
    return {
        "density": format_number(DENSITY), "links": captions.join_with_and(LINKS),
        "large_density": format_number(LARGE_DENSITY), "workers": WORKERS,
        "simulated": _predicted.SIMULATED, "measured": setting_values_text(frames, "task.elements"),
        "every": EVERY, "small_block": SMALL_BLOCK, "block": format_number(BLOCK),
    }  # fmt: skip


def claims() -> list[Claim]:
    listed = []
    for task, family in FAMILIES.items():
        names = {"small": family.small_label, "large": family.large_label}
        listed.append(_indicated_claim("step-shorter", _oktopk_step_ratio, task, case=task, **names))
        listed.append(
            make_claim("zhang.oktopk-hurts", _oktopk_loss_ratio, task, case=task, label=family.small_label,
                  quantity="_loss_ratio")
        )  # fmt: skip
        for other in ("dense", "oktopk"):
            listed.append(
                _indicated_claim(
                    "sooner-than", speedup_to_common_loss, task, "stable_topk", other, case=f"{other}.{task}",
                    other=LOOKS[other].label, **names,
                )
            )  # fmt: skip
        listed.append(
            _indicated_claim(
                "oktopk-adds-more", large.oktopk_to_stable_added_time_ratio, family, case=task, **names
            )
        )
        for method in ("stable_topk", "oktopk"):
            dense_h = family.published_hours_by_method["dense"]
            method_h = family.published_hours_by_method[method]
            listed.append(
                _indicated_claim(
                    "hours", speedup_to_common_loss, task, method, "dense", case=f"{method}.{task}",
                    label=LOOKS[method].label, hours=f"{dense_h} / {method_h}",
                    paper=round(dense_h / method_h, 2), **names,
                )
            )  # fmt: skip
    return listed


def _indicated_claim(
    name: str, compute: Callable[..., Estimate | None], *arguments: Any, case: str, **fields: Any
) -> Claim:
    """Return a claim on a value without its interval: nothing simulated decides."""
    return make_claim(f"zhang.{name}", partial(_without_interval, compute), *arguments, case=case, **fields)


def _without_interval(
    compute: Callable[..., Estimate | None], frames: Frames, *arguments: Any
) -> Estimate | None:
    estimate = compute(frames, *arguments)
    return estimate and estimate._replace(low=None, high=None, degrees_of_freedom=None, floor=-np.inf)


def _oktopk_step_ratio(frames: Frames, task: str) -> Estimate | None:
    """Return the step time of Ok-Topk over that of Stable Top-K."""
    return step_time_ratio(frames, *(run_keys(frames, task, name) for name in ("oktopk", "stable_topk")))


def _oktopk_loss_ratio(frames: Frames, task: str) -> Estimate | None:
    """Return the training loss at the end with Ok-Topk over that of dense training."""
    oktopk, dense = (run_keys(frames, task, method, "epoch") for method in ("oktopk", "dense"))
    return final_ratio(frames, oktopk, dense, COLUMN)
