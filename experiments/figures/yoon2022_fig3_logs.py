"""Figs. 2 and 3 of Yoon and Oh 2022 from its own job logs: every epoch, and the spread of two machines."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import plots, published, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.published import curves
from analysis.stats import over_units
from analysis.tables import Table
from experiments.figures import _published as printed
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Validation accuracy of every epoch, from the authors' logs"
METHODS = ("dense", "topk", "randomk")
GAP_TICKS = (0.5, 1, 2, 5, 10, 20, 40)
LAST = 10  # epochs behind each mean in the table


def runs(profile: str) -> list[list[str]]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    with plots.canvas(style.two_columns(2.8), 1, 3) as (figure, (eight, four, gaps)):
        for axes, workers in ((eight, 8), (four, 4)):
            for method in METHODS:
                table = curves.band(method, workers=workers)
                if len(table):
                    plots.curve(axes, table["epoch"], table, style.look(method))
            axes.set(ylim=(15, 97), title=f"{workers} workers")
        for workers, colour in ((8, "#000000"), (4, "#009E73")):
            plots.curve(
                gaps, gap(workers)["epoch"], gap(workers), style.Look(f"{workers} workers", colour, "", "")
            )
        plots.log_ticks(gaps, GAP_TICKS)
        gaps.set(title="dense less Top-k", ylabel="Difference in top-1 (points)", ylim=(0.25, 60))
        gaps.legend(loc="upper right", frameon=True, framealpha=1, edgecolor="none")
        eight.set_ylabel("Validation top-1 (%)")
        for axes in (eight, four, gaps):
            axes.set(xlim=(0, 140), xlabel="Epoch")
            for epoch in curves.decays():
                axes.axvline(epoch, color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
        handles, labels = eight.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure


def gap(workers: int) -> pd.DataFrame:
    """Per epoch, by how many points dense was ahead of Top-k on the same machine: mean, low and high.

    A logarithmic axis has no place for what is not above 0: it becomes NaN, and the curve is interrupted.
    """
    dense, topk = (curves.by_machine(method, workers=workers) for method in ("dense", "topk"))
    table = curves.over_machines(dense - topk)
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
    first, second = curves.decays()
    return (
        "Top-1 accuracy on rank 0's validation images after every epoch, 49 optimiser steps at 8 workers, 98 "
        "at 4. Bands: from one machine to the other (8 workers: A100 and V100; 4 workers: two nodes whose "
        "GPUs are not named), lines: their mean; Random-k ran once. They are the range of two jobs, no "
        f"interval of confidence. Dotted: the learning rate falls to a tenth before epochs {first} and "
        f"{second}. Right, logarithmic: by how much dense was ahead on the same machine; interrupted where "
        "it was not. VGG-16 with CIFAR-10, batch 128 per worker, density 0.001 after two epochs of warm-up; "
        f"Random-k without feedback. {printed.LOGS}"
    )


def claims() -> list[Claim]:
    return [
        *[_end(method) for method in METHODS],
        Claim(
            text="dense ends above Top-k in top-1, on every node (8 and 4 workers)",
            paper=1.47,
            unit="points",
            source="Fig. 3; 92.99 - 91.52; the four pairs of jobs of one node",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts. The pairs differ in machine and number of workers; no seeds.",
            ours=lambda _: over_units(np.concatenate([_final_gaps(8), _final_gaps(4)])),
            rederived=True,
        ),
        Claim(
            text="more workers cost Top-k more: its gap to dense with 8 less that with 4",
            paper=None,
            unit="points",
            source="two pairs of jobs each",
            kind="ordering",
            tolerance=0.0,
            reason="The nodes differ as well.",
            ours=lambda _: over_units(_final_gaps(8) - _final_gaps(4)),
            rederived=True,
        ),
    ]


def _end(method: str) -> Claim:
    return Claim(
        text=f"final top-1, {style.look(method).label}, all machines with 8 workers",
        paper=yoon2022.TOP1[method],
        unit="%",
        source="end of the curve in Fig. 3 (A100)",
        kind="absolute",
        tolerance=0.7,
        reason="Their two jobs of Top-k ended 0.64 apart, those of dense 0.15.",
        ours=lambda _: over_units(curves.by_machine(method).iloc[-1].to_numpy()),
        rederived=True,
    )


def _final_gaps(workers: int) -> np.ndarray:
    """Dense less Top-k after the last epoch, per machine."""
    dense, topk = (curves.by_machine(method, workers=workers) for method in ("dense", "topk"))
    gaps: np.ndarray = (dense - topk).iloc[-1].to_numpy()
    return gaps
