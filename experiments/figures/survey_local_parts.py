"""Parts of local steps in all combinations: outer momentum, residual and H.

Not a figure of a paper. Learning rates come from trials on held-out text, which are runs of this item, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames, find_run_keys, select_runs
from analysis.stats import Estimate, final_contrast, final_mean
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _trainings, papers
from experiments.figures._runs import TRAINED, scaled_settings, setting_values_text
from experiments.figures._trainings import COLUMN, MORE_SEEDS, SEEDS, NamedTrainings
from experiments.figures.papers import make_claim

TITLE = "What makes local steps work: outer momentum, residual and steps between exchanges"
SCALE = _trainings.SCALE
_DATA = papers.item_settings("survey.local-parts")
VARIANTS: Mapping[str, RunSettings] = _DATA["variants"]
EVERY: Mapping[str, Sequence[int]] = _DATA["every"]
RATES: Mapping[str, Sequence[float]] = _DATA["rates"]
TRIED_RATES: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]] = _DATA["tried_rates"]
HELD_OUT: Mapping[str, int] = _DATA["held_out"]
LOOKS: Mapping[str, tuple[str, str]] = _DATA["looks"]
CONTRASTS: Mapping[str, tuple[str, list[str], list[str]]] = _DATA["contrasts"]
BEST_RATES: Mapping[str, Mapping[int, float]] = _DATA["best_rates"]
DENSE = "every step"
LINE = {"linestyle": "-", "marker": "o", "ms": 3, "lw": 1}


class Cell(NamedTuple):
    """A point of the design: a variant, and its H; dense exchanges in every step."""

    variant: str
    every: int = 1


def cell_settings(periods: Iterable[int]) -> dict[Cell, RunSettings]:
    """Return the settings of every point of the design but for the learning rate."""
    settings = {Cell(DENSE): _DATA["dense"]}
    for every in periods:
        for variant, changes in VARIANTS.items():
            settings[Cell(variant, every)] = {**changes, "method.every": every}
    return settings


def trial_runs(profile: str) -> list[Run]:
    """Return trainings of each cell with several learning rates, validated on held-out text."""
    trial = {"seed": _DATA["trial_seed"], "train.held_out": HELD_OUT[profile]}
    shared = {**scaled_settings(TRAINED, "local-parts", profile), **trial}
    return [
        Run({**shared, **settings, "task.lr": rate})
        for cell, settings in cell_settings(EVERY[profile]).items()
        for rate in TRIED_RATES[profile].get(cell.variant, {}).get(cell.every, RATES[profile])
    ]


SETTINGS = {
    cell: {**settings, "task.lr": BEST_RATES[cell.variant][cell.every], "train.held_out": 0}
    for cell, settings in cell_settings(EVERY["paper"]).items()
    if cell.every in BEST_RATES.get(cell.variant, {})  # else its trials come first
}
TRAININGS = NamedTrainings("local-parts", SETTINGS)


def runs(profile: str) -> list[Run]:
    return [*trial_runs(profile), *trainings(profile, SEEDS)]


def trainings(profile: str, seeds: Mapping[str, list[int]]) -> list[Run]:
    """Return the trainings with the rates that ended lowest in the trials."""
    cells = [cell for cell in SETTINGS if cell.every in (1, *EVERY[profile])]
    return TRAININGS.runs(profile, seeds[profile], cells)


more_runs = partial(trainings, seeds=MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    keys_by_cell = TRAININGS.run_keys_by_name(frames)
    if not keys_by_cell:
        raise ValueError(plots.NOTHING_TO_DRAW)
    lines = []
    for variant, (colour, marker) in LOOKS.items():
        cells = [cell for cell in keys_by_cell if cell.variant == variant]
        ends = [TRAININGS.mean_final_loss(frames, cell) for cell in cells]
        look = style.MethodStyle(variant, colour, marker, "")
        lines.append(plots.Curve(look, [cell.every for cell in cells], ends, {"ms": 4}))
    if level := TRAININGS.mean_final_loss(frames, Cell(DENSE)):
        look = style.method_style("dense")._replace(label="AdamW, every step")
        lines.append(plots.Curve(look, None, level))
    periods = sorted({cell.every for cell in keys_by_cell if cell.every > 1})
    panels = [
        plots.curves_panel(
            lines,
            doubling_x_ticks=periods,
            xlabel="H: steps between exchanges",
            ylabel="Validation loss (nats a character)",
        ),
        _contrasts_panel(frames, periods),
    ]
    return plots.compose_figure(panels, 4.2, legend_columns=3, width_ratios=(1, 1.2))


def _contrasts_panel(frames: Frames, periods: Sequence[int]) -> plots.Panel:
    """Return how much higher the loss ends, a row for each contrast and H."""
    look = style.method_style("topk")._replace(label="")
    zero_look = style.method_style("dense")._replace(label="")
    rows = list[str]()
    points = []
    for name, (label, _, _) in CONTRASTS.items():
        for every in periods:
            if nats := contrast(frames, name, every):
                points.append(plots.Curve(look, [nats.low, nats.value, nats.high], [len(rows)] * 3, LINE))
                rows.append(f"{label}, H = {every}")
    zero = plots.Curve(zero_look, (0, 0), (-0.5, len(rows) - 0.5), {**LINE, "marker": ""})
    return plots.dots_panel(
        [zero, *points], row_labels=rows, grid="x", xlabel="How much higher the loss ends (nats)"
    )


def table(frames: Frames) -> list[Table]:
    """Return the losses at the end by H, and those of the trials by learning rate."""
    frames = _trainings.with_outcome_columns(frames)
    ends = [
        {
            "training": cell.variant, "H": cell.every, "inner rate": str(SETTINGS[cell]["task.lr"]),
            **TRAININGS.loss_cells(frames, cell), **TRAININGS.sent_bytes_and_seeds_cells(frames, cell),
        }
        for cell in TRAININGS.run_keys_by_name(frames)
    ]  # fmt: skip
    losses_by_cell = {
        cell: trial_losses(frames, settings) for cell, settings in cell_settings(EVERY["paper"]).items()
    }
    trials = [
        {"training": cell.variant, "H": cell.every, **losses}
        for cell, losses in losses_by_cell.items()
        if any(losses.values())
    ]
    return [
        Table.from_rows("At the end of the trainings", ends, {"loss": "nats", "in a round": "kB"}),
        Table.from_rows("Loss of the trials on held-out text, by inner learning rate", trials),
    ]


def trial_losses(frames: Frames, settings: RunSettings) -> dict[str, float | None]:
    """Return the losses at the end of a cell's trials by learning rate; None where none was made."""
    columns = {"method.name" if key == "method" else key: value for key, value in settings.items()}
    losses = dict[str, float | None]()
    for rate in RATES["paper"]:
        trial = {"seed": _DATA["trial_seed"], "task.lr": rate, "train.held_out": HELD_OUT["paper"]}
        loss = final_mean(frames, find_run_keys(frames, columns | trial), COLUMN)
        losses[f"{rate:g}"] = loss.value if loss else None
    return losses


def facts(frames: Frames) -> dict[str, object]:
    return {
        "steps": f"{_trainings.longest_training_steps(frames):,}",
        "seeds": setting_values_text(
            select_runs(frames, find_run_keys(frames, {"train.held_out": 0})), "seed"
        ),
    }


def contrast(frames: Frames, name: str, every: int) -> Estimate | None:
    """Return how much higher the loss ends by a contrast at this H; None where a training is missing."""
    _, added, subtracted = CONTRASTS[name]
    return _cell_contrast(
        frames,
        [Cell(variant, every) for variant in added],
        [Cell(variant, every) for variant in subtracted],
    )


def contrast_growth(frames: Frames, name: str) -> Estimate | None:
    """Return a contrast at the longest H less that at the shortest; None where a training is missing."""
    _, added, subtracted = CONTRASTS[name]
    shortest, *_, longest = EVERY["paper"]
    return _cell_contrast(
        frames,
        [Cell(variant, longest) for variant in added] + [Cell(variant, shortest) for variant in subtracted],
        [Cell(variant, longest) for variant in subtracted] + [Cell(variant, shortest) for variant in added],
    )


def _cell_contrast(frames: Frames, added: Sequence[Cell], subtracted: Sequence[Cell]) -> Estimate | None:
    """Return the sum of losses at the end of some cells less that of others, paired by seed."""
    added_keys, subtracted_keys = (
        [TRAININGS.run_keys(frames, cell) for cell in cells if cell in SETTINGS]
        for cells in (added, subtracted)
    )
    if len(added_keys) < len(added) or len(subtracted_keys) < len(subtracted):
        return None  # a cell whose learning rate is not chosen yet
    if not all([*added_keys, *subtracted_keys]):
        return None
    return final_contrast(frames, added_keys, subtracted_keys, COLUMN)


def claims() -> list[Claim]:
    shortest, *_, longest = EVERY["paper"]
    by_period = [
        make_claim(f"survey.local-parts.{name}", contrast, name, every, case=str(every), every=every)
        for name in CONTRASTS
        for every in EVERY["paper"]
    ]
    growing = [
        make_claim(
            "survey.local-parts.grows",
            contrast_growth,
            name,
            case=name,
            effect=effect,
            shortest=shortest,
            longest=longest,
        )
        for name, effect in _DATA["growing"].items()
    ]
    return by_period + growing
