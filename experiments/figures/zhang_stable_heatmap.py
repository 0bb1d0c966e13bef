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
from experiments.figures import _looks as looks
from experiments.figures.papers import claim, value

TITLE = "Where Top-k's selection falls over training: regions and single elements"
LOOKS = {
    size: style.MethodStyle("single elements" if size == 1 else f"regions of {size:,}", colour, "o", "")
    for size, colour in zip(REGIONS, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True)
}
SCALE = value("zhang.scale.looks")
LATER = 100  # steps between two selections, of the table
REGION = 100  # elements, of the table's last column
runs = looks.runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    models = looks.frames_by_model(frames)
    maps = [_map(model, looks.first_run(of_model)) for model, of_model in models.items()]
    labels = (f"Slice of its largest tensor, of {SLICES}", "Selected again (%)")
    panels = [*maps, *map(_again, models.values())]
    return plots.compose_figure(panels, 4.2, rows=2, ylabel=labels, sharey="row")


def _map(model: str, run: Frames) -> plots.Panel:
    heat = looks.select_looks(run, "heat", looks.largest_tensor(run))
    image = heat.pivot_table(index="x", columns="step", values="value").to_numpy()
    return plots.heatmap_panel(image, float(heat["step"].max()), title=model, xlabel="Step")


def _again(frames: Frames) -> plots.Panel:
    lines = []
    for size, look in LOOKS.items():
        kept, drawn = (100 * curve(frames, what, size) for what in ("kept", "shuffled"))
        lines.append(plots.Curve(look, kept.index, kept, {"markersize": 2.5}))
        lines.append(plots.Curve(look, drawn.index, drawn, {"linestyle": ":", "marker": "", "label": None}))
    return plots.curves_panel(lines, grid=None, xscale="log", xlabel="Steps later", ylim=(0, 100))


def curve(frames: Frames, what: str, size: int) -> pd.Series[float]:
    """Share of the largest tensor that is selected again, over the steps between; means over looks and
    runs.
    """
    found = looks.select_looks(frames, what, f"{looks.largest_tensor(frames)}/{size}")
    by_lag: pd.Series[float] = found.groupby("x")["value"].mean()
    return by_lag


def table(frames: Frames) -> Table:
    measures: looks.Measures = {f"{size:,}": (partial(kept, size=size), PERCENT) for size in REGIONS}
    drawn = partial(kept, size=REGION, what="shuffled")
    rows = looks.model_rows(frames, {**measures, f"{REGION:,}, drawn at random": (drawn, PERCENT)})
    found = pd.DataFrame(rows)
    tensors = [looks.largest_tensor(of_model) for of_model in looks.frames_by_model(frames).values()]
    found.insert(1, "tensor", tensors)
    title = f"Selected again {LATER} steps later, by the elements of a region"
    return Table(title, found, dict.fromkeys(found.columns[2:], "%"))


def kept(run: Frames, size: int, what: str = "kept") -> float:
    """% selected again, at the distance next to `LATER`."""
    by_lag = curve(run, what, size)
    return 100 * float(by_lag.iloc[int(np.abs(by_lag.index.to_numpy() - LATER).argmin())])


def claims() -> list[Claim]:
    return [
        claim(f"zhang.{name}", looks.model_mean, task, above, (-100.0, 100.0), case=task, label=label)
        for task, label in looks.MODELS.items()
        for name, above in (("regions", _above_chance), ("elements", _above_elements))
    ]


def over_all(run: Frames, what: str, sizes: Sequence[int] = REGIONS[1:]) -> float:
    """% selected again, the mean over all steps between and over regions of these sizes."""
    return float(np.mean([100 * curve(run, what, size).mean() for size in sizes]))


def _above_chance(run: Frames) -> float:
    return over_all(run, "kept") - over_all(run, "shuffled")


def _above_elements(run: Frames) -> float:
    return over_all(run, "kept") - over_all(run, "kept", REGIONS[:1])
