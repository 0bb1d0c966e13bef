"""Shi et al. 2019: TopK-, GaussianK-, Random-k- and dense SGD on several models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames, find_run_keys
from analysis.stats import Estimate, final_difference, final_mean, mean_curve
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import (
    MORE_UNSEEN_SEEDS,
    TRAINED,
    UNSEEN_SEEDS,
    setting_axis,
    span_grid,
    with_density_except_dense,
)
from experiments.figures.papers import make_claim

TITLE = "TopK-, GaussianK-, Random-k- and dense SGD on MNIST, CIFAR-10 and the Penn Treebank"
SCALE = papers.published_value("shi2019.scale.training")
_DATA = papers.item_settings("shi2019.shi-convergence")
TASKS: dict[str, str] = _DATA["tasks"]
TRAININGS: dict[str, list[RunSettings]] = _DATA["trainings"]
METHODS: dict[str, RunSettings] = {
    "dense": {"method": "dense"},
    "topk": {"method": "topk"},
    "gaussiank": {"method": "gaussiank"},
    "randomk": {"method": "randomk", "method.sampling": "hash"},
}
DENSITY = {"smoke": 0.05, "laptop": 0.01, "paper": 0.001}


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = UNSEEN_SEEDS) -> list[Run]:
    shared = {**TRAINED, "profile": profile}
    methods = with_density_except_dense(METHODS, DENSITY[profile]).values()
    return span_grid(shared, setting_axis("seed", seeds_by_profile[profile]), TRAININGS[profile], methods)


more_runs = partial(runs, seeds_by_profile=MORE_UNSEEN_SEEDS)


def training_run_keys(frames: Frames, task: str, method: str) -> list[str]:
    return find_run_keys(frames, {"task.name": task, "method.name": method})


def trained_tasks(frames: Frames) -> list[str]:
    tasks = set(captions.distinct_values(frames, "task.name"))
    return [*(task for task in TASKS if task in tasks), *sorted(tasks - set(TASKS))]


def quality_column(task: str) -> str:
    """Return the column that says how good a model is: accuracy, of language models the loss."""
    return "val_loss" if task.endswith("_ptb") else "val_top1"


def draw(frames: Frames, profile: str) -> plots.Figure:
    return plots.compose_figure([_panel(frames, task) for task in trained_tasks(frames)], 2.6)


def _panel(frames: Frames, task: str) -> plots.Panel:
    curves = {
        method: mean_curve(frames, training_run_keys(frames, task, method), quality_column(task))
        for method in METHODS
    }
    return plots.curves_panel(
        [plots.Curve(style.method_style(method), table["step"], table) for method, table in curves.items()],
        xlabel="Steps", title=TASKS.get(task, task),
        ylabel="Validation loss" if quality_column(task) == "val_loss" else "Validation top-1 (%)",
    )  # fmt: skip


def table(frames: Frames) -> Table:
    rows = [
        {
            "task": TASKS.get(task, task),
            "method": style.method_style(method).label,
            "validation top-1": final_mean(frames, keys, "val_top1"),
            "validation loss": final_mean(frames, keys, "val_loss"),
        }
        for task in trained_tasks(frames)
        for method in METHODS
        if (keys := training_run_keys(frames, task, method))
    ]
    return Table.from_rows("At the end of the training", rows, {"validation top-1": "%"})


def claims() -> list[Claim]:
    return [
        *(
            make_claim(
                "shi2019.no-loss", final_top1_gap, task, "dense", method, case=f"{method}.{task}",
                method=style.method_style(method).label, label=label,
            )
            for task, label in TASKS.items()
            for method in ("topk", "gaussiank")
        ),
    ]  # fmt: skip


def final_top1_gap(frames: Frames, task: str, above: str, below: str) -> Estimate | None:
    return final_difference(
        frames, training_run_keys(frames, task, above), training_run_keys(frames, task, below), "val_top1"
    )
