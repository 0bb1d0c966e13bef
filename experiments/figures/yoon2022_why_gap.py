"""Why Top-k ends below dense at the laptop's scale: learning rate, momentum, horizon and density, in turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, note_read_keys, to_dicts
from analysis.stats import Estimate, estimate_mean, final_difference, final_value, mean_curve
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _runs
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import MORE_SEEDS, SEEDS, scale
from experiments.figures.papers import claim

TITLE = "Why Top-k lags behind dense at a small scale"
SCALE = yoon2022.TRAINING_SCALE
COLUMN = "test_top1"  # the test set, seen once at the end; rates are chosen by val_top1, on held-out images
RATES = (0.03, 0.1, 0.3)
DENSITIES = (0.003, 0.01, 0.03, 0.1)
HORIZONS = (1, 2, 4)
EPOCH_STEPS = 24  # at horizon 1: half of the paper's 49, so that 2 is about the length of their training
MOMENTA = _runs.variants("why-gap")
AFTER, BEFORE, UNMASKED = MOMENTA


class Change(NamedTuple):
    """A training: the method and what is changed."""

    method: str  # dense or topk
    rate: float = 0.1
    density: float = 0.01
    momentum: str = AFTER
    horizon: int = 1

    def settings(self, steps: int) -> RunSettings:
        """Its settings.

        Args:
            steps: of an epoch, where the horizon is 1.
        """
        dense = self.method == "dense"
        own = {"method": "dense"} if dense else {**MOMENTA[self.momentum], "method.density": self.density}
        rate = {} if self.rate == 0.1 else {"task.lr": self.rate}
        return {**own, **rate, "train.epoch_steps": steps * self.horizon}


ByChange = dict[Change, list[str]]  # the runs of each
Points = Mapping[Any, tuple[Change, Change]]  # at each point dense, and Top-k
DENSE, TOPK = Change("dense"), Change("topk")
PANELS: dict[str, Points] = {
    "Learning rate": {rate: (DENSE._replace(rate=rate), TOPK._replace(rate=rate)) for rate in RATES},
    "Density of Top-k": {density: (DENSE, TOPK._replace(density=density)) for density in DENSITIES},
    "Momentum of Top-k": {momentum: (DENSE, TOPK._replace(momentum=momentum)) for momentum in MOMENTA},
    "Length of training": {
        horizon: (DENSE._replace(horizon=horizon), TOPK._replace(horizon=horizon)) for horizon in HORIZONS
    },
}
SMALL = {"alpha": 0.55, "markersize": 2.6, "mew": 0}  # marks of single trainings
SMOKE = [DENSE, TOPK, TOPK._replace(density=0.1)]


def variants() -> list[Change]:
    """Every training once, the shortest first."""
    found = dict.fromkeys(each for points in PANELS.values() for pair in points.values() for each in pair)
    return sorted(found, key=lambda variant: variant.horizon)


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: Sequence[int]) -> list[Run]:
    shared = yoon2022.recipe_run(profile, scale("why-gap", profile))
    steps, found = (10, SMOKE) if profile == "smoke" else (EPOCH_STEPS, variants())
    return [shared | variant.settings(steps) | {"seed": seed} for seed in seeds for variant in found]


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = by_variant(frames)
    if not found:
        raise ValueError("nothing to draw: there is no run")
    panels = [_panel(frames, found, *each) for each in PANELS.items()]
    panels += [_captured(frames, found), _fit(frames, found)]
    ylabel = "Test top-1 at the end (%)"
    return plots.compose_figure(panels, 3.9, rows=2, ylabel=ylabel, loc="outside upper center")


def _panel(frames: Frames, found: ByChange, name: str, points: Points) -> plots.Panel:
    """Ends of dense and Top-k at each point, one curve each, and every training."""
    lines, dots = list[plots.Curve](), list[plots.Curve]()
    for at, look in enumerate((style.method_style("dense"), style.method_style("topk"))):
        keys = {place: found[pair[at]] for place, pair in enumerate(points.values()) if pair[at] in found}
        ends = {place: final_value(frames, own, COLUMN) for place, own in keys.items()}
        shown = {place: value for place, value in ends.items() if value is not None}
        lines.append(plots.Curve(look, list(shown), list(shown.values())))
        for place, own in keys.items():
            finals = [one.value for key in own if (one := final_value(frames, [key], COLUMN))]
            dots.append(plots.Curve(look, [place] * len(finals), finals, SMALL | {"label": None}))
    texts = [format_number(each) if isinstance(each, float) else str(each) for each in points]
    words: dict[str, Any] = {
        "xticks": range(len(points)),
        "xticklabels": [text.replace(", ", ",\n") for text in texts],
    }
    return plots.overlay_panels(
        plots.curves_panel(lines, xlim=(-0.4, len(points) - 0.6), xlabel=name, grid="y", **words),
        plots.dots_panel(dots),
    )


def _captured(frames: Frames, found: ByChange) -> plots.Panel:
    """The energy that each density captures, along the training."""

    lines = []
    for shade, density in zip(np.linspace(0.35, 1, len(DENSITIES)), DENSITIES, strict=True):
        table = mean_curve(frames, found.get(TOPK._replace(density=density), []), "captured_energy")
        if len(table):
            look = style.method_style("topk")._replace(label=format_number(density))
            lines.append(
                plots.panel_maker(marks.draw_shaded_curve)(
                    table["step"], 100 * table["mean"], look, float(shade)
                )
            )
    words: dict[str, Any] = {"xlabel": "Optimiser steps", "ylabel": "Captured energy (%)"}
    return plots.overlay_panels(
        *lines, plots.curves_panel([], ylim=(0, None), xlim=(0, None), grid="y", **words)
    )


def _fit(frames: Frames, found: ByChange) -> plots.Panel:
    """Test accuracy against training loss: on one line, Top-k fits worse; below it, it generalises worse."""
    dots = []
    for variant, keys in found.items():
        loss, top1 = (final_value(frames, keys, column) for column in ("train_loss", COLUMN))
        if loss and top1:
            dots.append(plots.Curve(style.method_style(variant.method), loss.value, top1.value, SMALL))
    return plots.dots_panel(dots, grid="both", xlabel="Training loss at the end")


def table(frames: Frames) -> Table:
    """Every variant: accuracy, the gap to its dense training, training loss, captured energy."""
    rows = [
        {
            "variant": label(variant),
            "held-out top-1": final_value(frames, keys, "val_top1"),
            "test top-1": final_value(frames, keys, COLUMN),
            "below dense": None if variant.method == "dense" else _gap(
                frames, DENSE._replace(rate=variant.rate, horizon=variant.horizon), variant
            ),
            "training loss": final_value(frames, keys, "train_loss"),
            "energy captured at the end": final_value(frames, keys, "captured_energy"),
            "n": len(keys),
        }
        for variant, keys in by_variant(frames).items()
    ]  # fmt: skip
    units = {"held-out top-1": "%", "test top-1": "%", "below dense": "points"}
    return Table.from_rows("Every variant at the end of its training", rows, units)


def label(variant: Change) -> str:
    """Its differences from the paper's settings."""
    name = "dense" if variant.method == "dense" else f"Top-k, density {format_number(variant.density)}"
    rate = f", rate {format_number(variant.rate)}" if variant.rate != DENSE.rate else ""
    momentum = f", momentum {variant.momentum}" if variant.momentum != AFTER else ""
    return f"{name}{rate}{momentum}" + (f", {variant.horizon} x as long" if variant.horizon > 1 else "")


def facts(frames: Frames) -> dict[str, object]:
    """How long, on how many images and with how many seeds was trained."""
    return {
        "epoch_steps": EPOCH_STEPS,
        "held_out": format_number(scale("why-gap", "paper")["train.held_out"]),
        "seeds": min(len(keys) for keys in by_variant(frames).values()),
        "steps": captions.join_values(frames, "steps_total"),
    }


def claims() -> list[Claim]:
    masked, unmasked = TOPK._replace(momentum=BEFORE), TOPK._replace(momentum=UNMASKED)
    gaps = (DENSE, TOPK), (DENSE._replace(horizon=4), TOPK._replace(horizon=4))
    steps = {
        name: format_number(138 * EPOCH_STEPS * horizon) for name, horizon in (("short", 1), ("long", 4))
    }
    return [
        claim("yoon2022.why-gap.own-rate", _gain_by_rate),
        claim("yoon2022.why-gap.momentum-before", _gap, masked, TOPK),
        claim("yoon2022.why-gap.masking", _gap, masked, unmasked),
        claim("yoon2022.why-gap.denser", _gap, TOPK._replace(density=0.1), TOPK),
        claim("yoon2022.why-gap.longer", _difference, *gaps, **steps),
    ]


@cache_by_frames
def by_variant(frames: Frames) -> ByChange:
    """The runs of each, in the order of `variants`."""
    found: ByChange = {}
    if not len(frames.runs):
        return found
    shortest = float(frames.runs["steps_total"].min())
    for run in to_dicts(frames.runs.sort_values("seed")):
        is_dense, momentum = run["method.name"] == "dense", AFTER
        if run["method.name"] == "dgc":
            is_masked = json.loads(str(run["config_json"]))["method"]["masking"]
            momentum = BEFORE if is_masked else UNMASKED
        variant = Change(
            "dense" if is_dense else "topk",
            float(run["task.lr"]),
            TOPK.density if is_dense else float(run["method.density"]),
            momentum,
            round(float(run["steps_total"]) / shortest),
        )
        found.setdefault(variant, []).append(str(run["key"]))
    return {variant: found[variant] for variant in variants() if variant in found}


def _gap(frames: Frames, above: Change, below: Change) -> Estimate | None:
    found = by_variant(frames)
    return final_difference(frames, found.get(above, []), found.get(below, []), COLUMN)


def _difference(
    frames: Frames, first: tuple[Change, Change], second: tuple[Change, Change]
) -> Estimate | None:
    """The distance between two variants less that between two others, paired by seed."""
    ends = [_ends(frames, variant) for variant in (*first, *second)]
    together = pd.concat(ends, axis="columns", join="inner").dropna()
    above, below, other_above, other_below = together.to_numpy().T
    return estimate_mean((above - below) - (other_above - other_below)) if len(together) else None


def _gain_by_rate(frames: Frames) -> Estimate | None:
    """Distance that Top-k gains on dense where each has the rate that is best on held-out images."""
    tuned = []
    for method in (DENSE, TOPK):
        held_out = {rate: _ends(frames, method._replace(rate=rate), "val_top1") for rate in RATES}
        means = {rate: float(ends.mean()) for rate, ends in held_out.items() if len(ends)}
        if len(means) < len(RATES):
            return None
        tuned.append(method._replace(rate=max(means, key=lambda rate: (means[rate], -rate))))
    return _difference(frames, (DENSE, TOPK), (tuned[0], tuned[1]))


def _ends(frames: Frames, variant: Change, column: str = COLUMN) -> pd.Series[float]:
    """`column` at the end of each of its trainings, by seed."""
    keys = by_variant(frames).get(variant, [])
    if not keys:
        return pd.Series(dtype=float)
    note_read_keys(keys)
    epochs = frames.epochs[frames.epochs["key"].isin(keys)]
    last = epochs.sort_values("epoch").groupby("key").tail(1).set_index("key")[column]
    by_seed = last.rename(index=frames.runs.set_index("key")["seed"])
    ends: pd.Series[float] = by_seed.groupby(level=0).mean()  # the same training, kept by another search
    return ends
