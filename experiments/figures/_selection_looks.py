"""Observations of gradients during short trainings of several models, every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.records.frames import (
    Frames,
    find_run_keys,
    largest_tensor_by_run,
    note_read_run_keys,
    select_runs,
)
from analysis.stats import Bounds, Estimate, estimate_mean
from experiments.config.run import Run
from experiments.figures._runs import TRAINED, scaled_settings, setting_axis, span_grid

MODELS = {
    "cnn_cifar10": "small CNN",
    "slimvgg_cifar10": "slim VGG-16",
    "smalllstm_ptb": "LSTM",
    "berttiny_ptb64": "BERT-Tiny",
    "maetiny_cifar10": "MAE",
}
MORE_ANSWERS = {"berttiny_ptb64": ("zhang.31",)}  # what a claim about BERT answers besides
BATCHES = {
    "cnn_cifar10": 16, "slimvgg_cifar10": 16, "smalllstm_ptb": 10, "berttiny_ptb64": 8, "maetiny_cifar10": 16,
}  # fmt: skip
# On a laptop seeds that nobody had seen when the claims' rules were written.
SEEDS = {"smoke": [0], "laptop": [5, 6, 7, 8, 9], "paper": [0, 1, 2]}
RunStatistic = Callable[[Frames], float]  # of one run
Measures = Mapping[str, tuple[RunStatistic, Bounds]]  # by the names of columns


def training_runs_with_looks(profile: str) -> list[Run]:
    """Return the trainings of all models and seeds in which gradients are looked at."""
    batches = {"cnn_digits": 16} if profile == "smoke" else BATCHES
    method = {"method": "topk", "method.density": 0.01}
    shared = scaled_settings({**TRAINED, "workers": 2, "train.validate": "never", **method}, "looks", profile)
    tasks = [{"task": task, "task.batch_size": batch} for task, batch in batches.items()]
    return span_grid(shared, setting_axis("seed", SEEDS[profile]), tasks)


def frames_by_model(frames: Frames) -> dict[str, Frames]:
    """Return the runs of each model, by its label, in the order of `MODELS`."""
    if not len(frames.runs):
        return {}
    tasks = set(frames.runs["task.name"])
    ordered = [*(task for task in MODELS if task in tasks), *sorted(tasks - set(MODELS))]
    return {MODELS.get(task, task): select_task_runs(frames, task) for task in ordered}


def select_task_runs(frames: Frames, task: str) -> Frames:
    """Return the runs of a task."""
    return select_runs(frames, find_run_keys(frames, {"task.name": task}))


def select_looks(frames: Frames, kind: str, only_tensor: str | None = None) -> pd.DataFrame:
    """Return the looks of one kind, at any tensor or at one alone."""
    is_wanted = frames.looks["what"].eq(kind) & (frames.looks["of"].eq(only_tensor) if only_tensor else True)
    looks: pd.DataFrame = frames.looks[is_wanted]
    return looks


def largest_tensor_name_or_empty(frames: Frames) -> str:
    """Return the name of the tensor with the most elements in the first run; empty without looks."""
    by_run = largest_tensor_by_run(frames.looks)
    return str(by_run.iloc[0]) if len(by_run) else ""


def mean_over_runs(frames: Frames, statistic: RunStatistic, bounds: Bounds) -> Estimate | None:
    """Return the arithmetic mean of a number of each run, with its interval within what the number can be."""
    note_read_run_keys(frames.runs["key"])
    training_runs_with_looks = [select_runs(frames, [key]) for key in frames.runs["key"]]
    samples = [statistic(run) for run in training_runs_with_looks if len(run.looks)]
    numbers = [sample for sample in samples if not np.isnan(sample)]
    return estimate_mean(numbers, bounds, value=float(np.mean(numbers))) if numbers else None


def mean_over_task_runs(
    frames: Frames, task: str, statistic: RunStatistic, bounds: Bounds
) -> Estimate | None:
    """Return the mean of a number over the runs of one model."""
    return mean_over_runs(select_task_runs(frames, task), statistic, bounds)


def rows_of_means_by_model(frames: Frames, measures: Measures) -> list[dict[str, object]]:
    """Return a table's row for each model, with the means of these numbers over its runs."""
    return [
        {
            "model": model,
            **{
                name: mean_over_runs(training_runs_with_looks, *measure) for name, measure in measures.items()
            },
        }
        for model, training_runs_with_looks in frames_by_model(frames).items()
    ]


def select_evenly_spaced(steps: Sequence[int], count: int = 4) -> list[int]:
    """Return `count` steps at equal distances, among them the first and the last."""
    ordered = sorted(set(steps))
    places = np.linspace(0, len(ordered) - 1, count)
    return [ordered[round(place)] for place in places] if ordered else []


def select_first_run(frames: Frames) -> Frames:
    """Return the first of several runs."""
    return select_runs(frames, list(frames.runs["key"][:1]))
