"""The scale of runs: in what they differ from what a paper ran."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.pictures import captions
from analysis.pictures.numbers import number
from analysis.records.frames import Frames

REDUCED = "reduced scale"
EXAMPLES = "examples"  # no column: of all workers in all steps
# What the scale of a run is, as columns of `frames.runs`, and how each is called.
SCALE_NAMES = {
    "task.name": "task", "task.batch_size": "batch", "workers": "workers", "steps_total": "steps",
    EXAMPLES: "examples seen", "train.epochs": "epochs", "method.density": "density",
    "method.density_warmup": "density warm-up", "method.feedback": "feedback", "task.momentum": "momentum",
    "task.lr": "learning rate", "task.lr_milestones": "decays at epochs", "precision": "precision",
}  # fmt: skip


def reduced(frames: Frames, declared: Mapping[str, Any]) -> str:
    """Differences of the runs from what the paper ran, in words; empty where there are none.

    Args:
        declared: the paper's values by column of `frames.runs`, as the item states them in SCALE; where the
            value depends on the device or the task, a mapping from either to value. A run without a field
            (dense has no density) does not differ in it, nor one of a task that a mapping leaves out.
    """
    if not len(frames.runs):
        return ""
    factors = ("steps_total", "workers", "task.batch_size")
    if {*factors} <= {*frames.runs}:
        seen = frames.runs[[*factors]].astype(float).prod(axis="columns", skipna=False)
        frames = frames._replace(runs=frames.runs.assign(**{EXAMPLES: seen}))
    found = (_difference(frames, column, paper) for column, paper in declared.items())
    differences = ", ".join(filter(None, found))
    return f"{REDUCED}: {differences}" if differences else ""


def _difference(frames: Frames, column: str, paper: Any) -> str:
    """'batch 16 instead of 128'; empty where no run differs."""
    runs = frames.runs
    if column not in runs:
        return ""
    found = set()
    none = [None] * len(runs)
    for device, task, value in zip(
        runs.get("device", none), runs.get("task.name", none), runs[column], strict=True
    ):
        expected = paper.get(device, paper.get(task, value)) if isinstance(paper, Mapping) else paper
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if not missing and value != expected:
            found.add((value, expected))
    # Numbers by their size, then words: the order of the records says nothing.
    ordered = sorted(found, key=lambda pair: (isinstance(pair[0], str), pair[0]))
    told = [f"{_plain(value)} instead of {_plain(expected)}" for value, expected in ordered]
    return f"{SCALE_NAMES[column]} {captions.listed(dict.fromkeys(told))}" if told else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else number(value)
    return "none" if value == "[]" else value
