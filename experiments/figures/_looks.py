"""What several items see in the same trainings: short ones of several models, looked at every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.records.frames import Frames, find_keys, largest_tensor_by_run, note_read_keys, select_runs
from analysis.stats import Bounds, Estimate, estimate_mean
from experiments.config.run import Run
from experiments.figures._runs import TRAINED, crossed, each, scale

MODELS = {
    "cnn_cifar10": "small CNN",
    "slimvgg_cifar10": "slim VGG-16",
    "smalllstm_ptb": "LSTM",
    "berttiny_ptb64": "BERT-Tiny",
    "maetiny_cifar10": "MAE",
}
SPARSE_TOO = {"berttiny_ptb64": ("zhang.31",)}  # what a claim about BERT answers besides
BATCHES = {
    "cnn_cifar10": 16, "slimvgg_cifar10": 16, "smalllstm_ptb": 10, "berttiny_ptb64": 8, "maetiny_cifar10": 16,
}  # fmt: skip
SEEDS = {"smoke": [0], "laptop": [0, 1, 2], "paper": [0, 1, 2]}


def runs(profile: str) -> list[Run]:
    batches = {"cnn_digits": 16} if profile == "smoke" else BATCHES
    shared = {
        **TRAINED, "profile": profile, "workers": 2, "train.validate": "never", "method": "topk",
        "method.density": 0.01, **scale("looks", profile),
    }  # fmt: skip
    tasks = [{"task": task, "task.batch_size": batch} for task, batch in batches.items()]
    return crossed(shared, each("seed", SEEDS[profile]), tasks)


def models(frames: Frames) -> dict[str, Frames]:
    """The runs of each model, by its label, in the order of `MODELS`."""
    if not len(frames.runs):
        return {}
    names = [*MODELS, *sorted(set(frames.runs["task.name"]) - set(MODELS))]
    return {
        MODELS.get(name, name): of_task(frames, name)
        for name in names
        if (frames.runs["task.name"] == name).any()
    }


def of_task(frames: Frames, name: str) -> Frames:
    return select_runs(frames, find_keys(frames, {"task.name": name}))


def seen(frames: Frames, what: str, of: str | None = None) -> pd.DataFrame:
    """The looks of one kind."""
    chosen = frames.looks["what"].eq(what) & (frames.looks["of"].eq(of) if of else True)
    found: pd.DataFrame = frames.looks[chosen]
    return found


def largest(frames: Frames) -> str:
    """The tensor with the most elements, of a model."""
    by_run = largest_tensor_by_run(frames.looks)
    return str(by_run.iloc[0]) if len(by_run) else ""


def over_runs(frames: Frames, number: Callable[[Frames], float], bounds: Bounds) -> Estimate | None:
    """A number of each run, as an arithmetic mean with its interval within what the number can be."""
    runs = [select_runs(frames, [key]) for key in frames.runs["key"]]
    note_read_keys(frames.runs["key"])
    known = [value for run in runs if len(run.looks) and not np.isnan(value := number(run))]
    return estimate_mean(known, bounds, value=float(np.mean(known))) if known else None


def of_model(frames: Frames, task: str, number: Callable[[Frames], float], bounds: Bounds) -> Estimate | None:
    """`over_runs` of one model."""
    return over_runs(of_task(frames, task), number, bounds)


Measures = Mapping[str, tuple[Callable[[Frames], float], Bounds]]  # by the names of columns


def rows(frames: Frames, measures: Measures) -> list[dict[str, object]]:
    """Rows of a table: of each model these numbers, `over_runs`."""
    return [
        {"model": model, **{name: over_runs(of_model, *measure) for name, measure in measures.items()}}
        for model, of_model in models(frames).items()
    ]


def some_steps(steps: Sequence[int], count: int = 4) -> list[int]:
    """The first, the last and some between them."""
    ordered = sorted(set(steps))
    return [ordered[round(at * (len(ordered) - 1) / (count - 1))] for at in range(count)] if ordered else []


def first(frames: Frames) -> Frames:
    """The first of several runs."""
    return select_runs(frames, list(frames.runs["key"][:1]))
