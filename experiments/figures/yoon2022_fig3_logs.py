"""Figs. 2 and 3 of Yoon and Oh 2022 from its own job logs: every epoch, and the spread of two machines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames
from analysis.stats import Value, over_units
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim

TITLE = "Validation accuracy of every epoch, from the authors' logs"
METHODS = ("dense", "topk", "randomk")
GAP_TICKS = (0.5, 1, 2, 5, 10, 20, 40)
LAST = 10  # epochs behind each mean in the table


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    def over_epochs(title: str, lines: dict[style.Look, pd.DataFrame], **how: Any) -> plots.Panel:
        found = [plots.Curve(look, table["epoch"], table) for look, table in lines.items() if len(table)]

        def panel(axes: plots.Axes) -> None:
            plots.curves(found, title=title, xlim=(0, 140), xlabel="Epoch", grid=None, **how)(axes)
            for epoch in published.decays():
                axes.axvline(epoch, color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)

        return panel

    def gaps(axes: plots.Axes) -> None:
        looks = {8: style.Look("8 workers", "#000000", "", ""), 4: style.Look("4 workers", "#009E73", "", "")}
        lines = {look: gap(workers) for workers, look in looks.items()}
        how = {"ylabel": "Difference in top-1 (points)", "ylim": (0.25, 60)}
        over_epochs("dense less Top-k", lines, log=GAP_TICKS, **how)(axes)
        axes.legend(loc="upper right", frameon=True, framealpha=1, edgecolor="none")

    eight, four = (
        over_epochs(
            f"{workers} workers",
            {style.look(method): published.band(method, workers=workers) for method in METHODS},
            ylim=(15, 97),
        )
        for workers in (8, 4)
    )
    return plots.picture([eight, four, gaps], 2.8, ylabel="Validation top-1 (%)", loc="outside upper center")


def gap(workers: int) -> pd.DataFrame:
    """Per epoch, by how many points dense was ahead of Top-k on the same machine: mean, low and high.

    A logarithmic axis has no place for what is not above 0: it becomes NaN, and the curve is interrupted.
    """
    dense, topk = (published.by_machine(method, workers=workers) for method in ("dense", "topk"))
    table = published.over_machines(dense - topk)
    above: pd.DataFrame = table.where(table > 0)
    return above


def table(frames: Frames) -> Table:
    """End points and means of the last epochs, per job."""
    every, rows = published.epochs(), []
    for job, facts in published.jobs().set_index("job").iterrows():
        curve = every[every["job"] == job]
        end = curve.iloc[-1]
        rows.append({
            "job": str(job),
            "method": style.look(facts["method"]).label,
            "workers": f"{facts['workers']} x {facts['gpu']}, {facts['link']}",
            "epochs": int(end["epoch"]),
            "final top-1": float(end["top1"]),
            f"mean of the last {LAST}": float(curve["top1"].tail(LAST).mean()),
            "final loss": float(end["val_loss"]),
        })  # fmt: skip
    units = {"final top-1": "%", f"mean of the last {LAST}": "%"}
    return Table("Where the authors' jobs ended", pd.DataFrame(rows), units)


def caption(frames: Frames, profile: str) -> str:
    first, second = published.decays()
    return (
        "Top-1 accuracy on rank 0's validation images after every epoch, 49 optimiser steps at 8 workers, 98 "
        "at 4. Bands: from one machine to the other (8 workers: A100 and V100; 4 workers: two nodes whose "
        "GPUs are not named), lines: their mean; Random-k ran once. They are the range of two jobs, no "
        f"interval of confidence. Dotted: the learning rate falls to a tenth before epochs {first} and "
        f"{second}. Right, logarithmic: by how much dense was ahead on the same machine; interrupted where "
        "it was not. VGG-16 with CIFAR-10, batch 128 per worker, density 0.001 after two epochs of warm-up; "
        f"Random-k without feedback. {yoon2022.LOGS}"
    )


def claims() -> list[Claim]:
    label = {method: style.look(method).label for method in METHODS}
    return [
        *(
            claim("yoon2022.fig3-logs.end", _end, method, case=method, method=method, label=label[method])
            for method in METHODS
        ),
        claim("yoon2022.fig3-logs.dense-ends-above", _every_gap),
        claim("yoon2022.fig3-logs.more-workers-cost-more", _gap_by_workers),
    ]


def _end(_: Frames, method: str) -> Value | None:
    return over_units(published.by_machine(method).iloc[-1].to_numpy())


def _every_gap(_: Frames) -> Value | None:
    return over_units(np.concatenate([_final_gaps(8), _final_gaps(4)]))


def _gap_by_workers(_: Frames) -> Value | None:
    return over_units(_final_gaps(8) - _final_gaps(4))


def _final_gaps(workers: int) -> np.ndarray:
    """Dense less Top-k after the last epoch, per machine."""
    dense, topk = (published.by_machine(method, workers=workers) for method in ("dense", "topk"))
    gaps: np.ndarray = (dense - topk).iloc[-1].to_numpy()
    return gaps
