"""Learning curves of the published jobs: every epoch, and the range over the machines on which a method
ran.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.published.tables import epochs, jobs


def by_machine(method: str, column: str = "top1", workers: int = 8) -> pd.DataFrame:
    """`column` of `epochs`, with a row per epoch and a column per machine; empty where the method did not
    run.
    """
    curves = epochs().merge(jobs()[["job", "link"]], on="job")
    mine = curves[(curves["method"] == method) & (curves["workers"] == workers)]
    table: pd.DataFrame = mine.assign(machine=mine["gpu"] + ", " + mine["link"]).pivot_table(
        index="epoch", columns="machine", values=column
    )
    return table


def band(method: str, column: str = "top1", workers: int = 8) -> pd.DataFrame:
    """Per epoch: mean, and as low and high the range over the machines, NaN where there was one.

    The range of two jobs is no interval of confidence.
    """
    return over_machines(by_machine(method, column, workers))


def over_machines(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of `band` from one column per machine."""
    low, high = (table.min(axis=1), table.max(axis=1)) if table.shape[1] > 1 else (np.nan, np.nan)
    limits: pd.DataFrame = pd.DataFrame({"mean": table.mean(axis=1), "low": low, "high": high}).reset_index()
    return limits


def decays() -> list[int]:
    """The epochs that ended with a smaller learning rate than the one before, the same in all jobs."""
    rates = epochs().pivot_table(index="epoch", columns="job", values="lr").dropna()
    fell = (rates.diff() < 0).all(axis=1)
    return [int(epoch) for epoch in fell.index[fell]]
