"""What the items of Yoon and Oh 2022 share: their runs, the paper's numbers, and finding a method's runs.

Daegun Yoon and Sangyoon Oh, "Empirical Analysis on Top-k Gradient Sparsification for Distributed Deep
Learning in a Supercomputing Environment", 2022. Numbers marked [log] are recomputed from the authors' public
job logs (github.com/kljp/topk_results); one run per configuration, no seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

from analysis.frames import Frames
from analysis.remembered import remembered
from analysis.style import method_id

METHODS = ("dense", "topk", "randomk")
PAPER = "Yoon and Oh 2022 (VGG-16, A100 and V100)"

# What the paper ran, as columns of the records (`claims.reduced`); conf/recipe/yoon2022.yaml is the same.
TIMING_SCALE: dict[str, Any] = {
    "task.name": "vgg16_cifar10", "task.batch_size": 128, "workers": 8, "method.density": 0.001,
    "precision": {"cuda": "tf32", "cpu": "fp32"},
}  # fmt: skip
TRAINING_SCALE = TIMING_SCALE | {
    "steps_total": 6762, "method.density_warmup": "[0.015625, 0.004]", "task.lr": 0.1,
    "task.lr_milestones": "[81, 122, 155]",
}  # fmt: skip

# How each profile scales the paper's experiment. The recipe (conf/recipe/yoon2022.yaml) is the paper's own.
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {
    "smoke": [1],
    "laptop": [1, 2, 3, 4],
    "paper": list[int](),
}  # with --all: the shipped figures have them
# Groups of processes; in each, all methods take turns.
REPEATS = {"smoke": [0, 1], "laptop": [0], "paper": [0, 1, 2]}
TIMING = {
    "smoke": [
        "task=cnn_digits", "cluster=local", "workers=2", "task.batch_size=16", "timing.warmup_steps=2",
    ],
    "laptop": [
        "task=vgg16_cifar10", "cluster=local", "workers=2", "task.batch_size=32", "timing.warmup_steps=2",
    ],
    "paper": ["cluster=virtual"],
}  # fmt: skip
# The density of 136 of the 138 epochs throughout: a timed run is shorter than the warm-up.
TOPK, RANDOMK = (["method=topk", "method.density_warmup=[]"], ["method=randomk", "method.density_warmup=[]"])
TIMED: dict[str, Sequence[str]] = {
    "dense": ["method=dense"],
    "topk": TOPK,
    "randomk": RANDOMK,  # as published, by torch.randperm
    "randomk-hash": [*RANDOMK, "method.sampling=hash"],
}
# The paper's clock, step by step, whatever the batch: 138 epochs of 49 steps. The number of optimiser steps
# decides who wins (480: Random-k; 3,900: Top-k), so smaller batches, and none of the 6,762 steps less.
CLOCK = ["train.epoch_steps=49", "task.lr_warmup_epochs=5", "task.lr_milestones=[81,122,155]"]
CONVERGENCE = {
    "smoke": [
        "task=cnn_digits", "cluster=virtual", "workers=2", "train.epochs=2", "timing.mode=production",
    ],
    "laptop": [
        "task=cnn_cifar10", "cluster=virtual", "task.batch_size=16", *CLOCK, "train.validate_every=3",
        "timing.mode=production",
    ],
    "paper": ["cluster=virtual", "train.validate=epoch", "timing.mode=production"],
}  # fmt: skip
SMALL_MODEL_DENSITY = ["method.density=0.01"]  # 0.001 of 34,058 parameters would be 34 numbers a step


def timing_runs(
    profile: str,
    mode: str,
    variants: Mapping[str, Sequence[str]] = TIMED,
    *words: str,
    scales: Mapping[str, list[str]] = TIMING,
    repeats: Mapping[str, Sequence[int]] = REPEATS,
) -> list[list[str]]:
    """The overrides of runs in which these variants take turns, with `words` for all of them.

    `as_published` validates inside its timed loop, as theirs.
    """
    validate = "epoch" if mode == "as_published" else "never"
    named = ",".join(f"{name}:'{' '.join(own)}'" for name, own in variants.items())
    shared = [*_start(profile, scales), f"train.validate={validate}", f"timing.mode={mode}", *words]
    return [[*shared, f"variants={{{named}}}", f"seed={seed}"] for seed in repeats[profile]]


def convergence_runs(profile: str, seeds: Mapping[str, Sequence[int]] = SEEDS) -> list[list[str]]:
    """The overrides of one whole training per method and seed."""
    shared = _start(profile, CONVERGENCE)
    return [
        [*shared, f"method={method}", *_density(method, profile), f"seed={seed}"]
        for seed in seeds[profile]
        for method in METHODS
    ]


@remembered
def keys(frames: Frames, method: str, mode: str = "") -> list[str]:
    """The runs of a method (and timing mode), in the order of their seeds."""
    if not len(frames.runs):
        return []
    runs = frames.runs.sort_values("seed") if "seed" in frames.runs else frames.runs
    return [
        str(run["key"])
        for run in _rows(runs)
        if method_id(run) == method and mode in ("", run["timing.mode"])
    ]


def present(frames: Frames, mode: str = "") -> list[str]:
    """The methods that have runs, the paper's first.

    Raises:
        ValueError: none has.
    """
    found = dict.fromkeys(method_id(run) for run in _rows(frames.runs))
    ordered = dict.fromkeys((*METHODS, *found))
    methods = [method for method in ordered if keys(frames, method, mode)]
    if not methods:
        raise ValueError(f"nothing to draw: there is no run{f' in timing mode {mode}' if mode else ''}")
    return methods


# Of a run's hundred columns those that say which method it is, and how it was timed.
TELLING = (
    "key", "variant", "method.name", "method.scope", "method.feedback", "select", "overlap", "timing.mode",
)  # fmt: skip


def _rows(runs: pd.DataFrame) -> list[dict[str, Any]]:
    told = runs[[name for name in TELLING if name in runs]]
    return [{str(name): value for name, value in run.items()} for run in told.to_dict("records")]


# Rank 0's last validation, after epoch 138 of 49 steps [log, jobs 130673, 130672, 130675].
STEPS_PER_EPOCH = 49
TOP1 = {"dense": 92.99, "topk": 91.52, "randomk": 70.98}
VAL_LOSS = {"dense": 0.420, "topk": 0.478, "randomk": 0.816}


# Their replicates: the same configuration on two machines each, the last epoch, by number of workers [log,
# jobs 130673 and 130263, 130672 and 130264; of 4 workers 129436 and 129440, 129435 and 129439].
REPLICATES: dict[str, dict[int, dict[str, tuple[float, float]]]] = {
    "val_top1": {
        8: {"dense": (92.989, 92.840), "topk": (91.515, 90.872)},
        4: {"dense": (93.246, 93.107), "topk": (92.435, 92.534)},
    },
    "val_loss": {
        8: {"dense": (0.4197, 0.4403), "topk": (0.4781, 0.4647)},
        4: {"dense": (0.4423, 0.4566), "topk": (0.5387, 0.5182)},
    },
}  # fmt: skip


def spread(column: str, workers: int = 8) -> float:
    """How far another run of theirs may end from the one that they published, at 95 %.

    Student's quantile times the standard deviation within the pairs of REPLICATES with so many workers, which
    has as many degrees of freedom as there are pairs. Runs with another number of workers end elsewhere, and
    are not pooled with them.
    """
    pairs = np.array(list(REPLICATES[column][workers].values()))
    deviation = math.sqrt(float(((pairs[:, 0] - pairs[:, 1]) ** 2).mean()) / 2)
    return float(scipy.stats.t.ppf(0.975, len(pairs))) * deviation


SPREAD = "Where another run of theirs may end, at 95 %, by their replicates on A100 and V100 (8 workers)."
GAP_SPREAD = "give or take what the difference of two runs may vary by, at 95 %, by their replicates."
# Claims that follow from one cause, over all items.
TOPK_BEHIND = "Top-k behind dense in training"
RANDOMK_BEHIND = "Random-k behind Top-k in training"
RANDOMK_SELECTION = "what drawing Random-k's indices costs"
TOPK_SELECTION = "what torch.topk costs"
FUSED_SELECTION = "what the fused selection costs"


def gap_spread(column: str) -> float:
    """The same for the difference of two methods, each of which was run once."""
    return math.sqrt(2) * spread(column)


class Iteration(NamedTuple):
    """One bar of their Fig. 4, in milliseconds; `total` is 128 samples over the mean logged speed."""

    total: float
    forward: float
    backward: float
    select: float
    communication: float
    io: float  # in none of their bars: fetching the batch
    stall: float  # nor this: an iteration's share of rank 0's validations, for which the others wait

    def parts(self) -> dict[str, float]:
        """Our phase names; their communication is the final wait in synchronize(), unsplit."""
        names = ("forward", "backward", "select", "synchronize", "io", "validate")
        known = dict(zip(names, self[1:], strict=True))
        return known | {"unaccounted": self.total - sum(known.values())}


# A100, 8 workers [log]; the paper's text gives communication only. The stall is what analysis.published takes
# out of an iteration.
ITERATIONS = {
    "dense": Iteration(58.89, 4.55, 22.96, 0.0, 1.24, 3.43, 23.96),
    "topk": Iteration(275.00, 4.54, 11.18, 211.78, 16.86, 3.26, 23.97),
    "randomk": Iteration(65.44, 4.57, 27.87, 0.19, 1.00, 3.71, 24.62),
}
SPEED = {"dense": 17387.49, "topk": 3723.61, "randomk": 15648.40}  # samples/s, 8 A100, the paper's text
V100_SPEED = {"dense": 12651.83, "topk": 3743.28}


def _start(profile: str, scales: Mapping[str, list[str]]) -> list[str]:
    if profile not in scales:
        raise ValueError(f"no profile {profile!r}; there are: {', '.join(scales)}")
    return ["recipe=yoon2022", f"profile={profile}", *scales[profile]]


def _density(method: str, profile: str) -> list[str]:
    return SMALL_MODEL_DENSITY if profile != "paper" and method != "dense" else []
