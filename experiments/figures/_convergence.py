"""A learning curve drawn twice: against the share of training done, and against optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis import captions, plots, style
from analysis.frames import Frames
from analysis.stats import curve
from experiments.figures import _yoon2022 as yoon2022


def draw(
    frames: Frames,
    column: str,
    label: str,
    published: Mapping[str, Sequence[float]],
    log: Sequence[float] = (),
) -> plots.Figure:
    """`column` of the epochs per method, the paper's way points lightly under it.

    `log`: the ticks of a logarithmic axis. The left axes compare trainings of different length; the right
    ones show what each number of steps achieved.
    """
    methods = yoon2022.present(frames)
    with plots.canvas(style.two_columns(2.9), 1, 2, sharey=True) as (figure, (share, steps)):
        for method in methods:
            look, table = style.look(method), curve(frames, yoon2022.keys(frames, method), column)
            if len(table):
                plots.curve(share, 100 * table["epoch"] / table["epoch"].max(), table, look)
                plots.curve(steps, table["step"], table, look)
            if method in published:
                paper_share = [100 * epoch / yoon2022.EPOCHS for epoch in yoon2022.WAY_POINTS]
                paper_steps = [epoch * yoon2022.STEPS_PER_EPOCH for epoch in yoon2022.WAY_POINTS]
                plots.way_points(share, paper_share, published[method], look)
                plots.way_points(steps, paper_steps, published[method], look)
        for axes in (share, steps):
            axes.grid(True)
            axes.set_xlim(left=0)
        share.set(xlabel="Share of training (% of epochs)", ylabel=label, xlim=(0, 101))
        steps.set(xlabel="Optimiser steps")
        if log:
            plots.log_ticks(share, log)
        handles, labels = share.get_legend_handles_labels()
        handles += [plots.way_point_key(yoon2022.PAPER)]
        labels += [yoon2022.PAPER]
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure


def caption(frames: Frames, what: str) -> str:
    densities = captions.listed(captions.values(frames, "method.density"))
    virtual = ""
    if captions.is_simulated(frames):
        virtual = (
            " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
        )
    return (
        f"{what} {captions.setting(frames)} Density {densities} for sparse methods; Random-k keeps no "
        f"residual, as in the published code. {captions.training(frames)}{virtual} Open markers: "
        f"{yoon2022.PAPER}, 8 workers x 128, density 0.001, 6,762 steps, way points from the authors' logs; "
        "another model and horizon where ours say so."
    )
