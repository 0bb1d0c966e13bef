"""Learning curves over the paper's clock with the published ones below ours, and where all of them end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import Value, ahead_for_good, curve, final, final_difference
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers

PUBLISHED = {"val_loss": "val_loss", "val_top1": "top1"}  # our name of a column -> that of the published one
ENDS = {"val_loss": "yoon2022.val-loss", "val_top1": "yoon2022.top1"}  # where the paper's trainings end
WORDS = {"val_loss": "validation loss", "val_top1": "validation top-1"}
BELOW, ABOVE = 0.85, 1.25  # the lowest and the highest tick: where a logarithmic axis ends
ASIDE = 0.2  # of a method's place: ours to the left, the published ones to the right
Keys = Callable[[Frames, str], list[str]]  # the trainings that go by a name


class Seeds(NamedTuple):
    """Runs that differ in their seed only."""

    look: style.Look
    keys: list[str]
    method: str  # of the published curve below it


def lines(frames: Frames) -> dict[str, Seeds]:
    """One per method."""
    return {
        method: Seeds(style.look(method), yoon2022.keys(frames, method), method)
        for method in yoon2022.present(frames)
    }


def draw(
    frames: Frames, found: Mapping[str, Seeds], columns: Mapping[str, str], log: Sequence[float] = ()
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
                marks.published_curve(left, steps, band, style.look(method))
            for epoch in published.decays():
                marks.decay(left, (epoch - 1) * yoon2022.STEPS_PER_EPOCH)
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
        handles, labels = [*handles, marks.published_key()], [*labels, yoon2022.PAPER]
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure


def table(frames: Frames, found: Mapping[str, Seeds], columns: Mapping[str, str]) -> Table:
    """A row for each method: where it ends, and where the paper's did.

    Args:
        columns: of the epochs, each with its unit.
    """
    words = {column: WORDS[column] for column in columns}
    rows = [
        {
            "method": line.look.label,
            **{word: final(frames, line.keys, column) for column, word in words.items()},
            **{f"{word}, paper": papers.value(ENDS[column])[line.method] for column, word in words.items()},
            "seeds": len(line.keys),
        }
        for line in found.values()
    ]
    units = {f"{words[column]}{of}": unit for column, unit in columns.items() for of in ("", ", paper")}
    return Table.of("At the end of the training", rows, units)


def caption(frames: Frames, what: str) -> str:
    """Words on what was trained, with how many seeds, and what the published curves are."""
    warm = [text for text in captions.values(frames, "method.density_warmup") if text not in ("[]", "")]
    clock = captions.listed(captions.values(frames, "train.epoch_steps") or [""])
    facts = {
        "what": what,
        "densities": captions.listed(map(number, captions.values(frames, "method.density"))),
        "raised": f", raised to at least {captions.listed(warm)} in the first epochs" * bool(warm),
        "epoch": f" An epoch of this clock has {clock} steps, as theirs." * bool(clock),
    }
    return captions.filled(papers.words("yoon2022.convergence"), frames, facts)


def cut(found: Iterable[str], column: str, log: Sequence[float]) -> str:
    """The part of these methods' published curves that the logarithmic axis does not show; empty if none."""
    jobs = [published.by_machine(method, PUBLISHED[column]) for method in found]
    highest = max(float(table.max().max()) for table in jobs)
    return (
        f" The axis is cut: a published job rises to {number(highest)}." if highest > ABOVE * log[-1] else ""
    )


def gap(
    frames: Frames, above: str, below: str, column: str = "val_top1", keys: Keys = yoon2022.keys
) -> Value | None:
    """Difference between where one method ends and where another does."""
    return final_difference(frames, keys(frames, above), keys(frames, below), column)


def overtakes(
    frames: Frames, above: str, below: str, column: str = "val_top1", keys: Keys = yoon2022.keys
) -> Value | None:
    """The step from which on one method stays above another."""
    return ahead_for_good(frames, keys(frames, above), keys(frames, below), column)


def ending(frames: Frames, method: str, column: str) -> Value | None:
    """The last value of a method."""
    return final(frames, yoon2022.keys(frames, method), column)


def ends(name: str, column: str) -> list[Claim]:
    """Every method of the paper ends where it did there."""
    return [
        papers.claim(
            name, ending, method, column, case=method, method=method, label=style.look(method).label,
            tolerance=yoon2022.spread(column),
        )
        for method in yoon2022.METHODS
    ]  # fmt: skip


def compared(name: str, above: str, below: str, column: str, keys: Keys = yoon2022.keys, **own: Any) -> Claim:
    """One method ends above another, by more than chance or as there; `own` is as in `papers.claim`."""
    chance: dict[str, Any] = {"spread": yoon2022.GAP_SPREAD, "tolerance": yoon2022.gap_spread(column)}
    return papers.claim(name, gap, above, below, column, keys, **chance | own)


def orders(keys: Keys = yoon2022.keys, at: str = "") -> list[Claim]:
    """Statements of Fig. 3 on the ends: Top-k close to dense and below it, Random-k clearly below Top-k.

    Args:
        keys: finds a method's trainings.
        at: of Top-k, where that must be said.
    """
    column, flips = "val_top1", {"at": at, "flips_at": overtakes}
    return [
        compared("yoon2022.fig3.topk-ends-close", "dense", "topk", column, keys, at=at),
        compared("yoon2022.fig3.dense-ends-above", "dense", "topk", column, keys, tolerance=0.0, **flips),
        compared("yoon2022.fig3.randomk-ends-below", "topk", "randomk", column, keys, **flips),
    ]


def _end(axes: plots.Axes, place: float, frames: Frames, line: Seeds, column: str) -> None:
    """Each seed's last value, their mean and interval, and the published jobs'."""
    seeds = [final(frames, [key], column) for key in line.keys]
    plots.seeds(axes, place - ASIDE, [seed.value for seed in seeds if seed], line.look)
    if (mean := final(frames, line.keys, column)) and mean.low is not None:
        marks.mean_mark(axes, place - ASIDE / 3, mean, line.look)
    jobs = published.by_machine(line.method, PUBLISHED[column])
    marks.published_points(axes, place + ASIDE, jobs.iloc[-1].dropna().to_list(), line.look)
