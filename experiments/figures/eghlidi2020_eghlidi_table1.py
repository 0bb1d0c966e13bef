"""Table 1 of Eghlidi and Jaggi 2020: accuracy of six schemes, two scopes and one to eight workers."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions
from analysis.records.frames import Frames, keys_of
from analysis.stats import Value, final, final_difference
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures._runs import MORE_SEEDS, SEEDS
from experiments.figures.eghlidi2020_eghlidi_table1_published import LOOKS, SCOPES, TABLE, WORKERS, accuracy
from experiments.figures.papers import claim

TITLE = "Test accuracy by scheme, scope and number of workers"
COLUMN = "val_top1"
SCALE = {
    "task.name": "resnet18_cifar10", "task.batch_size": 128, "train.epochs": 300, "method.density": 0.01,
}  # fmt: skip
# Line 6 of their Algorithm 1 has the learning rate inside the residual.
INSIDE = {"method.feedback": "learning_rate"}
REDUCED = {**INSIDE, "method.exchange": "allreduce"}
SCHEMES: dict[str, RunSettings] = {
    "Standard SGD": {"method": "dense"},
    "Top-k": {"method": "topk", **INSIDE},
    "Random-k (allGather)": {"method": "randomk", **INSIDE, "method.sampling": "hash"},
    "Random-k (allReduce)": {
        "method": "randomk", **REDUCED, "method.shared": True, "method.sampling": "hash",
    },
    "Block-random-k (allGather)": {"method": "blockrandomk", **INSIDE},
    "Block-random-k (allReduce)": {"method": "blockrandomk", **REDUCED},
}  # fmt: skip
COLLAPSING = "Block-random-k (allReduce)"
SIGNATURE = ("Standard SGD", "Top-k", COLLAPSING)  # of the laptop: what the table is known for
RATES = {"layer-wise": 0.1, "global": 0.01}  # of one worker; of dense training the first
SCOPE_NAMES = {"layer-wise": "layer", "global": "global"}  # ours
# Their sparsified optimiser, released in mlbench-core (optim/pytorch/optim.py), has none; with 0.9, as their
# text has it for all, Block-random-k of one worker ended at chance (small CNN, one seed, not stored).
NO_MOMENTUM = {"task.momentum": 0}
TRAININGS: dict[str, RunSettings] = {
    "smoke": {"task": "cnn_digits", "task.batch_size": 16, "train.steps": 20, "task.lr_warmup_epochs": 0},
    "laptop": {
        "task": "cnn_cifar10", "task.batch_size": 16, "task.lr_warmup_epochs": 0,
        "task.lr_milestones": [150, 250], "train.epoch_steps": 13, "train.epochs": 300,
        "train.validate_every": 75,
    },
    "paper": {
        "task": "resnet18_cifar10", "task.batch_size": 128, "train.epochs": 300, "train.validate_every": 10,
    },
}  # fmt: skip


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: list[int]) -> list[Run]:
    shared = {
        "recipe": "eghlidi2020", "profile": profile, "cluster": "virtual", "timing.mode": "production",
        **TRAININGS[profile],
    }  # fmt: skip
    schemes = SCHEMES if profile == "paper" else SIGNATURE
    workers = (1, 2) if profile == "smoke" else WORKERS
    return [
        Run({
            **shared, **SCHEMES[scheme], **_momentum(scheme, profile), **_scope(scheme, scope, size),
            "workers": size, "seed": seed,
        })
        for seed in seeds
        for size in workers
        for scheme in schemes
        for scope in (SCOPES if scheme != "Standard SGD" else SCOPES[:1])
    ]  # fmt: skip


def _momentum(scheme: str, profile: str) -> RunSettings:
    """The small CNN has none in standard SGD either: with 0.9 and their learning rate it ended at chance (one
    seed, not stored).
    """
    return {} if scheme == "Standard SGD" and profile == "paper" else NO_MOMENTUM


def _scope(scheme: str, scope: str, size: int) -> RunSettings:
    """Scope and learning rate, which with them grows with the number of workers."""
    rate = {"task.lr": round(RATES[scope] * size, 2)}
    return rate if scheme == "Standard SGD" else {"method.scope": SCOPE_NAMES[scope], **rate}


def keys(frames: Frames, scheme: str, scope: str, size: int) -> list[str]:
    """The runs of one cell; standard SGD has no scope."""
    own = SCHEMES[scheme]
    chosen: dict[str, Any] = {"method.name": own["method"], "workers": size}
    if scheme != "Standard SGD":
        chosen["method.scope"] = SCOPE_NAMES[scope]
    if "random" in own["method"]:
        chosen["method.exchange"] = own.get("method.exchange", "allgather")
    return keys_of(frames, chosen)


def cell(frames: Frames, scheme: str, scope: str, size: int) -> Value | None:
    return final(frames, keys(frames, scheme, scope, size), COLUMN)


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        plots.curves(
            [line for scheme in LOOKS for line in _lines(frames, scheme, scope)],
            sizes=WORKERS, xlabel="Workers", title=f"{scope} selection",
        )
        for scope in SCOPES
        if len(frames.runs)
    ]  # fmt: skip
    return plots.picture(panels, 2.9, ylabel="Test accuracy (%)", ncols=3, sharey=True)


def _lines(frames: Frames, scheme: str, scope: str) -> list[plots.Curve]:
    """Ours, and the published one dotted."""
    values = {size: cell(frames, scheme, scope, size) for size in WORKERS}
    known = {size: value for size, value in values.items() if value is not None}
    printed = accuracy(scheme)[SCOPES.index(scope)]
    return [
        plots.Curve(LOOKS[scheme], list(known), list(known.values())),
        plots.Curve(LOOKS[scheme], WORKERS, printed, plots.DOTTED),
    ]


def table(frames: Frames) -> Table:
    rows = [
        {
            "scheme": scheme, "scope": scope, "workers": size, "accuracy": cell(frames, scheme, scope, size),
            "paper": float(accuracy(scheme)[SCOPES.index(scope)][WORKERS.index(size)]),
        }
        for scheme in TABLE for scope in SCOPES for size in WORKERS
        if keys(frames, scheme, scope, size)
    ]  # fmt: skip
    return Table("Test accuracy at the end", pd.DataFrame(rows), {"accuracy": "%", "paper": "%"})


def caption(frames: Frames, profile: str) -> str:
    standard = "with momentum 0.9" if profile == "paper" else "here without, too"
    return (
        "Test accuracy at the end of training against the number of workers, by scheme and by what is "
        "selected from: every tensor by itself, or the whole model. Dotted: Table 1 of Eghlidi and Jaggi "
        "2020, ResNet-18, 300 epochs, one run a cell. Learning rate 0.1 x workers, with global selection "
        "0.01 x workers, as theirs. Sparse schemes without momentum, as in the optimiser that they released, "
        f"and with the learning rate inside the residual (Algorithm 1); standard SGD {standard}. "
        f"{captions.setting(frames)} {captions.training(frames)}"
    )


def claims() -> list[Claim]:
    return [
        *(
            claim(
                "eghlidi2020.accuracy", cell, scheme, scope, size, case=f"{scheme}.{scope}.{size}",
                scheme=scheme, scope=scope, size=size,
                paper=float(accuracy(scheme)[SCOPES.index(scope)][at]),
            )
            for scheme in TABLE
            for scope in SCOPES
            for at, size in enumerate(WORKERS)
        ),
        claim(
            "eghlidi2020.block-loses-with-workers", _gap, (COLLAPSING, "global", 1),
            (COLLAPSING, "global", 8), id="block-loses",
        ),
        claim(
            "eghlidi2020.topk-layerwise-above", _gap, ("Top-k", "layer-wise", 8), ("Top-k", "global", 8),
            id="layerwise-above-global",
        ),
    ]  # fmt: skip


def _gap(frames: Frames, above: tuple[str, str, int], below: tuple[str, str, int]) -> Value | None:
    return final_difference(frames, keys(frames, *above), keys(frames, *below), COLUMN, by="workers")
