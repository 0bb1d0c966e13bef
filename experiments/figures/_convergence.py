"""Learning curves over the paper's clock with the published ones below ours, and where all of them end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from analysis import captions, plots, published, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import Value, curve, final
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022

PUBLISHED = {"val_loss": "val_loss", "val_top1": "top1"}  # our name of a column -> that of the published one
BELOW, ABOVE = 0.85, 1.25  # the lowest and the highest tick: where a logarithmic axis ends
ENDS = {"val_loss": yoon2022.VAL_LOSS, "val_top1": yoon2022.TOP1}
ASIDE = 0.2  # of a method's place: ours to the left, the published ones to the right


Pairwise = Callable[[Frames, str, str], Value | None]


class Line(NamedTuple):
    """Runs that differ in their seed only."""

    look: style.Look
    keys: list[str]
    method: str  # of the published curve below it


def lines(frames: Frames) -> dict[str, Line]:
    """One per method."""
    return {
        method: Line(style.look(method), yoon2022.keys(frames, method), method)
        for method in yoon2022.present(frames)
    }


def draw(
    frames: Frames, found: Mapping[str, Line], columns: Mapping[str, str], log: Sequence[float] = ()
) -> plots.Figure:
    """Against optimiser steps (left, wide), and at the end (right); a row per column.

    Args:
        columns: of the epochs, with the label of the axis.
        log: the ticks of the loss, whose axis is then logarithmic.
    """
    height = 2.6 * len(columns) + 0.3
    how = {"sharex": "col", "sharey": "row", "width_ratios": (3.2, 1), "squeeze": False}
    with plots.canvas(style.two_columns(height), len(columns), 2, **how) as (figure, rows):
        for (left, right), (column, label) in zip(rows, columns.items(), strict=True):
            for line in found.values():
                table = curve(frames, line.keys, column)
                if len(table):
                    plots.curve(left, table["step"], table, line.look)
            for method in dict.fromkeys(line.method for line in found.values()):
                band = published.band(method, PUBLISHED[column])
                steps = band["epoch"] * yoon2022.STEPS_PER_EPOCH
                plots.published_curve(left, steps, band, style.look(method))
            for epoch in published.decays():
                plots.decay(left, (epoch - 1) * yoon2022.STEPS_PER_EPOCH)
            for place, line in enumerate(found.values()):
                _end(right, place, frames, line, column)
            left.set(ylabel=label, xlim=(0, 1.01 * float(frames.epochs["step"].max())))
            left.grid(True)
            right.grid(True, axis="y")
            if log and column.endswith("loss"):
                plots.log_ticks(left, log)
                left.set_ylim(BELOW * log[0], ABOVE * log[-1])
        left.set_xlabel("Optimiser steps")
        right.set_xticks(range(len(found)), [line.look.label.replace(", ", ",\n") for line in found.values()])
        right.set(xlabel="At the end", xlim=(-0.6, len(found) - 0.4))
        right.tick_params(axis="x", length=0, **({"labelsize": 6} if len(found) > 3 else {}))
        handles, labels = left.get_legend_handles_labels()
        handles, labels = [*handles, plots.published_key()], [*labels, yoon2022.PAPER]
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure


def table(frames: Frames, found: Mapping[str, Line], columns: Mapping[str, str]) -> Table:
    """Where every method ends, and where the paper's did.

    Args:
        columns: of the epochs, each with its unit.
    """
    rows = [
        {
            "method": line.look.label,
            **{_words(column): final(frames, line.keys, column) for column in columns},
            **{f"{_words(column)}, paper": ENDS[column][line.method] for column in columns},
            "seeds": len(line.keys),
        }
        for line in found.values()
    ]
    units = {
        f"{_words(column)}{of}": unit for column, unit in columns.items() for of in ("", ", paper") if unit
    }
    return Table("At the end of the training", pd.DataFrame(rows), units)


def _words(column: str) -> str:
    return {"val_loss": "validation loss", "val_top1": "validation top-1"}[column]


def caption(frames: Frames, what: str) -> str:
    """What was trained, with how many seeds, and what the published curves are."""
    virtual = ""
    if captions.is_simulated(frames):
        virtual = (
            " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
        )
    return (
        f"{what} {captions.setting(frames)} {captions.training(frames)} {_schedule(frames)} Random-k keeps "
        f"no residual, as in the published code.{virtual} At the end: every seed, and the mean with its "
        "interval; open markers: the published jobs. Grey lines: the learning rate falls to a tenth. Dotted, "
        "with the range over their machines: Yoon and Oh 2022, VGG-16 on 8 workers x 128, density 0.001, "
        "6,762 steps, one run on A100 and one on V100 (Random-k on A100 only; torch 1.8.1, which multiplies "
        "in TF32 on A100 and in fp32 on V100), every one of 138 epochs from the authors' logs."
    )


def cut(found: Iterable[str], column: str, log: Sequence[float]) -> str:
    """What of the published curves of these methods the logarithmic axis does not show; empty if nothing."""
    jobs = [published.by_machine(method, PUBLISHED[column]) for method in found]
    highest = max(float(table.max().max()) for table in jobs)
    return (
        f" The axis is cut: a published job rises to {number(highest)}." if highest > ABOVE * log[-1] else ""
    )


def orders(gap: Pairwise, overtakes: Pairwise, at: str = "") -> list[Claim]:
    """What Fig. 3 says of the ends: Top-k close to dense and below it, Random-k clearly below Top-k.

    Args:
        gap: of two methods, the top-1 of the first less that of the second.
        overtakes: the step from which on it stays above 0.
        at: of Top-k, where that must be said.
    """
    column = "val_top1"
    return [
        Claim(
            text=f"Top-k{at} ends close to dense in top-1",
            paper=1.47,
            unit="points",
            source="text under Fig. 3 ('slightly lower accuracy', 'approximate to baseline'); 92.99 - 91.52",
            kind="shape",
            tolerance=yoon2022.gap_spread(column),
            reason=f"Close: as close as they found it, {yoon2022.GAP_SPREAD}",
            ours=lambda frames: gap(frames, "dense", "topk"),
            group=yoon2022.TOPK_BEHIND,
        ),
        Claim(
            text=f"dense ends above Top-k{at} in top-1",
            paper=1.47,
            unit="points",
            source="Fig. 3; 92.99 - 91.52",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts.",
            ours=lambda frames: gap(frames, "dense", "topk"),
            group=yoon2022.TOPK_BEHIND,
            flips_at=lambda frames: overtakes(frames, "dense", "topk"),
        ),
        Claim(
            text=f"Random-k (no feedback) ends clearly below Top-k{at} in top-1",
            paper=20.54,
            unit="points",
            source="text under Fig. 3 ('does not attain the convergence level'); 91.52 - 70.98",
            kind="ordering",
            tolerance=yoon2022.gap_spread(column),
            reason=f"Clearly: more than chance, {yoon2022.GAP_SPREAD}",
            ours=lambda frames: gap(frames, "topk", "randomk"),
            group=yoon2022.RANDOMK_BEHIND,
            flips_at=lambda frames: overtakes(frames, "topk", "randomk"),
        ),
    ]


def _schedule(frames: Frames) -> str:
    """Density, its warm-up and the length of an epoch."""
    densities = captions.listed(number(density) for density in captions.values(frames, "method.density"))
    warm = [text for text in captions.values(frames, "method.density_warmup") if text not in ("[]", "")]
    raised = f", raised to at least {captions.listed(warm)} in the first epochs" if warm else ""
    clock = captions.values(frames, "train.epoch_steps")
    epoch = f" An epoch of this clock has {captions.listed(clock)} steps, as theirs." if clock else ""
    return f"Density of the sparse methods: {densities}{raised}.{epoch}"


def _end(axes: plots.Axes, place: float, frames: Frames, line: Line, column: str) -> None:
    """Each seed's last value, their mean and interval, and the published jobs'."""
    seeds = [final(frames, [key], column) for key in line.keys]
    plots.seeds(axes, place - ASIDE, [seed.value for seed in seeds if seed], line.look)
    if (mean := final(frames, line.keys, column)) and mean.low is not None:
        plots.mean_mark(axes, place - ASIDE / 3, mean, line.look)
    jobs = published.by_machine(line.method, PUBLISHED[column])
    plots.published_points(axes, place + ASIDE, jobs.iloc[-1].dropna().to_list(), line.look)
