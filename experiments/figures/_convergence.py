"""Learning curves over the paper's clock with the published ones below ours, and where all of them end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate, final_difference, final_mean, lasting_lead_step, mean_curve
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers
from experiments.figures._runs import setting_values_text

PUBLISHED_COLUMNS = {"val_loss": "val_loss", "val_top1": "top1"}  # by our name of a column
ENDS = {"val_loss": "yoon2022.val-loss", "val_top1": "yoon2022.top1"}  # where the paper's trainings end
WORDS = {"val_loss": "validation loss", "val_top1": "validation top-1"}
LOG_TICKS = (0.3, 0.5, 1, 2, 5, 10)  # of the loss
BELOW, ABOVE = 0.85, 1.25  # the lowest and the highest tick: where a logarithmic axis ends
ASIDE = 0.2  # of a method's place: ours to the left, the published ones to the right
KeyFinder = Callable[[Frames, str], list[str]]  # the trainings that go by a name


class SeedReplicates(NamedTuple):
    """Runs that differ in their seed only, their look, and the published curve beside them."""

    look: style.MethodStyle
    run_keys: list[str]
    published_method: str  # of the published curve below it; empty where none was made like these


def replicates_by_method(frames: Frames) -> dict[str, SeedReplicates]:
    """Return the runs of each method that has any, the paper's first.

    Raises:
        ValueError: none has.
    """
    return {
        method: SeedReplicates(style.method_style(method), yoon2022.method_run_keys(frames, method), method)
        for method in yoon2022.measured_methods(frames)
    }


def draw_curves_and_ends(
    frames: Frames, replicates: Mapping[str, SeedReplicates], axis_labels_by_column: Mapping[str, str]
) -> plots.Figure:
    """Draw columns against optimiser steps (left, wide), and at the end (right); a row per column.

    Args:
        replicates: by the name of their method.
        axis_labels_by_column: the columns of the epochs that are drawn.
    """
    panels = []
    last = list(axis_labels_by_column)[-1]
    for column in axis_labels_by_column:
        panels.append(_curves_panel(frames, replicates, column, column == last))
        panels.append(_ends_panel(frames, replicates, column, column == last))
    return plots.compose_figure(
        panels, 2.6 * len(axis_labels_by_column) + 0.3, num_rows=len(axis_labels_by_column),
        ylabel=list(axis_labels_by_column.values()),
        legend_loc="outside upper center", sharex="col", sharey="row", width_ratios=(3.2, 1),
    )  # fmt: skip


def _curves_panel(
    frames: Frames, replicates: Mapping[str, SeedReplicates], column: str, is_last: bool
) -> plots.Panel:
    """Return our curves, the published ones, and where the learning rate falls."""
    axes: dict[str, Any] = {"xlim": (0, 1.01 * float(frames.epochs["step"].max()))}
    if column.endswith("loss"):
        axes |= {"log_y_ticks": LOG_TICKS, "ylim": (BELOW * LOG_TICKS[0], ABOVE * LOG_TICKS[-1])}
    curves = []
    for line in replicates.values():
        table = mean_curve(frames, line.run_keys, column)
        curves.append(plots.Curve(line.look, table["step"], table))
    panels = [plots.curves_panel(curves, xlabel="Optimiser steps" * is_last, **axes)]
    for method in filter(None, dict.fromkeys(line.published_method for line in replicates.values())):
        band = published.mean_and_range_over_machines(method, PUBLISHED_COLUMNS[column])
        steps = band["epoch"] * yoon2022.STEPS_PER_EPOCH
        draw_published = plots.panel_maker(marks.draw_published_curve)
        panels.append(draw_published(steps, band, style.method_style(method)))
    panels += [
        plots.vertical_line_panel((epoch - 1) * yoon2022.STEPS_PER_EPOCH)
        for epoch in published.learning_rate_decay_epochs()
    ]
    panels.append(plots.panel_maker(marks.add_published_legend_entry)(yoon2022.PAPER))
    return plots.overlay_panels(*panels)


@plots.panel_maker
def _ends_panel(
    axes: plots.Axes, /, frames: Frames, replicates: Mapping[str, SeedReplicates], column: str, is_last: bool
) -> None:
    """Draw each seed's last value, their mean and interval, and the published jobs'."""
    for place, line in enumerate(replicates.values()):
        ends = [final_mean(frames, [key], column) for key in line.run_keys]
        marks.draw_samples(axes, place - ASIDE, [end.value for end in ends if end], line.look)
        mean = final_mean(frames, line.run_keys, column)
        if mean and mean.low is not None:
            marks.draw_mean_with_interval(axes, place - ASIDE / 3, mean, line.look)
        if line.published_method:
            jobs = published.epoch_column_per_machine(line.published_method, PUBLISHED_COLUMNS[column])
            marks.draw_published_points(axes, place + ASIDE, jobs.iloc[-1].dropna().to_list(), line.look)
    if is_last:
        plots.set_x_place_labels(axes, [line.look.label for line in replicates.values()])
        axes.set(xlabel="At the end", xlim=(-0.6, len(replicates) - 0.4))
        axes.tick_params(axis="x", **({"labelsize": 6} if len(replicates) > 3 else {}))
    axes.grid(True, axis="y")


def final_values_table(
    frames: Frames, replicates: Mapping[str, SeedReplicates], units_by_column: Mapping[str, str]
) -> Table:
    """Return where each method ends, and where the paper's did.

    Args:
        replicates: by the name of their method.
        units_by_column: the columns of the epochs that the table has.
    """
    rows = []
    for line in replicates.values():
        ours = {WORDS[column]: final_mean(frames, line.run_keys, column) for column in units_by_column}
        theirs = {
            f"{WORDS[column]}, paper": papers.published_value(ENDS[column]).get(line.published_method)
            for column in units_by_column
        }
        rows.append({"method": line.look.label, **ours, **theirs, "seeds": len(line.run_keys)})
    units = {
        f"{WORDS[column]}{suffix}": unit
        for column, unit in units_by_column.items()
        for suffix in ("", ", paper")
    }
    return Table.from_rows("At the end of the training", rows, units)


def convergence_facts(frames: Frames) -> dict[str, str]:
    """Return densities and clock of the trainings, and what the logarithmic axis cuts."""
    warm = [
        text for text in captions.distinct_values(frames, "method.density_warmup") if text not in ("[]", "")
    ]
    clock = captions.join_with_and(captions.distinct_values(frames, "train.epoch_steps") or [""])
    losses = [
        published.epoch_column_per_machine(method, PUBLISHED_COLUMNS["val_loss"])
        for method in yoon2022.METHODS
    ]
    highest = max(float(table.max().max()) for table in losses)
    is_cut = highest > ABOVE * LOG_TICKS[-1]
    return {
        "densities": setting_values_text(frames, "method.density"),
        "raised": f", raised to at least {captions.join_with_and(warm)} in the first epochs" * bool(warm),
        "epoch": f" An epoch of this clock has {clock} steps, as theirs." * bool(clock),
        "cut": f" The axis is cut: a published job rises to {format_number(highest)}." * is_cut,
    }


def final_value_gap(
    frames: Frames,
    above: str,
    below: str,
    column: str = "val_top1",
    find_keys: KeyFinder = yoon2022.method_run_keys,
) -> Estimate | None:
    """Return a column at the end of one method's trainings less that of another's, paired by seed."""
    return final_difference(frames, find_keys(frames, above), find_keys(frames, below), column)


def overtaking_step(
    frames: Frames,
    above: str,
    below: str,
    column: str = "val_top1",
    find_keys: KeyFinder = yoon2022.method_run_keys,
) -> Estimate | None:
    """Return the step from which on one method stays above another."""
    return lasting_lead_step(frames, find_keys(frames, above), find_keys(frames, below), column)


def mean_final_value(frames: Frames, method: str, column: str) -> Estimate | None:
    """Return a column at the end of a method's trainings, the mean over seeds."""
    return final_mean(frames, yoon2022.method_run_keys(frames, method), column)


def final_value_claims(name: str, column: str) -> list[Claim]:
    """Return the claims that every method of the paper ends where it did there."""
    spread = yoon2022.published_replicate_spread(column)
    return papers.make_claims_by_method(name, mean_final_value, yoon2022.METHODS, column, tolerance=spread)


def final_gap_claim(
    name: str,
    above: str,
    below: str,
    column: str,
    find_keys: KeyFinder = yoon2022.method_run_keys,
    **fields: Any,
) -> Claim:
    """Return the claim that one method ends above another, by more than chance or as there.

    Args:
        fields: as in `papers.make_claim`.
    """
    chance: dict[str, Any] = {
        "spread": yoon2022.GAP_SPREAD,
        "tolerance": yoon2022.published_replicate_gap_spread(column),
    }
    return papers.make_claim(name, final_value_gap, above, below, column, find_keys, **chance | fields)


def fig3_order_claims(find_keys: KeyFinder = yoon2022.method_run_keys, condition: str = "") -> list[Claim]:
    """Return the claims on the ends in Fig. 3: Top-k close to dense and below, Random-k clearly below Top-k.

    Args:
        find_keys: finds a method's trainings.
        condition: of Top-k, where that must be said: ' at density 0.001'.
    """
    column = "val_top1"
    flips: dict[str, Any] = {"at": condition, "settles_at": overtaking_step}
    return [
        final_gap_claim("yoon2022.fig3.topk-ends-close", "dense", "topk", column, find_keys, at=condition),
        final_gap_claim(
            "yoon2022.fig3.dense-ends-above", "dense", "topk", column, find_keys, tolerance=0.0, **flips
        ),
        final_gap_claim("yoon2022.fig3.randomk-ends-below", "topk", "randomk", column, find_keys, **flips),
    ]
