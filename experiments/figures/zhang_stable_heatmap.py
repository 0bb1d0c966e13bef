"""Zhang's Stable Top-K slides: where the top-k falls over training steps, by regions and elements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames
from analysis.records.schema import REGIONS, SLICES
from analysis.stats import PERCENT
from analysis.tables import Table
from experiments.figures import _selection_looks as looks
from experiments.figures.papers import make_claim, published_value

TITLE = "Where Top-k's selection falls over training: regions and single elements"
LOOKS = {
    size: style.MethodStyle("single elements" if size == 1 else f"regions of {size:,}", colour, "o", "")
    for size, colour in zip(REGIONS, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True)
}
SCALE = published_value("zhang.scale.looks")
LATER = 100  # steps between two selections, of the table
REGION = 100  # elements, of the table's last column
runs = looks.training_runs_with_looks


def draw(frames: Frames, profile: str) -> plots.Figure:
    models = looks.frames_by_model(frames)
    maps = [_heatmap_panel(model, looks.select_first_run(runs)) for model, runs in models.items()]
    labels = (f"Slice of its largest tensor, of {SLICES}", "Selected again (%)")
    panels = [*maps, *map(_lag_panel, models.values())]
    return plots.compose_figure(panels, 4.2, num_rows=2, ylabel=labels, sharey="row")


def _heatmap_panel(model: str, run: Frames) -> plots.Panel:
    heat = looks.select_looks(run, "heat", looks.largest_tensor_name_or_empty(run))
    image = heat.pivot_table(index="x", columns="step", values="value").to_numpy()
    return plots.heatmap_panel(image, float(heat["step"].max()), title=model, xlabel="Step")


def _lag_panel(frames: Frames) -> plots.Panel:
    lines = []
    for size, look in LOOKS.items():
        kept, at_random = (100 * reselected_share_by_lag(frames, what, size) for what in ("kept", "shuffled"))
        lines.append(plots.Curve(look, kept.index, kept, {"markersize": 2.5}))
        lines.append(
            plots.Curve(look, at_random.index, at_random, {"linestyle": ":", "marker": "", "label": None})
        )
    return plots.curves_panel(lines, grid=None, xscale="log", xlabel="Steps later", ylim=(0, 100))


def reselected_share_by_lag(frames: Frames, kind: str, region_elements: int) -> pd.Series[float]:
    """Return the share of the largest tensor that is selected again, by the steps between.

    Means over looks and runs.
    """
    selected = looks.select_looks(
        frames, kind, f"{looks.largest_tensor_name_or_empty(frames)}/{region_elements}"
    )
    by_lag: pd.Series[float] = selected.groupby("x")["value"].mean()
    return by_lag


def table(frames: Frames) -> Table:
    measures: looks.Measures = {
        f"{size:,}": (partial(reselected_percent_at_lag, region_elements=size), PERCENT) for size in REGIONS
    }
    at_random = partial(reselected_percent_at_lag, region_elements=REGION, kind="shuffled")
    rows = looks.rows_of_means_by_model(
        frames, {**measures, f"{REGION:,}, drawn at random": (at_random, PERCENT)}
    )
    table = pd.DataFrame(rows)
    tensors = [looks.largest_tensor_name_or_empty(runs) for runs in looks.frames_by_model(frames).values()]
    table.insert(1, "tensor", tensors)
    title = f"Selected again {LATER} steps later, by the elements of a region"
    return Table(title, table, dict.fromkeys(table.columns[2:], "%"))


def reselected_percent_at_lag(run: Frames, region_elements: int, kind: str = "kept") -> float:
    """Return the percent selected again, at the distance next to `LATER`."""
    by_lag = reselected_share_by_lag(run, kind, region_elements)
    return 100 * float(by_lag.iloc[int(np.abs(by_lag.index.to_numpy() - LATER).argmin())])


def claims() -> list[Claim]:
    return [
        make_claim(
            f"zhang.{name}", looks.mean_over_task_runs, task, above, (-100.0, 100.0), case=task, label=label
        )
        for task, label in looks.MODELS.items()
        for name, above in (
            ("regions", _reselected_points_above_chance),
            ("elements", _reselected_points_above_elements),
        )
    ]


def mean_reselected_percent(run: Frames, kind: str, region_sizes: Sequence[int] = REGIONS[1:]) -> float:
    """Return the percent selected again, the mean over all steps between and regions of these sizes."""
    return float(np.mean([100 * reselected_share_by_lag(run, kind, size).mean() for size in region_sizes]))


def _reselected_points_above_chance(run: Frames) -> float:
    return mean_reselected_percent(run, "kept") - mean_reselected_percent(run, "shuffled")


def _reselected_points_above_elements(run: Frames) -> float:
    return mean_reselected_percent(run, "kept") - mean_reselected_percent(run, "kept", REGIONS[:1])
