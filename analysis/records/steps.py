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
from analysis.records.frames import Frames, cache_by_frames, note_read_run_keys, steps_of_run, value_of_run

MEDIAN_WINDOW = 5  # steps in a rolling median
SETTLED_CHANGE = 0.02  # warm: the rolling median moves by less than this fraction from one step to the next
ENOUGH_LAUNCHES = 3  # with so many there is an interval over runs, and over launches in place of their blocks
# Data sets of text, with which the names of their tasks end: their loss is the mean of -ln p of a word.
TEXT_DATASETS = ("ptb", "ptb64", "ptbchars", "text", "text64", "textchars")
# Numbers of a step that add up over a round, and what they are called of it.
ROUND_COLUMNS = {"wire_bytes": "round_bytes", "messages": "round_messages"}
LAUNCHES, BLOCKS = "launches", "blocks"  # kinds of units: groups of processes, and turns within one


class WarmSteps(NamedTuple):
    """A run's rows of `steps` after its warm-up, and how many steps were left out."""

    steps: pd.DataFrame
    dropped_at_start: int
    dropped_after_resuming: int = 0
    dropped_suspended: int = 0  # in which a worker was suspended, wherever
    turn_count: int = 0  # of each turn the first step is left out, if it has more

    @property
    def step_count(self) -> int:
        """Number of warm steps."""
        return int(self.steps["step"].nunique())


def count_warmup_steps(step_s: Sequence[float] | np.ndarray, at_least: int) -> int:
    """Return how many first steps to leave out: `at_least`, and until times settle, at most half.

    Times are settled when the rolling median moves by less than SETTLED_CHANGE.
    """
    times = np.asarray(step_s, dtype=float)
    half = len(times) // 2
    for first in range(min(at_least, half), half):
        median = np.median(times[first : first + MEDIAN_WINDOW])
        next_median = np.median(times[first + 1 : first + 1 + MEDIAN_WINDOW])
        if abs(next_median - median) < SETTLED_CHANGE * median:
            return first
    return half


@cache_by_frames
def warm_steps(frames: Frames, key: str) -> WarmSteps:
    """Return the steps of a run after its warm-up, which ends at the same step on every rank.

    After an interruption the machine has to warm up again, for as long. A part of the run that is shorter
    than its warm-up is left out as a whole, unless no other steps would remain.
    """
    note_read_run_keys([key])
    return _find_warm_steps(frames, key)


def _find_warm_steps(frames: Frames, key: str) -> WarmSteps:
    steps = steps_of_run(frames, key)
    is_stopped = steps["stops"] > 0 if "stops" in steps else np.zeros(len(steps), bool)
    stopped = np.unique(steps["step"].to_numpy()[is_stopped])
    if "block" in steps and steps["block"].notna().any():
        return _warm_steps_of_turns(steps, stopped)
    steps = steps[~np.isin(steps["step"], stopped)] if len(stopped) else steps
    slowest = slowest_rank_seconds_by_step(steps)
    at_least = int(value_of_run(frames, key, "timing.warmup_steps"))
    text = value_of_run(frames, key, "resumed")  # older frames do not have the column
    resumed = json.loads(text) if isinstance(text, str) else []
    bounds = [0, *np.searchsorted(slowest.index, resumed), len(slowest)]
    parts = [slowest.to_numpy()[first:end] for first, end in itertools.pairwise(bounds)]
    cold = [count_warmup_steps(part, at_least) for part in parts]
    if len(parts) > 1:
        longer = [max(count, min(at_least, len(part))) for part, count in zip(parts, cold, strict=True)]
        cold = longer if sum(longer) < len(slowest) else cold
    is_warm = np.concatenate([np.arange(len(part)) >= count for part, count in zip(parts, cold, strict=True)])
    warm = steps[is_warm[np.searchsorted(slowest.index, steps["step"])]]
    return WarmSteps(warm, cold[0], sum(cold[1:]), len(stopped))


def _warm_steps_of_turns(steps: pd.DataFrame, stopped: np.ndarray) -> WarmSteps:
    """Return the warm steps of a variant's turns.

    Block 0 is warm-up, and the first step after another variant's turn finds none of its data in the caches.
    """
    number = steps["step"].to_numpy()
    block = steps["block"].to_numpy()
    _, turn = np.unique(block, return_inverse=True)
    first_step_by_turn = np.full(len(steps), np.inf)
    np.minimum.at(first_step_by_turn, turn, number)
    _, places_of_steps = np.unique(number, return_index=True)  # every rank has each step
    steps_by_turn = np.bincount(turn[places_of_steps], minlength=len(steps))
    is_first = (number == first_step_by_turn[turn]) & (steps_by_turn[turn] > 1)
    is_warm = (block > 0) & ~is_first & ~np.isin(number, stopped)
    dropped = len(np.unique(number[block == 0]))
    return WarmSteps(steps[is_warm], dropped, 0, len(stopped), len(np.unique(block[is_warm])))


def warm_step_seconds_slowest_rank(frames: Frames, key: str) -> np.ndarray:
    """Return each warm step's time on its slowest rank, which training waits for, (steps,)."""
    note_read_run_keys([key])
    return slowest_rank_seconds_by_step(_find_warm_steps(frames, key).steps).to_numpy()


def warm_phase_seconds_rank_mean(frames: Frames, key: str) -> pd.DataFrame:
    """Return mean seconds over ranks: a row per warm step, columns `step`, each phase, and `unaccounted`."""
    return _phase_seconds_by_step(warm_steps(frames, key).steps)


def slowest_rank_seconds_by_step(steps: pd.DataFrame) -> pd.Series[float]:
    """Return each step's seconds on its slowest rank, by step number, from one run's rows of `steps`."""
    numbers, order, starts = _order_by_step(steps)
    times = steps["step_s"].to_numpy()[order]
    slowest = np.maximum.reduceat(times, starts) if len(starts) else times
    return pd.Series(slowest, pd.Index(numbers, name="step"), name="step_s")


def _phase_seconds_by_step(warm_steps: pd.DataFrame) -> pd.DataFrame:
    names = ["step_s", *(f"{phase}_s" for phase in phases.NAMES if f"{phase}_s" in warm_steps)]
    values = warm_steps[names].to_numpy(dtype=float)
    is_recorded = ~np.isnan(values).all(axis=0)
    # A phase that only one rank has (validate) takes no time on the others.
    values = np.nan_to_num(values[:, is_recorded], nan=0.0, posinf=np.inf, neginf=-np.inf)
    numbers, order, starts = _order_by_step(warm_steps)
    ranks = np.diff([*starts, len(order)])
    means = np.add.reduceat(values[order], starts) / ranks[:, None] if len(starts) else values
    columns = pd.Index(names)[is_recorded].str.removesuffix("_s")
    table: pd.DataFrame = pd.DataFrame(means, pd.Index(numbers, name="step"), columns)
    table["unaccounted"] = means[:, 0] - means[:, 1:].sum(axis=1)
    return table


def _order_by_step(steps: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the step numbers, rising; an order of the rows by step; and where each step begins in it."""
    number = steps["step"].to_numpy()
    order = np.argsort(number, kind="stable")
    numbers, starts = np.unique(number[order], return_index=True)
    return numbers, order, starts


def used_precisions(runs: pd.DataFrame) -> pd.Series[Any]:
    """Return the precision that each run multiplied in, or the one asked for, where that is not recorded."""
    requested = runs.get("precision", pd.Series(index=runs.index, dtype=object))
    used: pd.Series[Any] = runs.get("provenance.precision", requested).fillna(requested)
    return used


class ReplicationUnits(NamedTuple):
    """Mean seconds in each unit of replication: a row per launch, or per block within launches.

    Columns are the phases, `step`, `unaccounted`, and `slowest`: the step on its slowest rank. Rows are
    indexed by (group, block) or by seed, in their order.
    """

    means_by_unit: pd.DataFrame
    unit_kind: str  # BLOCKS or LAUNCHES


@cache_by_frames
def has_blocks_in_every_run(frames: Frames, keys: Sequence[str]) -> bool:
    """Tell whether every one of these runs took turns with others, block by block."""
    if "block" not in frames.steps or "group" not in frames.runs:
        return False
    steps = frames.steps[frames.steps["key"].isin(keys)]
    groups = frames.runs.loc[frames.runs["key"].isin(keys), "group"]
    return len(steps) > 0 and bool(steps["block"].notna().all() and groups.notna().all())


@cache_by_frames
def share_a_group(frames: Frames, keys: Sequence[str], other_keys: Sequence[str]) -> bool:
    """Tell whether one of these runs took turns with one of the others, in the same group of processes."""
    groups = pd.Series(frames.runs["group"].to_numpy(), frames.runs["key"])
    return bool({*groups[[*keys]].dropna()} & {*groups[[*other_keys]].dropna()})


@cache_by_frames
def is_replicated_by_block(frames: Frames, keys: Sequence[str]) -> bool:
    """Tell whether blocks are the units of replication: all runs have some, and launches are too few."""
    if not has_blocks_in_every_run(frames, keys):
        return False
    launches = frames.runs.loc[frames.runs["key"].isin(keys), "group"]
    return bool(launches.nunique() < ENOUGH_LAUNCHES)


@cache_by_frames
def replication_units(frames: Frames, keys: Sequence[str], by_block: bool | None = None) -> ReplicationUnits:
    """Return the units of replication of a method's runs.

    Args:
        by_block: take blocks, or launches; None: as `is_replicated_by_block` decides. Methods that are paired
            need the same choice.
    """
    by_block = is_replicated_by_block(frames, keys) if by_block is None else by_block
    parts = []
    for place, key in enumerate(keys):
        steps = warm_steps(frames, key).steps
        table = _phase_seconds_by_step(steps).assign(slowest=slowest_rank_seconds_by_step(steps))
        if by_block:
            _, order, starts = _order_by_step(steps)
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
    means: pd.Series[float] = replication_units(frames, keys).means_by_unit.drop(columns="slowest").mean()
    return means


def summarize_phase_seconds(frames: Frames, keys: Sequence[str]) -> pd.DataFrame:
    """Return a row per phase: `mean_phase_seconds`, and the median over the n warm steps of all runs."""
    table = pd.concat([warm_phase_seconds_rank_mean(frames, key) for key in keys])
    summary: pd.DataFrame = pd.DataFrame(
        {"mean": mean_phase_seconds(frames, keys), "median": table.median(), "n": len(table)}
    )
    return summary


def add_missing_outcomes(frames: Frames) -> Frames:
    """Return the frames with the outcomes of each run as columns of `runs`.

    Outcomes that a run has already are kept: the steps behind them may not be there any more.
    """
    runs = frames.runs
    if not len(runs):
        return frames
    stored = runs.set_index("key").reindex(columns=[*OUTCOMES]).astype(float)
    outcomes = stored.combine_first(compute_outcomes(frames))[[*OUTCOMES]].loc[runs["key"]]
    others = runs.drop(columns=[*OUTCOMES], errors="ignore").reset_index(drop=True)
    return frames._replace(runs=pd.concat([others, outcomes.reset_index(drop=True)], axis="columns"))


def compute_outcomes(frames: Frames) -> pd.DataFrame:
    """Return the outcomes of each run, by its key; NaN for what was not measured.

    `step_s` is the mean over warm steps of the time on the slowest rank. Bytes and densities are means over
    all recorded steps of rank 0, of trainings whose steps are not there over epochs.
    """
    runs = frames.runs.set_index("key")
    last_epochs = frames.epochs.sort_values("epoch", kind="stable").groupby("key").tail(1).set_index("key")
    outcomes = last_epochs.reindex(index=runs.index, columns=[*LAST_EPOCH_OUTCOMES])
    with np.errstate(over="ignore"):  # of a training that is about to diverge it is infinite
        perplexity = pd.Series(np.exp(outcomes["val_loss"].astype(float)), runs.index)
    datasets = runs.get("task.name", pd.Series("", runs.index)).map(lambda name: str(name).rpartition("_")[2])
    outcomes["val_perplexity"] = perplexity.where(datasets.isin(TEXT_DATASETS))
    step_s = {key: warm_step_seconds_slowest_rank(frames, key).mean() for key in frames.steps["key"].unique()}
    outcomes["step_s"] = pd.Series(step_s, runs.index, dtype=float)
    samples = pd.to_numeric(runs.get("task.batch_size", pd.Series(np.nan, runs.index)))  # vector: has none
    outcomes["samples_per_s"] = pd.to_numeric(runs["workers"]) * samples / outcomes["step_s"]
    mean_of_steps, mean_of_epochs = (
        table.reindex(columns=["key", *MEAN_OUTCOMES]).groupby("key").mean().reindex(runs.index)
        for table in (frames.steps[frames.steps["rank"] == 0], frames.epochs)
    )
    of_rounds = mean_bytes_and_messages_per_round(frames).rename(columns=ROUND_COLUMNS)
    outcomes = outcomes.join([mean_of_steps.combine_first(mean_of_epochs), of_rounds])
    # Records have dates in any form of the standard, and perhaps in years that pandas has not.
    started, ended = (
        pd.to_datetime(pd.Series(runs.get(name), runs.index), utc=True, format="ISO8601", errors="coerce")
        for name in ("started", "ended")
    )
    outcomes["took_s"] = (ended - started).dt.total_seconds()
    ordered: pd.DataFrame = outcomes[[*OUTCOMES]].astype(float)
    return ordered


def mean_bytes_and_messages_per_round(frames: Frames) -> pd.DataFrame:
    """Return the bytes and messages that rank 0 sent in a round, by key: the mean over whole rounds.

    A round has `method.every` steps. What is sent within a round counts in it, and what only some rounds
    send in those: of fragments each once, of a moment with a longer period its share. Of a training whose
    steps are not there, up to the last validation that ends a round; without one it is NaN.
    """
    runs = frames.runs.set_index("key")
    every = pd.to_numeric(runs.get("method.every", pd.Series(np.nan, runs.index)))
    steps = frames.steps[frames.steps["rank"] == 0].reindex(columns=["key", "step", *ROUND_COLUMNS])
    period = steps["key"].map(every).astype(float)  # of no steps they would be texts
    of_round = steps.groupby(["key", (steps["step"] // period).rename("round")])[[*ROUND_COLUMNS]]
    lengths = of_round.size()
    is_whole = lengths == every.reindex(lengths.index, level="key")
    of_steps = of_round.sum(min_count=1)[is_whole].groupby(level="key").mean()

    epochs = frames.epochs.reindex(columns=["key", "step", *ROUND_COLUMNS]).sort_values(["key", "step"])
    steps_made = epochs.groupby("key")["step"].diff().fillna(epochs["step"])
    sent_until_then = epochs[[*ROUND_COLUMNS]].mul(steps_made, axis="index").groupby(epochs["key"]).cumsum()
    number = epochs["step"] / epochs["key"].map(every).astype(float)
    ends = (number % 1 == 0) & (number > 0)
    of_epochs = sent_until_then.div(number, axis="index")[ends].groupby(epochs["key"]).last()
    sent: pd.DataFrame = of_steps.reindex(runs.index).combine_first(of_epochs.reindex(runs.index))
    return sent
