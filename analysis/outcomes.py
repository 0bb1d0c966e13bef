"""What runs came to, as columns of `Frames.runs`: accuracy, loss, time of a step, speed, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.frames import Frames
from analysis.steps import units, warm_up

LAST = ("train_loss", "val_loss", "val_top1", "val_top5", "test_loss", "test_top1")  # at the last epoch
MEANS = {"wire_bytes": "wire_bytes", "sent_density": "density", "update_density": "update_density"}
OUTCOMES = (*LAST, "step_s", "samples_per_s", *MEANS, "took_s")


def with_outcomes(frames: Frames) -> Frames:
    """These frames with the outcomes of each run; those that it has already are kept, for the steps behind
    them may not be there any more."""
    runs = frames.runs
    if not len(runs):
        return frames
    found = outcomes(frames).reindex(runs["key"]).reset_index(drop=True)
    known = runs.reindex(columns=list(OUTCOMES)).astype(float).reset_index(drop=True)
    added = known.where(known.notna(), found)
    others = runs.drop(columns=[name for name in OUTCOMES if name in runs]).reset_index(drop=True)
    return frames._replace(runs=pd.concat([others, added], axis="columns"))


def outcomes(frames: Frames) -> pd.DataFrame:
    """The outcomes of each run, by its key; NaN for what was not measured.

    `step_s` is the mean over warm steps of the time on the slowest rank, as `steps.units` has it. Bytes and
    densities are means over all recorded steps of rank 0, of trainings whose steps are not there over epochs.
    """
    runs = frames.runs.set_index("key")
    found: pd.DataFrame = pd.DataFrame(index=runs.index, columns=list(OUTCOMES), dtype=float)
    last = frames.epochs.sort_values("epoch", kind="stable").groupby("key").tail(1).set_index("key")
    for column in LAST:
        found[column] = last[column].reindex(runs.index)
    found["step_s"] = _step_seconds(frames).reindex(runs.index)
    samples = pd.to_numeric(runs.get("task.batch_size", pd.Series(np.nan, runs.index)))  # vector: has none
    found["samples_per_s"] = pd.to_numeric(runs["workers"]) * samples / found["step_s"]
    names = list(MEANS.values())
    of_rank0 = frames.steps[frames.steps["rank"] == 0].groupby("key")[names].mean()
    means = of_rank0.reindex(runs.index).combine_first(frames.epochs.groupby("key")[names].mean())
    for column, name in MEANS.items():
        found[column] = means[name].reindex(runs.index)
    began, ended = (pd.to_datetime(runs.get(name), utc=True) for name in ("started", "ended"))
    if began is not None and ended is not None:
        found["took_s"] = (ended - began).dt.total_seconds()
    return found


def _step_seconds(frames: Frames) -> pd.Series[Any]:
    """Mean seconds of a warm step on its slowest rank, by key."""
    runs, steps = frames.runs.set_index("key"), frames.steps
    resumed = runs["resumed"].notna() if "resumed" in runs else pd.Series(False, runs.index)
    special = set(runs.index[resumed]) | set(steps.loc[steps["block"].notna(), "key"].unique())
    there = set(steps["key"].unique())
    # `units` is right for all of them, and takes milliseconds for each.
    found = {
        key: float(units(frames, [key], by_block=False).means["slowest"].iloc[0]) for key in special & there
    }
    ordinary = steps[~steps["key"].isin(special)]
    slowest = ordinary.groupby(["key", "step"])["step_s"].max()
    for key, times in slowest.groupby(level="key"):
        seconds = times.to_numpy()
        cold = warm_up(seconds, int(runs["timing.warmup_steps"][key]))
        found[str(key)] = float(np.mean(seconds[cold:]))
    by_key: pd.Series[Any] = pd.Series(found, dtype=float)
    return by_key
