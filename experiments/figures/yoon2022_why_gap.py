"""Why Top-k ends below dense at the laptop's scale: learning rate, momentum, horizon and density, in turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, note_read_run_keys, rows_as_dicts
from analysis.stats import Estimate, estimate_mean, final_difference, final_mean, mean_curve
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import MORE_SEEDS, SEEDS, profile_settings, settings_by_variant
from experiments.figures.papers import make_claim

TITLE = "Why Top-k lags behind dense at a small scale"
SCALE = yoon2022.TRAINING_SCALE
COLUMN = "test_top1"  # the test set, seen once at the end; rates are chosen by val_top1, on held-out images
RATES = (0.03, 0.1, 0.3)
DENSITIES = (0.003, 0.01, 0.03, 0.1)
HORIZONS = (1, 2, 4)
EPOCH_STEPS = 24  # at horizon 1: half of the paper's 49, so that 2 is about the length of their training
MOMENTA = settings_by_variant("why-gap")
AFTER, BEFORE, UNMASKED = MOMENTA


class TrainingVariant(NamedTuple):
    """A method of training, and what is changed in it."""

    method: str  # dense or topk
    rate: float = 0.1
    density: float = 0.01
    momentum: str = AFTER
    horizon: int = 1

    def run_settings(self, epoch_steps: int) -> RunSettings:
        """Return the settings of a run.

        Args:
            epoch_steps: where the horizon is 1.
        """
        sparse = {**MOMENTA[self.momentum], "method.density": self.density}
        method = {"method": "dense"} if self.method == "dense" else sparse
        rate = {} if self.rate == DENSE.rate else {"task.lr": self.rate}
        return {**method, **rate, "train.epoch_steps": epoch_steps * self.horizon}

    @property
    def label(self) -> str:
        """Differences from the paper's settings."""
        name = "dense" if self.method == "dense" else f"Top-k, density {format_number(self.density)}"
        rate = f", rate {format_number(self.rate)}" if self.rate != DENSE.rate else ""
        momentum = f", momentum {self.momentum}" if self.momentum != AFTER else ""
        return f"{name}{rate}{momentum}" + (f", {self.horizon} x as long" if self.horizon > 1 else "")


KeysByVariant = dict[TrainingVariant, list[str]]
Points = Mapping[Any, tuple[TrainingVariant, TrainingVariant]]  # at each point dense, and Top-k
DENSE, TOPK = TrainingVariant("dense"), TrainingVariant("topk")
PANELS: dict[str, Points] = {
    "Learning rate": {rate: (DENSE._replace(rate=rate), TOPK._replace(rate=rate)) for rate in RATES},
    "Density of Top-k": {density: (DENSE, TOPK._replace(density=density)) for density in DENSITIES},
    "Momentum of Top-k": {momentum: (DENSE, TOPK._replace(momentum=momentum)) for momentum in MOMENTA},
    "Length of training": {
        horizon: (DENSE._replace(horizon=horizon), TOPK._replace(horizon=horizon)) for horizon in HORIZONS
    },
}
# Every training once, the shortest first.
VARIANTS = sorted(
    dict.fromkeys(variant for points in PANELS.values() for pair in points.values() for variant in pair),
    key=lambda variant: variant.horizon,
)
SMALL = {"alpha": 0.55, "markersize": 2.6, "mew": 0}  # marks of single trainings
SMOKE = [DENSE, TOPK, TOPK._replace(density=0.1)]


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    shared = yoon2022.recipe_run(profile, profile_settings("why-gap", profile))
    steps, variants = (10, SMOKE) if profile == "smoke" else (EPOCH_STEPS, VARIANTS)
    return [
        shared | variant.run_settings(steps) | {"seed": seed}
        for seed in seeds_by_profile[profile]
        for variant in variants
    ]


more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    keys_by_variant = run_keys_by_trained_variant(frames)
    if not keys_by_variant:
        raise ValueError(plots.NOTHING_TO_DRAW)
    panels = [_ends_panel(frames, keys_by_variant, name, points) for name, points in PANELS.items()]
    panels += [_energy_panel(frames, keys_by_variant), _fit_panel(frames, keys_by_variant)]
    ylabel = "Test top-1 at the end (%)"
    return plots.compose_figure(panels, 3.9, num_rows=2, ylabel=ylabel, legend_loc="outside upper center")


def _ends_panel(frames: Frames, keys_by_variant: KeysByVariant, name: str, points: Points) -> plots.Panel:
    """Return the ends of dense and Top-k at each point, one curve each, and every training."""
    lines = []
    dots = []
    for look, line_variants in zip(
        map(style.method_style, ("dense", "topk")), zip(*points.values(), strict=True), strict=True
    ):
        means = {}
        for place, variant in enumerate(line_variants):
            keys = keys_by_variant.get(variant, [])
            ends = [final_mean(frames, [key], COLUMN) for key in keys]
            single = [end.value for end in ends if end]
            dots.append(plots.Curve(look, [place] * len(single), single, SMALL | {"label": None}))
            mean = final_mean(frames, keys, COLUMN)
            if mean:
                means[place] = mean
        lines.append(plots.Curve(look, list(means), list(means.values())))
    texts = [format_number(point) if isinstance(point, float) else str(point) for point in points]
    axes: dict[str, Any] = {
        "xticks": range(len(points)),
        "xticklabels": [text.replace(", ", ",\n") for text in texts],
    }
    return plots.overlay_panels(
        plots.curves_panel(lines, xlim=(-0.4, len(points) - 0.6), xlabel=name, grid="y", **axes),
        plots.dots_panel(dots),
    )


def _energy_panel(frames: Frames, keys_by_variant: KeysByVariant) -> plots.Panel:
    """Return the energy that each density captures, along the training."""
    panels = []
    for shade, density in zip(np.linspace(0.35, 1, len(DENSITIES)), DENSITIES, strict=True):
        keys = keys_by_variant.get(TOPK._replace(density=density), [])
        table = mean_curve(frames, keys, "captured_energy")
        if len(table):
            look = style.method_style("topk")._replace(label=format_number(density))
            draw_shaded = plots.panel_maker(marks.draw_curve_with_end_label)
            panels.append(draw_shaded(table["step"], 100 * table["mean"], look, float(shade)))
    axes: dict[str, Any] = {"xlabel": "Optimiser steps", "ylabel": "Captured energy (%)"}
    return plots.overlay_panels(
        *panels, plots.curves_panel([], ylim=(0, None), xlim=(0, None), grid="y", **axes)
    )


def _fit_panel(frames: Frames, keys_by_variant: KeysByVariant) -> plots.Panel:
    """Return test accuracy against training loss.

    On one line, Top-k fits worse; below it, it generalises worse.
    """
    dots = []
    for variant, keys in keys_by_variant.items():
        loss, top1 = (final_mean(frames, keys, column) for column in ("train_loss", COLUMN))
        if loss and top1:
            dots.append(plots.Curve(style.method_style(variant.method), loss.value, top1.value, SMALL))
    return plots.dots_panel(dots, grid="both", xlabel="Training loss at the end")


def table(frames: Frames) -> Table:
    """Return accuracy, the gap to its dense training, training loss and captured energy of every variant."""
    rows = []
    for variant, keys in run_keys_by_trained_variant(frames).items():
        dense = DENSE._replace(rate=variant.rate, horizon=variant.horizon)
        rows.append({
            "variant": variant.label,
            "held-out top-1": final_mean(frames, keys, "val_top1"),
            "test top-1": final_mean(frames, keys, COLUMN),
            "below dense": None if variant.method == "dense" else final_top1_gap(frames, dense, variant),
            "training loss": final_mean(frames, keys, "train_loss"),
            "energy captured at the end": final_mean(frames, keys, "captured_energy"),
            "n": len(keys),
        })  # fmt: skip
    units = {"held-out top-1": "%", "test top-1": "%", "below dense": "points"}
    return Table.from_rows("Every variant at the end of its training", rows, units)


def facts(frames: Frames) -> dict[str, object]:
    """Return how long, on how many images and with how many seeds was trained."""
    return {
        "epoch_steps": EPOCH_STEPS,
        "held_out": format_number(profile_settings("why-gap", "paper")["train.held_out"]),
        "seeds": min(len(keys) for keys in run_keys_by_trained_variant(frames).values()),
        "steps": captions.join_distinct_values(frames, "steps_total"),
    }


def claims() -> list[Claim]:
    masked = TOPK._replace(momentum=BEFORE)
    unmasked = TOPK._replace(momentum=UNMASKED)
    pairs = (DENSE, TOPK), (DENSE._replace(horizon=4), TOPK._replace(horizon=4))
    steps = {
        name: format_number(138 * EPOCH_STEPS * horizon) for name, horizon in (("short", 1), ("long", 4))
    }
    return [
        make_claim("yoon2022.why-gap.own-rate", topk_gain_at_tuned_rates, answers=["zhang.110"]),
        make_claim("yoon2022.why-gap.momentum-before", final_top1_gap, masked, TOPK),
        make_claim("yoon2022.why-gap.masking", final_top1_gap, masked, unmasked),
        make_claim("yoon2022.why-gap.denser", final_top1_gap, TOPK._replace(density=0.1), TOPK),
        make_claim("yoon2022.why-gap.longer", difference_of_top1_gaps, *pairs, **steps),
    ]


@cache_by_frames
def run_keys_by_trained_variant(frames: Frames) -> KeysByVariant:
    """Return the runs of each variant that has any, the shortest training first."""
    keys_by_variant: KeysByVariant = {}
    if not len(frames.runs):
        return keys_by_variant
    shortest = float(frames.runs["steps_total"].min())
    for run in rows_as_dicts(frames.runs.sort_values("seed")):
        is_dense = run["method.name"] == "dense"
        momentum = AFTER
        if run["method.name"] == "dgc":
            is_masked = json.loads(str(run["config_json"]))["method"]["masking"]
            momentum = BEFORE if is_masked else UNMASKED
        variant = TrainingVariant(
            "dense" if is_dense else "topk",
            float(run["task.lr"]),
            TOPK.density if is_dense else float(run["method.density"]),
            momentum,
            round(float(run["steps_total"]) / shortest),
        )
        keys_by_variant.setdefault(variant, []).append(str(run["key"]))
    return {variant: keys_by_variant[variant] for variant in VARIANTS if variant in keys_by_variant}


def final_top1_gap(frames: Frames, above: TrainingVariant, below: TrainingVariant) -> Estimate | None:
    """Return the final top-1 of one variant less that of another, paired by seed."""
    keys_by_variant = run_keys_by_trained_variant(frames)
    keys, keys_below = (keys_by_variant.get(variant, []) for variant in (above, below))
    return final_difference(frames, keys, keys_below, COLUMN)


def difference_of_top1_gaps(
    frames: Frames,
    first: tuple[TrainingVariant, TrainingVariant],
    second: tuple[TrainingVariant, TrainingVariant],
) -> Estimate | None:
    """Return the distance between two variants less that between two others, paired by seed."""
    ends = [_final_values_by_seed(frames, variant) for variant in (*first, *second)]
    paired = pd.concat(ends, axis="columns", join="inner").dropna()
    above, below, other_above, other_below = paired.to_numpy().T
    return estimate_mean((above - below) - (other_above - other_below)) if len(paired) else None


def topk_gain_at_tuned_rates(frames: Frames) -> Estimate | None:
    """Return the distance that Top-k gains on dense where each has the rate best on held-out images."""
    tuned = []
    for method in (DENSE, TOPK):
        held_out = {
            rate: _final_values_by_seed(frames, method._replace(rate=rate), "val_top1") for rate in RATES
        }
        means = {rate: float(ends.mean()) for rate, ends in held_out.items() if len(ends)}
        if len(means) < len(RATES):
            return None
        tuned.append(method._replace(rate=max(means, key=lambda rate: (means[rate], -rate))))
    return difference_of_top1_gaps(frames, (DENSE, TOPK), (tuned[0], tuned[1]))


def _final_values_by_seed(frames: Frames, variant: TrainingVariant, column: str = COLUMN) -> pd.Series[float]:
    """Return a column at the end of each training of a variant, by seed."""
    keys = run_keys_by_trained_variant(frames).get(variant, [])
    note_read_run_keys(keys)
    epochs = frames.epochs[frames.epochs["key"].isin(keys)]
    last = epochs.sort_values("epoch").groupby("key").tail(1).set_index("key")[column]
    by_seed = last.rename(index=frames.runs.set_index("key").reindex(columns=["seed"])["seed"])
    ends: pd.Series[float] = by_seed.groupby(level=0).mean()  # the same training, kept by another search
    return ends
