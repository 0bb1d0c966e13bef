"""Step times of a run: which steps are warm, what each warm step and phase took; and what runs came to.

Times are seconds. A step lasts as long as its slowest rank. Means rather than medians, because the parts of
a stacked bar must add up to the whole, and because the papers report means.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records import phases
from analysis.records.columns import LAST_EPOCH_OUTCOMES, MEAN_OUTCOMES, OUTCOMES
from analysis.records.frames import Frames, cache_by_frames, note_read_keys, steps_of_run, value_of_run

WINDOW = 5  # steps in a rolling median
SETTLED = 0.02  # warm: the rolling median moves by less than this fraction from one step to the next
ENOUGH_LAUNCHES = 3  # with so many there is an interval over runs, and over launches in place of their blocks
# Data sets of text, with which the names of their tasks end: their loss is the mean of -ln p of a word.
TEXTS = ("ptb", "ptb64", "ptbchars", "text", "text64", "textchars")
# Numbers of a step that add up over a round, and what they are called of it.
ROUNDS = {"wire_bytes": "round_bytes", "messages": "round_messages"}
LAUNCHES, BLOCKS = "launches", "blocks"  # kinds of units: groups of processes, and turns within one


class WarmSteps(NamedTuple):
    """A run's steps after its warm-up, and how many steps were left out."""

    steps: pd.DataFrame
    dropped: int  # at the beginning
    again: int = 0  # after interruptions
    stopped: int = 0  # in which a worker was suspended, wherever
    turns: int = 0  # in how many they were taken; of each the first step is left out, if it has more

    @property
    def n(self) -> int:
        """Number of warm steps."""
        return int(self.steps["step"].nunique())


def count_cold_steps(step_s: Sequence[float] | np.ndarray, at_least: int) -> int:
    """Return how many first steps to leave out: `at_least`, and until times settle, at most half.

    Times are settled when the rolling median moves by less than SETTLED.
    """
    times = np.asarray(step_s, dtype=float)
    most = len(times) // 2
    for first in range(min(at_least, most), most):
        here, next_ = (np.median(times[start : start + WINDOW]) for start in (first, first + 1))
        if abs(next_ - here) < SETTLED * here:
            return first
    return most


@cache_by_frames
def warm_steps(frames: Frames, key: str) -> WarmSteps:
    """Return the steps of a run after its warm-up, which ends at the same step on every rank.

    After an interruption the machine has to warm up again, for as long. A part of the run that is shorter
    than its warm-up is left out as a whole, unless no other steps would remain.
    """
    note_read_keys([key])
    steps = steps_of_run(frames, key)
    stopped = (
        np.unique(steps["step"].to_numpy()[steps["stops"].to_numpy() > 0])
        if "stops" in steps
        else np.array([])
    )
    if "block" in steps and steps["block"].notna().any():
        return _of_turns(steps, stopped)
    steps = steps[~np.isin(steps["step"], stopped)] if len(stopped) else steps
    slowest = slowest_rank_seconds(steps)
    at_least = int(value_of_run(frames, key, "timing.warmup_steps"))
    text = value_of_run(frames, key, "resumed")  # older frames do not have the column
    resumed = json.loads(text) if isinstance(text, str) else []
    bounds = [0, *np.searchsorted(slowest.index, resumed), len(slowest)]
    parts = [slowest.to_numpy()[first:end] for first, end in itertools.pairwise(bounds)]
    cold = [count_cold_steps(part, at_least) for part in parts]
    if len(parts) > 1:
        longer = [max(few, min(at_least, len(part))) for part, few in zip(parts, cold, strict=True)]
        cold = longer if sum(longer) < len(slowest) else cold
    is_warm = np.concatenate([np.arange(len(part)) >= few for part, few in zip(parts, cold, strict=True)])
    kept = is_warm[np.searchsorted(slowest.index, steps["step"])]
    return WarmSteps(steps[kept], cold[0], sum(cold[1:]), len(stopped))


def _of_turns(steps: pd.DataFrame, stopped: np.ndarray) -> WarmSteps:
    """Return the warm steps of a variant's turns.

    Block 0 is warm-up, and the first step after another variant's turn finds none of its data in the caches.
    """
    number, block = steps["step"].to_numpy(), steps["block"].to_numpy()
    _, turn = np.unique(block, return_inverse=True)
    first = np.full(len(steps), np.inf)
    np.minimum.at(first, turn, number)
    _, once = np.unique(number, return_index=True)  # every rank has each step
    length = np.bincount(turn[once], minlength=len(steps))
    is_first = (number == first[turn]) & (length[turn] > 1)
    kept = (block > 0) & ~is_first & ~np.isin(number, stopped)
    cold = len(np.unique(number[block == 0]))
    return WarmSteps(steps[kept], cold, stopped=len(stopped), turns=len(np.unique(block[kept])))


def warm_step_seconds_slowest_rank(frames: Frames, key: str) -> np.ndarray:
    """Return each warm step's time on its slowest rank, which training waits for, (steps,)."""
    return slowest_rank_seconds(warm_steps(frames, key).steps).to_numpy()


def warm_phase_seconds(frames: Frames, key: str) -> pd.DataFrame:
    """Return means over ranks: a row per warm step, columns `step`, each phase, and `unaccounted`."""
    return _phases(warm_steps(frames, key).steps)


def slowest_rank_seconds(steps: pd.DataFrame) -> pd.Series[float]:
    """Return each step's time on its slowest rank, by step, of one run's rows."""
    numbers, order, starts = _by_step(steps)
    times = steps["step_s"].to_numpy()[order]
    slowest = np.maximum.reduceat(times, starts) if len(starts) else times
    return pd.Series(slowest, pd.Index(numbers, name="step"), name="step_s")


def _phases(warm_steps: pd.DataFrame) -> pd.DataFrame:
    names = ["step_s", *(f"{phase}_s" for phase in phases.NAMES if f"{phase}_s" in warm_steps)]
    values = warm_steps[names].to_numpy(dtype=float)
    there = ~np.isnan(values).all(axis=0)
    # A phase that only one rank has (validate) takes no time on the others.
    values = np.nan_to_num(values[:, there], nan=0.0, posinf=np.inf, neginf=-np.inf)
    numbers, order, starts = _by_step(warm_steps)
    ranks = np.diff([*starts, len(order)])
    means = np.add.reduceat(values[order], starts) / ranks[:, None] if len(starts) else values
    columns = [name.removesuffix("_s") for name, is_there in zip(names, there, strict=True) if is_there]
    unaccounted = means[:, 0] - means[:, 1:].sum(axis=1)
    table: pd.DataFrame = pd.DataFrame(means, pd.Index(numbers, name="step"), columns).assign(
        unaccounted=unaccounted
    )
    return table


def _by_step(steps: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the step numbers, rising; an order of the rows by step; and where each step begins in it."""
    number = steps["step"].to_numpy()
    order = np.argsort(number, kind="stable")
    numbers, starts = np.unique(number[order], return_index=True)
    return numbers, order, starts


def used_precisions(runs: pd.DataFrame) -> pd.Series[Any]:
    """Return the precision that each run multiplied in, or the one asked for, where that is not recorded."""
    asked = runs.get("precision", pd.Series(index=runs.index, dtype=object))
    got: pd.Series[Any] = runs.get("provenance.precision", asked).fillna(asked)
    return got


class ReplicationUnits(NamedTuple):
    """Measurements: a row each, of mean seconds per phase, `step`, `unaccounted`, `slowest`.

    `slowest` is the step on its slowest rank. Rows are indexed by (group, block) or by seed, in their order.
    """

    means: pd.DataFrame
    of: str  # BLOCKS or LAUNCHES


@cache_by_frames
def has_blocks(frames: Frames, keys: Sequence[str]) -> bool:
    """Tell whether all these runs took turns, block by block."""
    if "block" not in frames.steps or "group" not in frames.runs:
        return False
    steps = frames.steps[frames.steps["key"].isin(keys)]
    groups = frames.runs.loc[frames.runs["key"].isin(keys), "group"]
    return len(steps) > 0 and bool(steps["block"].notna().all() and groups.notna().all())


@cache_by_frames
def are_blocks_units(frames: Frames, keys: Sequence[str]) -> bool:
    """Decide whether blocks are the units: all runs have some, in fewer than ENOUGH_LAUNCHES launches."""
    if not has_blocks(frames, keys):
        return False
    launches = frames.runs.loc[frames.runs["key"].isin(keys), "group"]
    return bool(launches.nunique() < ENOUGH_LAUNCHES)


@cache_by_frames
def replication_units(frames: Frames, keys: Sequence[str], by_block: bool | None = None) -> ReplicationUnits:
    """Return the units of replication of a method's runs.

    Args:
        by_block: take blocks, or launches; None: as `are_blocks_units` decides. Methods that are paired
            need the same choice.
    """
    by_block = are_blocks_units(frames, keys) if by_block is None else by_block
    parts = []
    for place, key in enumerate(keys):
        steps = warm_steps(frames, key).steps
        table = _phases(steps).assign(slowest=slowest_rank_seconds(steps))
        if by_block:
            _, order, starts = _by_step(steps)
            block = steps["block"].to_numpy()[order][starts]
            group = np.full(len(table), value_of_run(frames, key, "group"), dtype=object)
            parts.append(table.groupby([group, pd.Series(block, table.index, name="block")]).mean())
        else:
            seed = value_of_run(frames, key, "seed") if "seed" in frames.runs else place
            parts.append(table.mean().to_frame(seed).T)
    # A phase that one of them does not have takes no time there.
    means = pd.concat(parts).fillna(0.0)
    by_unit: pd.DataFrame = means.groupby(level=list(range(means.index.nlevels))).mean()
    return ReplicationUnits(by_unit, BLOCKS if by_block else LAUNCHES)


def mean_phase_seconds(frames: Frames, keys: Sequence[str]) -> pd.Series[float]:
    """Return mean seconds of each phase, `unaccounted` and `step`: of ranks and warm steps, then of units."""
    means: pd.Series[float] = replication_units(frames, keys).means.drop(columns="slowest").mean()
    return means


def phase_summary(frames: Frames, keys: Sequence[str]) -> pd.DataFrame:
    """Return a table of phases: `mean_phase_seconds`, and the median over the n warm steps of all runs."""
    table = pd.concat([warm_phase_seconds(frames, key) for key in keys])
    summary: pd.DataFrame = pd.DataFrame(
        {"mean": mean_phase_seconds(frames, keys), "median": table.median(), "n": len(table)}
    )
    return summary


def add_outcomes(frames: Frames) -> Frames:
    """Return the frames with the outcomes of each run in `runs`.

    Outcomes that a run has already are kept: the steps behind them may not be there any more.
    """
    runs = frames.runs
    if not len(runs):
        return frames
    found = compute_outcomes(frames).reindex(runs["key"]).reset_index(drop=True)
    known = runs.reindex(columns=list(OUTCOMES)).astype(float).reset_index(drop=True)
    added = known.where(known.notna(), found)
    others = runs.drop(columns=[name for name in OUTCOMES if name in runs]).reset_index(drop=True)
    return frames._replace(runs=pd.concat([others, added], axis="columns"))


def compute_outcomes(frames: Frames) -> pd.DataFrame:
    """Return the outcomes of each run, by its key; NaN for what was not measured.

    `step_s` is the mean over warm steps of the time on the slowest rank, as `steps.units` has it. Bytes and
    densities are means over all recorded steps of rank 0, of trainings whose steps are not there over epochs.
    """
    runs = frames.runs.set_index("key")
    found: pd.DataFrame = pd.DataFrame(index=runs.index, columns=list(OUTCOMES), dtype=float)
    last = frames.epochs.sort_values("epoch", kind="stable").groupby("key").tail(1).set_index("key")
    for column in LAST_EPOCH_OUTCOMES:
        found[column] = last.reindex(columns=[column])[column].reindex(runs.index)
    with np.errstate(over="ignore"):  # of a training that is about to diverge it is infinite
        perplexity = pd.Series(np.exp(found["val_loss"].astype(float)), runs.index)
    datasets = runs.get("task.name", pd.Series("", runs.index)).map(lambda name: str(name).rpartition("_")[2])
    found["val_perplexity"] = perplexity.where(datasets.isin(TEXTS))
    found["step_s"] = _step_seconds(frames).reindex(runs.index)
    samples = pd.to_numeric(runs.get("task.batch_size", pd.Series(np.nan, runs.index)))  # vector: has none
    found["samples_per_s"] = pd.to_numeric(runs["workers"]) * samples / found["step_s"]
    # A number that no run here has is no column of what `load` returns.
    of_rank0, of_epochs = (
        frame.reindex(columns=["key", *MEAN_OUTCOMES]).groupby("key").mean()
        for frame in (frames.steps[frames.steps["rank"] == 0], frames.epochs)
    )
    means = of_rank0.reindex(runs.index).combine_first(of_epochs)
    for column in MEAN_OUTCOMES:
        found[column] = means[column].reindex(runs.index)
    of_rounds = mean_sent_per_round(frames)
    for column, name in ROUNDS.items():
        found[name] = of_rounds[column].reindex(runs.index)
    # Records have dates in any form of the standard, and perhaps in years that pandas has not.
    began, ended = (
        pd.to_datetime(pd.Series(runs.get(name), runs.index), utc=True, format="ISO8601", errors="coerce")
        for name in ("started", "ended")
    )
    found["took_s"] = (ended - began).dt.total_seconds()
    return found


def mean_sent_per_round(frames: Frames) -> pd.DataFrame:
    """Return the bytes and messages that rank 0 sent in a round, by key: the mean over whole rounds.

    A round has `method.every` steps.

    What is sent within a round counts in it, and what only some rounds send in those: of fragments each once,
    of a moment with a longer period its share. Of a training whose steps are not there, up to the last
    validation that ends a round; without one it is NaN.
    """
    runs = frames.runs.set_index("key")
    every = pd.to_numeric(runs.get("method.every", pd.Series(np.nan, runs.index)))
    steps = frames.steps[frames.steps["rank"] == 0].reindex(columns=["key", "step", *ROUNDS])
    period = steps["key"].map(every).astype(float)  # of no steps they would be texts
    of_round = steps.groupby(["key", (steps["step"] // period).rename("round")])[[*ROUNDS]]
    lengths = of_round.size()
    is_whole = lengths == every.reindex(lengths.index, level="key")
    of_steps = of_round.sum(min_count=1)[is_whole].groupby(level="key").mean()

    epochs = frames.epochs.reindex(columns=["key", "step", *ROUNDS]).sort_values(["key", "step"])
    made = epochs.groupby("key")["step"].diff().fillna(epochs["step"])
    together = epochs[[*ROUNDS]].mul(made, axis="index").groupby(epochs["key"]).cumsum()
    number = epochs["step"] / epochs["key"].map(every).astype(float)
    ends = (number % 1 == 0) & (number > 0)
    of_epochs = together.div(number, axis="index")[ends].groupby(epochs["key"]).last()
    found: pd.DataFrame = of_steps.reindex(runs.index).combine_first(of_epochs.reindex(runs.index))
    return found


def _step_seconds(frames: Frames) -> pd.Series[Any]:
    """Return mean seconds of a warm step on its slowest rank, by key."""
    runs, steps = frames.runs.set_index("key"), frames.steps
    resumed = runs["resumed"].notna() if "resumed" in runs else pd.Series(False, runs.index)
    special = {*runs.index[resumed], *steps.loc[steps["block"].notna(), "key"]}
    if "stops" in steps:
        special |= {*steps.loc[steps["stops"] > 0, "key"]}
    found = dict[str, float]()
    for key, times in steps.groupby(["key", "step"])["step_s"].max().groupby(level="key"):
        if key in special:  # `replication_units` is right for all of them, and takes milliseconds for each
            found[str(key)] = float(
                replication_units(frames, [str(key)], by_block=False).means["slowest"].iloc[0]
            )
        else:
            seconds = times.to_numpy()
            cold = count_cold_steps(seconds, int(runs["timing.warmup_steps"][key]))
            found[str(key)] = float(np.mean(seconds[cold:]))
    by_key: pd.Series[Any] = pd.Series(found, dtype=float)
    return by_key
