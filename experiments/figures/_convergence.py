"""Learning curves over the paper's clock with the published ones below ours, and where all of them end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate, final_difference, final_value, lasting_lead_step, mean_curve
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers

PUBLISHED = {"val_loss": "val_loss", "val_top1": "top1"}  # our name of a column -> that of the published one
ENDS = {"val_loss": "yoon2022.val-loss", "val_top1": "yoon2022.top1"}  # where the paper's trainings end
WORDS = {"val_loss": "validation loss", "val_top1": "validation top-1"}
LOG_TICKS = (0.3, 0.5, 1, 2, 5, 10)  # of the loss
BELOW, ABOVE = 0.85, 1.25  # the lowest and the highest tick: where a logarithmic axis ends
ASIDE = 0.2  # of a method's place: ours to the left, the published ones to the right
Keys = Callable[[Frames, str], list[str]]  # the trainings that go by a name


class Seeds(NamedTuple):
    """Runs that differ in their seed only."""

    look: style.MethodStyle
    keys: list[str]
    method: str  # of the published curve below it; empty where none was made like these


def lines(frames: Frames) -> dict[str, Seeds]:
    """One per method."""
    return {
        method: Seeds(style.method_style(method), yoon2022.keys(frames, method), method)
        for method in yoon2022.present(frames)
    }


def draw(frames: Frames, found: Mapping[str, Seeds], columns: Mapping[str, str]) -> plots.Figure:
    """Against optimiser steps (left, wide), and at the end (right); a row per column.

    Args:
        columns: of the epochs, with the label of the axis.
    """
    panels, last = list[plots.Panel](), list(columns)[-1]
    for column in columns:
        panels += [_over_steps(frames, found, column, column == last)]
        panels += [_at_the_end(frames, found, column, column == last)]
    return plots.compose_figure(
        panels, 2.6 * len(columns) + 0.3, rows=len(columns), ylabel=list(columns.values()),
        loc="outside upper center", sharex="col", sharey="row", width_ratios=(3.2, 1),
    )  # fmt: skip


def _over_steps(frames: Frames, found: Mapping[str, Seeds], column: str, is_last: bool) -> plots.Panel:
    """Our curves, the published ones, and where the learning rate falls."""
    tables = [(line.look, mean_curve(frames, line.keys, column)) for line in found.values()]
    words: dict[str, Any] = {"xlim": (0, 1.01 * float(frames.epochs["step"].max()))}
    if column.endswith("loss"):
        words |= {"log": LOG_TICKS, "ylim": (BELOW * LOG_TICKS[0], ABOVE * LOG_TICKS[-1])}
    panels = [
        plots.curves_panel(
            [plots.Curve(look, table["step"], table) for look, table in tables],
            xlabel="Optimiser steps" * is_last, **words,
        )
    ]  # fmt: skip
    for method in filter(None, dict.fromkeys(line.method for line in found.values())):
        band = published.mean_and_range_over_machines(method, PUBLISHED[column])
        steps = band["epoch"] * yoon2022.STEPS_PER_EPOCH
        panels.append(plots.panel_maker(marks.draw_published_curve)(steps, band, style.method_style(method)))
    falls = [
        plots.vertical_line_panel((epoch - 1) * yoon2022.STEPS_PER_EPOCH)
        for epoch in published.decay_epochs()
    ]
    return plots.overlay_panels(
        *panels, *falls, plots.panel_maker(marks.add_published_legend_entry)(yoon2022.PAPER)
    )


@plots.panel_maker
def _at_the_end(
    axes: plots.Axes, /, frames: Frames, found: Mapping[str, Seeds], column: str, is_last: bool
) -> None:
    """Each seed's last value, their mean and interval, and the published jobs'."""
    for place, line in enumerate(found.values()):
        seeds = [final_value(frames, [key], column) for key in line.keys]
        marks.draw_samples(axes, place - ASIDE, [seed.value for seed in seeds if seed], line.look)
        if (mean := final_value(frames, line.keys, column)) and mean.low is not None:
            marks.draw_mean(axes, place - ASIDE / 3, mean, line.look)
        if line.method:
            jobs = published.column_by_machine(line.method, PUBLISHED[column])
            marks.draw_published_points(axes, place + ASIDE, jobs.iloc[-1].dropna().to_list(), line.look)
    if is_last:
        plots.set_place_labels(axes, [line.look.label for line in found.values()])
        axes.set(xlabel="At the end", xlim=(-0.6, len(found) - 0.4))
        axes.tick_params(axis="x", **({"labelsize": 6} if len(found) > 3 else {}))
    axes.grid(True, axis="y")


def table(frames: Frames, found: Mapping[str, Seeds], columns: Mapping[str, str]) -> Table:
    """A row for each method: where it ends, and where the paper's did.

    Args:
        columns: of the epochs, each with its unit.
    """
    words = {column: WORDS[column] for column in columns}
    rows = [
        {
            "method": line.look.label,
            **{word: final_value(frames, line.keys, column) for column, word in words.items()},
            **{
                f"{word}, paper": papers.value(ENDS[column]).get(line.method)
                for column, word in words.items()
            },
            "seeds": len(line.keys),
        }
        for line in found.values()
    ]
    units = {f"{words[column]}{of}": unit for column, unit in columns.items() for of in ("", ", paper")}
    return Table.of("At the end of the training", rows, units)


def facts(frames: Frames) -> dict[str, str]:
    """Densities and clock of the trainings, and what of the published curves the logarithmic axis cuts."""
    warm = [
        text for text in captions.distinct_values(frames, "method.density_warmup") if text not in ("[]", "")
    ]
    clock = captions.join_words(captions.distinct_values(frames, "train.epoch_steps") or [""])
    losses = [published.column_by_machine(method, PUBLISHED["val_loss"]) for method in yoon2022.METHODS]
    highest = max(float(table.max().max()) for table in losses)
    is_cut = highest > ABOVE * LOG_TICKS[-1]
    return {
        "densities": captions.join_words(
            map(format_number, captions.distinct_values(frames, "method.density"))
        ),
        "raised": f", raised to at least {captions.join_words(warm)} in the first epochs" * bool(warm),
        "epoch": f" An epoch of this clock has {clock} steps, as theirs." * bool(clock),
        "cut": f" The axis is cut: a published job rises to {format_number(highest)}." * is_cut,
    }


def gap(
    frames: Frames, above: str, below: str, column: str = "val_top1", keys: Keys = yoon2022.keys
) -> Estimate | None:
    """Difference between where one method ends and where another does."""
    return final_difference(frames, keys(frames, above), keys(frames, below), column)


def overtakes(
    frames: Frames, above: str, below: str, column: str = "val_top1", keys: Keys = yoon2022.keys
) -> Estimate | None:
    """The step from which on one method stays above another."""
    return lasting_lead_step(frames, keys(frames, above), keys(frames, below), column)


def ending(frames: Frames, method: str, column: str) -> Estimate | None:
    """The last value of a method."""
    return final_value(frames, yoon2022.keys(frames, method), column)


def ends(name: str, column: str) -> list[Claim]:
    """Every method of the paper ends where it did there."""
    return papers.of_methods(name, ending, yoon2022.METHODS, column, tolerance=yoon2022.spread(column))


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
