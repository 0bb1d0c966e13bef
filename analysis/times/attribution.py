"""Causes of waits: by how much the last rank to come was later than the others, in which part of the step.

All ranks begin a serialised step together and wait for the last one before they communicate. So a rank's wait
is the difference between the last rank's time up to there and its own, and it is the sum of the differences
in each part. Averaged over the ranks,

    wait = sum over parts of (the last rank's time in it - the mean time of the ranks) + the rest

where the rest is what no part measures: that ranks do not begin at the same moment, or wait more than once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import BLOCKS, LAUNCHES, is_replicated_by_block, warm_steps
from analysis.stats import UNBOUNDED, Estimate, estimate_mean

PHASES_BY_CAUSE = {"input": ("io",), "FP + BP": ("forward", "backward"), "selection": ("select",)}
REST = "rest"
COMMUNICATION = ("wait", "transfer")


@cache_by_frames
def wait_s_by_step_and_cause(frames: Frames, key: str) -> pd.DataFrame | None:
    """Return a row per warm step, in seconds: `wait`, `transfer`, each of PHASES_BY_CAUSE and the REST.

    `wait` and `transfer` are means over ranks; a cause and the REST are what they add to the wait. A cause is
    negative where the last rank was quicker in it than the mean. None where phases were not timed one by one.
    """
    steps = warm_steps(frames, key).steps.set_index(["step", "rank"]).sort_index()
    needed = ["wait_s", "transfer_s", "forward_s", "backward_s"]  # dense selects nothing
    if steps[needed].isna().to_numpy().any():
        return None
    columns = {cause: [f"{phase}_s" for phase in phases] for cause, phases in PHASES_BY_CAUSE.items()}
    seconds = pd.DataFrame(
        {cause: steps[names].fillna(0.0).sum(axis="columns") for cause, names in columns.items()}
    )
    last_ranks = steps["wait_s"].groupby(level="step").idxmin()
    lateness = seconds.loc[last_ranks].droplevel("rank") - seconds.groupby(level="step").mean()
    means = steps[["wait_s", "transfer_s"]].groupby(level="step").mean()
    lateness[REST] = means["wait_s"] - lateness.sum(axis="columns")
    table: pd.DataFrame = lateness.assign(wait=means["wait_s"], transfer=means["transfer_s"])
    return table


def wait_percent_explained(
    frames: Frames, keys: Sequence[str], cause: str, whole_columns: Sequence[str] = ("wait",)
) -> Estimate | None:
    """Return the percentage of the wait, or of COMMUNICATION, that the last rank's lateness in `cause` makes.

    A ratio of means, whose interval is that of its linearisation over blocks or launches (the delta method).
    """
    tables = _lateness_tables(frames, keys)
    if not tables or len(tables) < len(keys):
        return None
    units = _unit_means(frames, tables)
    part = units[cause]
    whole = units[list(whole_columns)].sum(axis="columns")
    share = float(part.mean() / whole.mean())
    deviations = (part - share * whole) / whole.mean()
    sample_kind = BLOCKS if is_replicated_by_block(frames, keys) else LAUNCHES
    return estimate_mean(100 * (share + deviations.to_numpy()), UNBOUNDED, sample_kind, 100 * share)


def mean_wait_ms_by_cause(frames: Frames, keys: Sequence[str]) -> pd.Series[float]:
    """Return mean milliseconds of the wait, and of what each cause and the rest add to it.

    Empty where phases were not timed one by one.
    """
    tables = _lateness_tables(frames, keys)
    if not tables:
        return pd.Series(dtype=float)
    means: pd.Series[float] = 1e3 * _unit_means(frames, tables).mean()
    return means[["wait", *PHASES_BY_CAUSE, REST]]


def _lateness_tables(frames: Frames, keys: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return `wait_s_by_step_and_cause` by the keys of runs whose phases were timed one by one."""
    tables = {key: wait_s_by_step_and_cause(frames, key) for key in keys}
    return {key: table for key, table in tables.items() if table is not None}


def _unit_means(frames: Frames, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return means over blocks or launches, a row each."""
    by_block = is_replicated_by_block(frames, list(tables))
    means = []
    for key, table in tables.items():
        block = frames.steps[frames.steps["key"] == key].groupby("step")["block"].first()
        unit = block.loc[table.index].to_numpy() if by_block else np.zeros(len(table))
        means.append(table.groupby(unit).mean())
    units: pd.DataFrame = pd.concat(means)
    return units
