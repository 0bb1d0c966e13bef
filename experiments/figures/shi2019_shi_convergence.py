"""Shi et al. 2019: TopK-, GaussianK-, Random-k- and dense SGD on several models."""

from __future__ import annotations

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames, keys_of
from analysis.stats import Value, curve, final, final_difference
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures._runs import MORE_SEEDS, SEEDS, TRAINED, crossed, each, with_density
from experiments.figures.papers import claim

TITLE = "TopK-, GaussianK-, Random-k- and dense SGD on MNIST, CIFAR-10 and the Penn Treebank"
TASKS = {
    "fnn3_mnist": "FNN-3, MNIST", "lenet5_mnist": "LeNet-5, MNIST", "resnet20_cifar10": "ResNet-20, CIFAR-10",
    "vgg16_cifar10": "VGG-16, CIFAR-10", "smalllstm_ptb": "small LSTM, PTB", "lstm_ptb": "LSTM, PTB",
    "cnn_cifar10": "small CNN, CIFAR-10",
}  # fmt: skip
METHODS: dict[str, RunSettings] = {
    "dense": {"method": "dense"},
    "topk": {"method": "topk"},
    "gaussiank": {"method": "gaussiank"},
    "randomk": {"method": "randomk", "method.sampling": "hash"},
}
_LAPTOP: RunSettings = {"workers": 4, "train.epoch_steps": 100, "train.epochs": 10}
TRAININGS: dict[str, list[RunSettings]] = {
    "smoke": [{"task": "cnn_digits", "workers": 2, "task.batch_size": 16, "train.epochs": 2}],
    "laptop": [
        {"task": "fnn3_mnist", "task.batch_size": 32, **_LAPTOP},
        {"task": "lenet5_mnist", "task.batch_size": 32, **_LAPTOP},
        {"task": "smalllstm_ptb", "task.batch_size": 5, **_LAPTOP},
    ],
    "paper": [
        {"task": task, "workers": 16, "train.epochs": 140}
        for task in ("fnn3_mnist", "lenet5_mnist", "resnet20_cifar10", "vgg16_cifar10", "lstm_ptb")
    ],
}
DENSITY = {"smoke": 0.05, "laptop": 0.01, "paper": 0.001}


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[Run]:
    methods = with_density(METHODS, DENSITY[profile]).values()
    return crossed({**TRAINED, "profile": profile}, each("seed", seeds), TRAININGS[profile], methods)


def keys(frames: Frames, task: str, method: str) -> list[str]:
    return keys_of(frames, {"task.name": task, "method.name": method})


def tasks(frames: Frames) -> list[str]:
    there = set(captions.values(frames, "task.name"))
    return [*(task for task in TASKS if task in there), *sorted(there - set(TASKS))]


def column(task: str) -> str:
    """Accuracy; of the next word its loss, which is the logarithm of the perplexity."""
    return "val_loss" if task.endswith("_ptb") else "val_top1"


def draw(frames: Frames, profile: str) -> plots.Figure:
    return plots.picture([_panel(frames, task) for task in tasks(frames)], 2.6)


def _panel(frames: Frames, task: str) -> plots.Panel:
    curves = {method: curve(frames, keys(frames, task, method), column(task)) for method in METHODS}
    return plots.curves(
        [plots.Curve(style.look(method), table["step"], table) for method, table in curves.items()],
        xlabel="Steps", title=TASKS.get(task, task),
        ylabel="Validation loss" if column(task) == "val_loss" else "Validation top-1 (%)",
    )  # fmt: skip


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
        *(
            claim(
                "shi2019.no-loss", _gap, task, "dense", method, case=f"{method}.{task}",
                method=style.look(method).label, label=label,
            )
            for task, label in TASKS.items()
            for method in ("topk", "gaussiank")
        ),
        *(
            claim("shi2019.above-randomk", _gap, task, "topk", "randomk", case=task, label=label)
            for task, label in TASKS.items()
        ),
    ]  # fmt: skip


def _gap(frames: Frames, task: str, above: str, below: str) -> Value | None:
    return final_difference(frames, keys(frames, task, above), keys(frames, task, below), "val_top1")
