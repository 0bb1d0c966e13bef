"""Figs. 2 and 3 of Yoon and Oh 2022 from its own job logs: every epoch, and the spread of two machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames
from analysis.stats import Estimate, estimate_mean
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._published import no_runs
from experiments.figures.papers import make_claim, make_claims_by_method

TITLE = "Validation accuracy of every epoch, from the authors' logs"
SCALE = yoon2022.TRAINING_SCALE
METHODS = ("dense", "topk", "randomk")
GAP_TICKS = (0.5, 1, 2, 5, 10, 20, 40)
LAST_EPOCHS = 10  # epochs behind each mean in the table
FALL_LINE: dict[str, Any] = {"color": "#999999", "linestyle": (0, (2, 2))}
runs = no_runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    looks = {
        8: style.MethodStyle("8 workers", "#000000", "", ""),
        4: style.MethodStyle("4 workers", "#009E73", "", ""),
    }
    curves = [
        _epochs_panel(
            {
                style.method_style(method): published.mean_and_range_over_machines(method, workers=workers)
                for method in METHODS
            },
            title=f"{workers} workers", ylim=(15, 97),
        )
        for workers in looks
    ]  # fmt: skip
    gaps = _epochs_panel(
        {look: positive_top1_gap_by_epoch(workers) for workers, look in looks.items()},
        title="dense less Top-k", log_y_ticks=GAP_TICKS,
        ylabel="Difference in top-1 (points)", ylim=(0.25, 60),
    )  # fmt: skip
    key = plots.legend_panel(loc="upper right", frameon=True, framealpha=1, edgecolor="none")
    panels = [*curves, plots.overlay_panels(gaps, key)]
    return plots.compose_figure(panels, 2.8, ylabel="Validation top-1 (%)", legend_loc="outside upper center")


def _epochs_panel(lines: Mapping[style.MethodStyle, pd.DataFrame], **how: Any) -> plots.Panel:
    """Return curves, and where the learning rate fell."""
    measured = [plots.Curve(look, table["epoch"], table) for look, table in lines.items() if len(table)]
    curves = plots.curves_panel(measured, xlim=(0, 140), xlabel="Epoch", grid=None, **how)
    return plots.overlay_panels(
        curves,
        *(plots.vertical_line_panel(epoch, **FALL_LINE) for epoch in published.learning_rate_decay_epochs()),
    )


def positive_top1_gap_by_epoch(workers: int) -> pd.DataFrame:
    """Return by how many points dense was ahead of Top-k on the same machine: mean, low and high by epoch.

    A logarithmic axis has no place for what is not above 0: it becomes NaN, and the curve is interrupted.
    """
    table = published.mean_and_range_over_columns(_gaps_by_machine(workers))
    above: pd.DataFrame = table.where(table > 0)
    return above


def _gaps_by_machine(workers: int) -> pd.DataFrame:
    """Return dense less Top-k, a row per epoch and a column per machine."""
    dense, topk = (
        published.epoch_column_per_machine(method, workers=workers) for method in ("dense", "topk")
    )
    gaps: pd.DataFrame = dense - topk
    return gaps


def table(frames: Frames) -> Table:
    """Return end points and means of the last epochs, per job."""
    epochs = published.epoch_table()
    rows = []
    for job, about in published.job_table().set_index("job").iterrows():
        curve = epochs[epochs["job"] == job]
        end = curve.iloc[-1]
        rows.append({
            "job": str(job),
            "method": style.method_style(about["method"]).label,
            "workers": f"{about['workers']} x {about['gpu']}, {about['link']}",
            "epochs": int(end["epoch"]),
            "final top-1": float(end["top1"]),
            f"mean of the last {LAST_EPOCHS}": float(curve["top1"].tail(LAST_EPOCHS).mean()),
            "final loss": float(end["val_loss"]),
        })  # fmt: skip
    units = {"final top-1": "%", f"mean of the last {LAST_EPOCHS}": "%"}
    return Table.from_rows("Where the authors' jobs ended", rows, units)


def facts(frames: Frames) -> dict[str, int]:
    """Return the epochs before which the learning rate falls."""
    return dict(zip(("first", "second"), published.learning_rate_decay_epochs(), strict=True))


def claims() -> list[Claim]:
    return [
        *make_claims_by_method("yoon2022.fig3-logs.end", _mean_final_top1, METHODS),
        make_claim("yoon2022.fig3-logs.dense-ends-above", _mean_final_gap),
        make_claim("yoon2022.fig3-logs.more-workers-cost-more", _gap_growth_with_workers),
    ]


def _mean_final_top1(_: Frames, method: str) -> Estimate | None:
    return estimate_mean(published.epoch_column_per_machine(method).iloc[-1].to_numpy())


def _mean_final_gap(_: Frames) -> Estimate | None:
    return estimate_mean(np.concatenate([_final_gaps(8), _final_gaps(4)]))


def _gap_growth_with_workers(_: Frames) -> Estimate | None:
    return estimate_mean(_final_gaps(8) - _final_gaps(4))


def _final_gaps(workers: int) -> np.ndarray:
    return _gaps_by_machine(workers).iloc[-1].to_numpy()
