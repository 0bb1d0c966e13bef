"""Why Top-k ends below dense at the laptop's scale: learning rate, momentum, horizon and density, in turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import Value, curve, final, final_difference, over_units
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Why Top-k lags behind dense at a small scale"
SCALE = yoon2022.TRAINING_SCALE
HELD_OUT = 5000  # training images to tune and to compare on: of the 50,000
COLUMN = "test_top1"  # the test set, seen once at the end; rates are chosen by val_top1, on held-out images
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": [1, 2]}
RATES = (0.03, 0.1, 0.3)
DENSITIES = (0.003, 0.01, 0.03, 0.1)
HORIZONS = (1, 2, 4)
EPOCH_STEPS = 24  # at horizon 1: half of the paper's 49, so that 2 is about the length of their training
AFTER, BEFORE, UNMASKED = "after", "before, masked", "before, unmasked"
# Exact Top-k of the whole model with momentum in front of the residual: DGC, its sample being everything.
CORRECTED = [
    "method=dgc", "method.sample=1", "method.scope=global", "method.dense_vectors=false", "task.momentum=0",
]  # fmt: skip


class Variant(NamedTuple):
    """A training: the method and what is changed."""

    method: str  # dense or topk
    rate: float = 0.1
    density: float = 0.01
    momentum: str = AFTER
    horizon: int = 1

    def words(self, steps: int) -> list[str]:
        """
        Args:
            steps: of an epoch, where the horizon is 1.
        """
        words = ["method=dense"]
        if self.method == "topk":
            words = ["method=topk"] if self.momentum == AFTER else [*CORRECTED]
            words += [f"method.density={self.density}"]
        if self.momentum == UNMASKED:
            words += ["method.masking=false"]
        if self.rate != 0.1:
            words += [f"task.lr={self.rate}"]
        return [*words, f"train.epoch_steps={steps * self.horizon}"]


DENSE, TOPK = Variant("dense"), Variant("topk")
PANELS: dict[str, dict[Any, tuple[Variant, Variant]]] = {  # at each point dense, and Top-k
    "Learning rate": {rate: (DENSE._replace(rate=rate), TOPK._replace(rate=rate)) for rate in RATES},
    "Density of Top-k": {density: (DENSE, TOPK._replace(density=density)) for density in DENSITIES},
    "Momentum of Top-k": {
        momentum: (DENSE, TOPK._replace(momentum=momentum)) for momentum in (AFTER, BEFORE, UNMASKED)
    },
    "Length of training": {
        horizon: (DENSE._replace(horizon=horizon), TOPK._replace(horizon=horizon)) for horizon in HORIZONS
    },
}
SMOKE = [DENSE, TOPK, TOPK._replace(density=0.1)]


def variants() -> list[Variant]:
    """Every training once, the shortest first."""
    pairs = [pair for points in PANELS.values() for pair in points.values()]
    found = dict.fromkeys(variant for pair in pairs for variant in pair)
    return sorted(found, key=lambda variant: variant.horizon)


def runs(profile: str) -> list[list[str]]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[list[str]]:
    return _trainings(profile, MORE_SEEDS[profile])


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = _by_variant(frames)
    if not found:
        raise ValueError("nothing to draw: there is no run")
    with plots.canvas(style.two_columns(3.9), 2, 3) as (figure, rows):
        axes = rows.flat
        for panel, (name, points) in zip(axes, PANELS.items(), strict=False):
            _panel(panel, frames, found, points)
            panel.set(xlabel=name)
        rows[0][0].set_ylabel("Test top-1 at the end (%)")
        rows[1][0].set_ylabel("Test top-1 at the end (%)")
        _captured(rows[1][1], frames, found)
        _fit(rows[1][2], frames, found)
        handles, labels = rows[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
    return figure


def table(frames: Frames) -> Table:
    """Every variant: accuracy, the gap to its dense training, training loss, captured energy."""
    found = _by_variant(frames)
    rows = []
    for variant, keys in found.items():
        base = DENSE._replace(rate=variant.rate, horizon=variant.horizon)
        rows.append({
            "variant": label(variant),
            "held-out top-1": final(frames, keys, "val_top1"),
            "test top-1": final(frames, keys, COLUMN),
            "below dense": _gap(frames, base, variant) if variant.method == "topk" else None,
            "training loss": final(frames, keys, "train_loss"),
            "energy captured at the end": final(frames, keys, "captured_energy"),
            "n": len(keys),
        })  # fmt: skip
    units = {"held-out top-1": "%", "test top-1": "%", "below dense": "points"}
    return Table("Every variant at the end of its training", pd.DataFrame(rows), units)


def label(variant: Variant) -> str:
    """In what it differs from the paper's settings."""
    name = "dense" if variant.method == "dense" else f"Top-k, density {number(variant.density)}"
    rate = f", rate {number(variant.rate)}" if variant.rate != DENSE.rate else ""
    momentum = f", momentum {variant.momentum}" if variant.momentum != AFTER else ""
    return f"{name}{rate}{momentum}" + (f", {variant.horizon} x as long" if variant.horizon > 1 else "")


def caption(frames: Frames, profile: str) -> str:
    seeds = min(len(keys) for keys in _by_variant(frames).values())
    steps = captions.listed(captions.values(frames, "steps_total"))
    return (
        "What changes the distance between Top-k and dense: one thing at a time, all else as in the paper "
        "(learning rate 0.1, momentum 0.9 after aggregation; density 0.01 in place of 0.001, and 138 epochs "
        f"of {EPOCH_STEPS} steps in place of 49, unless the axis says otherwise). "
        "Momentum before aggregation is the momentum correction of Lin et al. 2018, with or without their "
        f"masking. {captions.setting(frames)} {number(HELD_OUT)} training images are held out, and whatever "
        "is chosen is chosen on them; drawn is the test set, seen once at the end. Bars: 95 % intervals over "
        f"seeds, of which every training has {seeds} or more; {steps} optimiser steps; lowest right: the "
        "one against the other, every variant a point. Captured energy: ||TopK(u)||^2 / ||u||^2 of "
        "gradient plus residual u, on rank 0 in the last step of an epoch."
    )


def claims() -> list[Claim]:
    return [
        _question(
            "a learning rate of its own brings Top-k nearer to dense: by how much",
            "each method at 0.03, 0.1 or 0.3, chosen on held-out images; gap at 0.1 less gap at those",
            _gain_by_rate,
        ),
        _question(
            "momentum before aggregation, masked, brings Top-k nearer to dense: by how much",
            "Lin et al. 2018, momentum correction and factor masking, against momentum after aggregation",
            lambda frames: _gap(frames, TOPK._replace(momentum=BEFORE), TOPK),
        ),
        _question(
            "of momentum before aggregation, masking is what helps: by how much",
            "Lin et al. 2018: masked less unmasked",
            lambda frames: _gap(frames, TOPK._replace(momentum=BEFORE), TOPK._replace(momentum=UNMASKED)),
        ),
        _question(
            "a density of 0.1 brings Top-k nearer to dense than 0.01: by how much",
            "Top-k at 0.1 less Top-k at 0.01",
            lambda frames: _gap(frames, TOPK._replace(density=0.1), TOPK),
        ),
        _question(
            "four times the steps bring Top-k nearer to dense: by how much",
            f"gap after {number(138 * EPOCH_STEPS)} steps less gap after {number(4 * 138 * EPOCH_STEPS)}",
            lambda frames: _difference(
                frames, (DENSE, TOPK), (DENSE._replace(horizon=4), TOPK._replace(horizon=4))
            ),
        ),
    ]


def _question(text: str, source: str, ours: Any) -> Claim:
    return Claim(
        text=text,
        paper="not measured",
        unit="points",
        source=f"ours: {source}",
        kind="ordering",
        tolerance=0.0,
        reason="Any margin counts; paired by seed.",
        ours=ours,
    )


def _trainings(profile: str, seeds: Sequence[int]) -> list[list[str]]:
    scale = "laptop" if profile == "paper" else profile  # the same small task everywhere, on whatever device
    shared = ["recipe=yoon2022", f"profile={profile}", *yoon2022.CONVERGENCE[scale]]
    held_out = 100 if profile == "smoke" else HELD_OUT
    steps = 10 if profile == "smoke" else EPOCH_STEPS
    every = [] if profile == "smoke" else ["train.validate_every=6"]
    shared += [f"train.held_out={held_out}", *every]
    return [
        # Of two words for one leaf the second one counts.
        list(
            {
                word.partition("=")[0]: word for word in (*shared, *variant.words(steps), f"seed={seed}")
            }.values()
        )
        for seed in seeds
        for variant in (SMOKE if profile == "smoke" else variants())
    ]


def _by_variant(frames: Frames) -> dict[Variant, list[str]]:
    """The runs of each, in the order of `variants`."""
    found: dict[Variant, list[str]] = {}
    if not len(frames.runs):
        return found
    shortest = float(frames.runs["steps_total"].min())
    for run in frames.runs.sort_values("seed").to_dict("records"):
        is_dense, momentum = run["method.name"] == "dense", AFTER
        if run["method.name"] == "dgc":
            is_masked = json.loads(str(run["config_json"]))["method"]["masking"]
            momentum = BEFORE if is_masked else UNMASKED
        variant = Variant(
            "dense" if is_dense else "topk",
            float(run["task.lr"]),
            TOPK.density if is_dense else float(run["method.density"]),
            momentum,
            round(float(run["steps_total"]) / shortest),
        )
        found.setdefault(variant, []).append(str(run["key"]))
    return {variant: found[variant] for variant in variants() if variant in found}


def _gap(frames: Frames, above: Variant, below: Variant) -> Value | None:
    found = _by_variant(frames)
    return final_difference(frames, found.get(above, []), found.get(below, []), COLUMN)


def _difference(
    frames: Frames, first: tuple[Variant, Variant], second: tuple[Variant, Variant]
) -> Value | None:
    """The distance between two variants less that between two others, paired by seed."""
    ends = [_ends(frames, variant) for variant in (*first, *second)]
    together = pd.concat(ends, axis="columns", join="inner").dropna()
    if not len(together):
        return None
    above, below, other_above, other_below = together.to_numpy().T
    return over_units((above - below) - (other_above - other_below))


def _gain_by_rate(frames: Frames) -> Value | None:
    """How much nearer Top-k is to dense where each has the rate that is best on held-out images."""
    tuned = []
    for method in (DENSE, TOPK):
        held_out = {rate: _ends(frames, method._replace(rate=rate), "val_top1") for rate in RATES}
        means = {rate: float(ends.mean()) for rate, ends in held_out.items() if len(ends)}
        if len(means) < len(RATES):
            return None
        tuned.append(method._replace(rate=max(means, key=lambda rate: (means[rate], -rate))))
    return _difference(frames, (DENSE, TOPK), (tuned[0], tuned[1]))


def _ends(frames: Frames, variant: Variant, column: str = COLUMN) -> pd.Series[float]:
    """`column` at the end of each of its trainings, by seed."""
    keys = _by_variant(frames).get(variant, [])
    if not keys:
        return pd.Series(dtype=float)
    last = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch").groupby("key")[column].last()
    by_seed = last.rename(index=frames.runs.set_index("key")["seed"])
    ends: pd.Series[float] = by_seed.groupby(level=0).mean()  # the same training, kept by another search
    return ends


def _panel(
    axes: plots.Axes,
    frames: Frames,
    found: dict[Variant, list[str]],
    points: dict[Any, tuple[Variant, Variant]],
) -> None:
    """Where dense and Top-k end at each point, one curve each."""
    for at, name in enumerate(("dense", "topk")):
        ends = {
            place: (final(frames, found[pair[at]], COLUMN), pair[at])
            for place, pair in enumerate(points.values())
            if pair[at] in found
        }
        shown = {place: value for place, (value, _) in ends.items() if value is not None}
        plots.points(axes, list(shown), list(shown.values()), style.look(name))
        for place, (_, variant) in ends.items():
            finals = [final(frames, [key], COLUMN) for key in found[variant]]
            plots.seeds(axes, place, [one.value for one in finals if one], style.look(name))
    labels = [number(point) if isinstance(point, float) else str(point) for point in points]
    axes.set_xticks(range(len(points)), [text.replace(", ", ",\n") for text in labels])
    axes.set_xlim(-0.4, len(points) - 0.6)
    axes.grid(True, axis="y")


def _captured(axes: plots.Axes, frames: Frames, found: dict[Variant, list[str]]) -> None:
    """The energy that each density captures, along the training."""
    for shade, density in zip(np.linspace(0.35, 1, len(DENSITIES)), DENSITIES, strict=True):
        keys = found.get(TOPK._replace(density=density), [])
        table = curve(frames, keys, "captured_energy")
        if len(table):
            look = style.look("topk")._replace(label=number(density))
            plots.shaded(axes, table["step"], 100 * table["mean"], look, float(shade))
    axes.set(xlabel="Optimiser steps", ylabel="Captured energy (%)", ylim=(0, None), xlim=(0, None))
    axes.grid(True, axis="y")


def _fit(axes: plots.Axes, frames: Frames, found: dict[Variant, list[str]]) -> None:
    """Test accuracy against training loss: on one line, Top-k fits worse; below it, it generalises worse."""
    for variant, keys in found.items():
        loss, top1 = (final(frames, keys, column) for column in ("train_loss", COLUMN))
        if loss and top1:
            plots.seeds(axes, loss.value, [top1.value], style.look(variant.method))
    axes.set(xlabel="Training loss at the end", ylabel="")
    axes.grid(True)
