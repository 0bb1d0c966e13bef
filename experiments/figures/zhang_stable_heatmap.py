"""Zhang's Stable Top-K slides: where the top-k falls over training steps, by regions and elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.looks import REGIONS, SLICES
from analysis.numbers import number
from analysis.stats import SHARE, Value
from analysis.tables import Table
from experiments.figures import _looks as looks

TITLE = "Where Top-k's selection falls over training: regions and single elements"
COLOURS = dict(zip(REGIONS, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2"), strict=True))
LATER = 100  # steps between two selections that are compared
REGION = 100  # elements, of the claims


def runs(profile: str) -> list[list[str]]:
    return looks.runs(profile)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError("nothing to draw: there is no run")
    found = looks.models(frames)
    with plots.canvas(style.two_columns(4.2), 2, len(found), squeeze=False, sharey="row") as (
        figure,
        (top, bottom),
    ):
        for axes, (model, of_model) in zip(top, found.items(), strict=True):
            of_first = looks.first(of_model)
            heat = looks.seen(of_first, "heat", looks.largest(of_first))
            image = heat.pivot_table(index="x", columns="step", values="value").to_numpy()
            relative = image / max(float(image.mean()), 1e-12)
            extent = (0, float(heat["step"].max()), 0, SLICES)
            axes.imshow(relative, origin="lower", aspect="auto", extent=extent, vmin=0, vmax=4, cmap="Blues")
            axes.set(title=model, xlabel="Step")
        top[0].set_ylabel(f"Slice of its largest tensor, of {SLICES}")
        for axes, of_model in zip(bottom, found.values(), strict=True):
            for size in REGIONS:
                kept, drawn = (curve(of_model, what, size) for what in ("kept", "shuffled"))
                label = "single elements" if size == 1 else f"regions of {size:,}"
                axes.plot(
                    kept.index, 100 * kept, color=COLOURS[size], marker="o", markersize=2.5, label=label
                )
                axes.plot(drawn.index, 100 * drawn, color=COLOURS[size], linestyle=":")
            axes.set(xscale="log", xlabel="Steps later", ylim=(0, 100))
        bottom[0].set_ylabel("Selected again (%)")
        handles, labels = bottom[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(REGIONS))
    return figure


def curve(frames: Frames, what: str, size: int) -> pd.Series[float]:
    """Of the largest tensor the share that is selected again, over the steps between; means over looks and
    runs.
    """
    found = looks.seen(frames, what, f"{looks.largest(frames)}/{size}")
    by_lag: pd.Series[float] = found.groupby("x")["value"].mean()
    return by_lag


def table(frames: Frames) -> Table:
    rows = [
        {
            "model": model,
            "tensor": looks.largest(of_model),
            **{f"{size:,}": looks.over_runs(of_model, partial(kept, size=size), SHARE) for size in REGIONS},
            f"{REGION:,}, drawn at random": looks.over_runs(
                of_model, lambda run: kept(run, REGION, "shuffled"), SHARE
            ),
        }
        for model, of_model in looks.models(frames).items()
    ]
    columns = [*(f"{size:,}" for size in REGIONS), f"{REGION:,}, drawn at random"]
    title = f"Selected again {LATER} steps later, by the elements of a region"
    return Table(title, pd.DataFrame(rows), dict.fromkeys(columns, "%"))


def kept(run: Frames, size: int, what: str = "kept") -> float:
    """% selected again, at the distance next to `LATER`."""
    by_lag = curve(run, what, size)
    if not len(by_lag):
        return float("nan")
    return 100 * float(by_lag.iloc[int(np.abs(by_lag.index.to_numpy() - LATER).argmin())])


def caption(frames: Frames, profile: str) -> str:
    return (
        "Top: where in each model's largest tensor (of several as large, the first by name) the selected "
        "elements lie, by slice and step; white: none, darkest: four times the mean or more (first seed, "
        "rank 0). Bottom: of what Top-k selected in that tensor, the share that it selects again so many "
        "steps later; of regions, those with the largest norms, as large a share of them as of elements; "
        f"dotted: as many regions drawn at random. Mean over looks and seeds. {captions.setting(frames)}"
    )


def claims() -> list[Claim]:
    return [
        claim
        for task, label in looks.MODELS.items()
        for claim in (
            _claim(
                f"regions of the {label} are stable: more of them are selected again than by chance",
                "regions are stable",
                partial(_of, task=task, what=_above_chance),
            ),
            _claim(
                f"single elements of the {label} are not: fewer are selected again than regions",
                "individual gradient positions are not",
                partial(_of, task=task, what=_above_elements),
            ),
        )
    ]


def _above_chance(run: Frames) -> float:
    return kept(run, REGION) - kept(run, REGION, "shuffled")


def _above_elements(run: Frames) -> float:
    return kept(run, REGION) - kept(run, 1)


def _claim(text: str, paper: str, ours: Callable[[Frames], Value | None]) -> Claim:
    return Claim(
        text=text,
        paper=paper,
        unit="points",
        source="slides with BERT's and MAE's tensors, regions of 10,000 and of 1",
        kind="ordering",
        tolerance=0.0,
        reason=f"Any margin counts, {LATER} steps later, regions of {number(REGION)} elements.",
        ours=ours,
    )


def _of(frames: Frames, task: str, what: Callable[[Frames], float]) -> Value | None:
    return looks.over_runs(looks.of_task(frames, task), what, (-100.0, 100.0))
