"""Shi et al. 2019: TopK-, GaussianK-, Random-k- and dense SGD on several models."""

from __future__ import annotations

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.stats import Value, curve, final, final_difference
from analysis.tables import Table

TITLE = "TopK-, GaussianK-, Random-k- and dense SGD on MNIST, CIFAR-10 and the Penn Treebank"
TASKS = {
    "fnn3_mnist": "FNN-3, MNIST", "lenet5_mnist": "LeNet-5, MNIST", "resnet20_cifar10": "ResNet-20, CIFAR-10",
    "vgg16_cifar10": "VGG-16, CIFAR-10", "smalllstm_ptb": "small LSTM, PTB", "lstm_ptb": "LSTM, PTB",
    "cnn_cifar10": "small CNN, CIFAR-10",
}  # fmt: skip
METHODS = {
    "dense": "method=dense",
    "topk": "method=topk",
    "gaussiank": "method=gaussiank",
    "randomk": "method=randomk method.sampling=hash",
}
SHARED = ["recipe=none", "cluster=virtual", "timing.mode=production", "data.fallback=refuse"]
TRAININGS = {
    "smoke": {"cnn_digits": ["workers=2", "task.batch_size=16", "train.epochs=2"]},
    "laptop": {
        "fnn3_mnist": ["workers=4", "task.batch_size=32", "train.epoch_steps=100", "train.epochs=10"],
        "lenet5_mnist": ["workers=4", "task.batch_size=32", "train.epoch_steps=100", "train.epochs=10"],
        "smalllstm_ptb": ["workers=4", "task.batch_size=5", "train.epoch_steps=100", "train.epochs=10"],
    },
    "paper": {
        task: ["workers=16", "train.epochs=140"]
        for task in ("fnn3_mnist", "lenet5_mnist", "resnet20_cifar10", "vgg16_cifar10", "lstm_ptb")
    },
}
DENSITY = {"smoke": 0.05, "laptop": 0.01, "paper": 0.001}
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": [1, 2]}
NEAR = 1.0  # points of accuracy that no reader calls obvious


def runs(profile: str) -> list[list[str]]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[list[str]]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[list[str]]:
    return [
        [f"profile={profile}", *SHARED, f"task={task}", *words, *method.split(),
         *([] if name == "dense" else [f"method.density={DENSITY[profile]}"]), f"seed={seed}"]
        for seed in seeds
        for task, words in TRAININGS[profile].items()
        for name, method in METHODS.items()
    ]  # fmt: skip


def keys(frames: Frames, task: str, method: str) -> list[str]:
    runs = frames.runs
    if not len(runs):
        return []
    return list(runs["key"][runs["task.name"].eq(task) & runs["method.name"].eq(method)])


def tasks(frames: Frames) -> list[str]:
    there = set(frames.runs["task.name"])
    return [*(task for task in TASKS if task in there), *sorted(there - set(TASKS))]


def column(task: str) -> str:
    """Accuracy; of the next word its loss, which is the logarithm of the perplexity."""
    return "val_loss" if task.endswith("_ptb") else "val_top1"


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError("nothing to draw: there is no run")
    found = tasks(frames)
    with plots.canvas(style.two_columns(2.6), 1, len(found), squeeze=False) as (figure, (row,)):
        for axes, task in zip(row, found, strict=True):
            for method in METHODS:
                table = curve(frames, keys(frames, task, method), column(task))
                if len(table):
                    plots.curve(axes, table["step"], table, style.look(method))
            is_loss = column(task) == "val_loss"
            axes.set(xlabel="Steps", title=TASKS.get(task, task))
            axes.set_ylabel("Validation loss" if is_loss else "Validation top-1 (%)")
            axes.grid(True)
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))
    return figure


def table(frames: Frames) -> Table:
    rows = [
        {
            "task": TASKS.get(task, task),
            "method": style.look(method).label,
            "validation top-1": final(frames, found, "val_top1"),
            "validation loss": final(frames, found, "val_loss"),
        }
        for task in tasks(frames)
        for method in METHODS
        if (found := keys(frames, task, method))
    ]
    return Table("At the end of the training", pd.DataFrame(rows), {"validation top-1": "%"})


def caption(frames: Frames, profile: str) -> str:
    return (
        "Validation during training with dense gradients, Top-k, Gaussian-k and Random-k (without "
        "feedback), the "
        f"sparse ones at one density; mean and interval over seeds. {captions.setting(frames)} "
        f"{captions.training(frames)}"
    )


def claims() -> list[Claim]:
    return [
        *(_near(task, label, method) for task, label in TASKS.items() for method in ("topk", "gaussiank")),
        *(_above(task, label) for task, label in TASKS.items()),
    ]


def _near(task: str, label: str, method: str) -> Claim:
    return Claim(
        text=f"{style.look(method).label} loses no obvious accuracy, {label}: dense less it",
        paper=0.0,
        unit="points",
        source="abstract: without an obvious impact on the model accuracy",
        kind="shape",
        tolerance=NEAR,
        reason="Obvious is more than a point of top-1.",
        ours=lambda frames: _gap(frames, task, "dense", method),
    )


def _above(task: str, label: str) -> Claim:
    return Claim(
        text=f"Top-k ends above Random-k, {label}: by how much",
        paper="Top-k converges like dense, Random-k slowly",
        unit="points",
        source="section on the bound: what Top-k leaves out is less than what Random-k does",
        kind="ordering",
        tolerance=0.0,
        reason="Any margin counts; top-1, of the next word too.",
        ours=lambda frames: _gap(frames, task, "topk", "randomk"),
    )


def _gap(frames: Frames, task: str, above: str, below: str) -> Value | None:
    here, there = keys(frames, task, above), keys(frames, task, below)
    return final_difference(frames, here, there, "val_top1") if here and there else None
