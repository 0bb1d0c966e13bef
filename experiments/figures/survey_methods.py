"""Every method on one task: the small CNN on CIFAR-10, 8 workers x batch 16, density 0.01.

Not a figure of a paper; the claims are Eghlidi and Jaggi's (2020), who compare scopes, selections and
exchanges on ResNet-18.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import scale
from experiments.figures.papers import claim

TITLE = "All methods on CIFAR-10: accuracy, density, bytes on the wire"
RATES = (0.1, 0.01)  # the learning rates tried with every method; the best one counts
LOW = (*RATES, 0.001)  # for those that diverge at 0.1
NEAR = 10.0  # points of top-1 from dense: the distance within which a method keeps up at this scale
# Eghlidi and Jaggi's, as columns of the records.
SCALE = {
    "task.name": "resnet18_cifar10", "task.batch_size": 128, "workers": 8, "train.epochs": 300,
    "method.density": 0.01,
}  # fmt: skip
ROW_IN = 0.19  # inches of height per method
BEST = style.Look("best learning rate", "#111111", "D", "")
OTHER = style.Look("other learning rates", "#999999", "o", "")
JOINED = style.Look("", "#BBBBBB", "", "")
SENT = style.Look("sent by a worker", "#0072B2", "o", "")
UPDATED = style.Look("in the update", "#D55E00", "s", "")


class Tried(NamedTuple):
    """A method as it is run here."""

    label: str
    settings: RunSettings
    rates: tuple[float, ...] = RATES
    why: str = ""  # it may end further from dense than NEAR


STALE = "what was not chosen for long is delivered at once, and momentum repeats it"
FEW = "k elements in the update of all workers together, not up to P k"
NO_SCALE = "no residual and no scale: every weight moves by the learning rate"
# The recipe raises the density in the first epochs, which here would be a fifth of the training.
D: RunSettings = {"method.density": 0.01, "method.density_warmup": []}
VARIANTS = (
    Tried("dense", {"method": "dense"}),
    Tried("Top-k", {"method": "topk", **D}),
    Tried("Top-k layer-wise", {"method": "topk_layerwise", **D}),
    Tried("Random-k, no feedback", {"method": "randomk", **D}, why="99 % of each gradient is thrown away"),
    Tried("Random-k with feedback", {"method": "randomk_feedback", **D}, LOW, STALE),
    Tried("Block-random-k", {"method": "blockrandomk", **D}, LOW, STALE),
    Tried(
        "Block-random-k allreduce", {"method": "blockrandomk", **D, "method.exchange": "allreduce"},
        LOW, STALE,
    ),
    Tried("Gaussian-k", {"method": "gaussiank", **D}),
    Tried("Gaussian-k as published", {"method": "gaussiank", **D, "method.rule": "published"}),
    Tried("DGC", {"method": "dgc", **D}),
    Tried("SparCML", {"method": "sparcml", **D}),
    Tried("gTop-k", {"method": "gtopk", **D}, why=FEW),
    Tried("Ok-Topk", {"method": "oktopk", **D}, why=FEW),
    Tried("Stable Top-K", {"method": "stable_topk", **D, "method.block": 10, "method.every": 5}, LOW, STALE),
    Tried("hard threshold", {"method": "hardthreshold", **D}),
    Tried("SIDCo", {"method": "sidco", **D}),
    Tried("AdaComp", {"method": "adacomp"}),
    Tried("ScaleCom", {"method": "scalecom", **D}, why=FEW),
    Tried("DEFT", {"method": "deft", **D}, why=FEW),
    Tried("MiCRO", {"method": "micro", **D}, why=FEW),
    Tried("ExDyna", {"method": "exdyna", **D}, why=FEW),
    Tried("QSGD", {"method": "qsgd"}),
    Tried("TernGrad", {"method": "terngrad"}),
    Tried("signSGD", {"method": "signsgd"}, (0.01, 0.001), NO_SCALE),
    Tried("EF-signSGD", {"method": "efsignsgd"}),
    Tried("PowerSGD", {"method": "powersgd"}),
)  # fmt: skip
SMOKE = ("dense", "Top-k", "Random-k, no feedback")
# The same small task everywhere, on whatever device: the paper's schedule in a tenth of its epochs.
TRAINING: RunSettings = {
    "task": "cnn_cifar10", "cluster": "virtual", "task.batch_size": 16, "train.epochs": 9,
    "task.lr_warmup_epochs": 1, "task.lr_milestones": [5, 8], "train.held_out": 5000,
    "train.validate_every": 3, "timing.mode": "production",
}  # fmt: skip


def runs(profile: str) -> list[Run]:
    """One training per method and learning rate."""
    if profile == "smoke":
        shared = yoon2022.start(profile, scale("convergence", profile)) | {"train.held_out": 100, "seed": 0}
        return [shared | variant.settings for variant in VARIANTS if variant.label in SMOKE]
    more = {"launch.runs_per_gpu": 4} if profile == "paper" else {}
    shared = yoon2022.start(profile, TRAINING) | more | {"seed": 0}
    return [
        shared | {**variant.settings, **({} if rate == RATES[0] else {"task.lr": rate})}
        for variant in VARIANTS
        for rate in variant.rates
    ]


def chosen(frames: Frames) -> pd.DataFrame:
    """One row per method: the last epoch of the run with the best learning rate, and the others'.

    `score` is the accuracy on the test set; in records of trainings that held no images out, it is that by
    which the rate was chosen.
    """
    rows: list[dict[str, Any]] = []
    last = frames.epochs.sort_values("epoch").groupby("key").tail(1)
    runs = frames.runs.reindex(columns=["key", "task.lr", "config_json"]).rename(columns={"task.lr": "rate"})
    ended = runs.merge(last, on="key")
    ended["label"] = ended["config_json"].map(label)
    ended["score"] = ended["test_top1"].fillna(ended["val_top1"])
    for variant in VARIANTS:
        of_variant = ended[ended["label"] == variant.label].to_dict("records")
        candidates = [{str(name): value for name, value in row.items()} for row in of_variant]
        if candidates:
            best = max(candidates, key=lambda candidate: candidate["val_top1"])
            others = [candidate for candidate in candidates if candidate is not best]
            rows.append({**best, "others": others, "why": variant.why})
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def label(config_json: str) -> str:
    """The variant that a run with this config is of."""
    method = json.loads(config_json)["method"]
    special = {
        ("topk", method.get("scope") == "layer"): "Top-k layer-wise",
        ("randomk", method.get("feedback") in ("gradient", True)): "Random-k with feedback",
        ("blockrandomk", method.get("exchange") == "allreduce"): "Block-random-k allreduce",
        ("gaussiank", method.get("rule") == "published"): "Gaussian-k as published",
    }
    return special.get((method["name"], True)) or NAMES.get(method["name"], method["name"])


NAMES = {variant.settings["method"]: variant.label for variant in reversed(VARIANTS)} | {
    "randomk": "Random-k, no feedback"
}


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = chosen(frames)
    if not len(found):
        raise ValueError(plots.EMPTY)
    rows = np.arange(len(found))
    others = [
        plots.Dot(OTHER, other["score"], y, {"mfc": "white", "ms": 3.2})
        for y, of_row in enumerate(found["others"])
        for other in of_row
    ]
    best = plots.Dot(BEST, found["score"], rows, {"ms": 3.2, "zorder": 3})
    densities = [found["sent_density"], found["update_density"]]
    joined = plots.Dot(JOINED, densities, [rows, rows], {"linestyle": "-", "lw": 1, "zorder": 1})
    shares = [
        joined, plots.Dot(SENT, densities[0], rows, {"ms": 4}), plots.Dot(UPDATED, densities[1], rows),
    ]  # fmt: skip
    numbers = [str(row + 1) for row in rows]
    named = [f"{name}  {row}" for name, row in zip(found["label"], numbers, strict=True)]
    top1 = "Test top-1 (%)"
    panels = [
        plots.dots([best, *others], rows=named, grid="both", xlabel=top1),
        plots.dots(shares, rows=named, grid="both", xlabel="Share of elements", xscale="log", yticklabels=[]),
        plots.layered(
            plots.kind(marks.numbered)(found["wire_bytes"], found["score"], numbers),
            plots.dots([], grid="both", xlabel="Bytes sent per worker and step", ylabel=top1),
        ),
    ]
    for dense in found.loc[found["label"] == "dense", "score"]:
        panels[0] = plots.layered(plots.shade("x", dense - NEAR, dense), panels[0])
        panels[2] = plots.layered(plots.shade("y", dense - NEAR, dense), panels[2])
    height, widths = 0.9 + ROW_IN * len(found), (1.1, 1, 1.5)
    return plots.picture(panels, height, loc="outside upper center", width_ratios=widths)


def table(frames: Frames) -> Table:
    """Accuracy, densities, bytes and host synchronisations per method, of the last epoch."""
    found = chosen(frames)
    dense = found.loc[found["label"] == "dense", "score"]
    rows = []
    for row in found.to_dict("records"):
        below = float(dense.iloc[0]) - row["score"] if len(dense) else np.nan
        others = (f"{number(other['rate'])}: {number(other['score'])}" for other in row["others"])
        rows.append({
            "method": row["label"],
            "test top-1": row["score"],
            "below dense": below,
            "learning rate": row["rate"],
            "others: their top-1": ", ".join(others),
            "density": row["sent_density"],
            "union density": row["update_density"],
            "per step": row["wire_bytes"],
            "host syncs per step": row["host_syncs"],
        })  # fmt: skip
    units = {"test top-1": "%", "below dense": "points", "per step": "bytes"}
    far = [row for row in rows if row["below dense"] > NEAR]
    note = f"More than {number(NEAR)} points below dense: {'; '.join(_reasons(far))}." if far else ""
    return Table("Every method at the end of its training", pd.DataFrame(rows), units, note)


def _reasons(far: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods that end far from dense, and why."""
    why = {variant.label: variant.why for variant in VARIANTS}
    methods: dict[str, list[str]] = {}
    for row in far:
        methods.setdefault(why[row["method"]], []).append(row["method"])
    return [f"{captions.listed(labels)}{f' ({reason})' * bool(reason)}" for reason, labels in methods.items()]


def _chosen_by(frames: Frames) -> str:
    """The images by which the learning rate was chosen, as the records say."""
    held_out = frames.runs.get("train.held_out", pd.Series(dtype=float)).fillna(0)
    if len(held_out) and held_out.min() > 0:
        return f"that counts which is best on {number(held_out.min())} training images that were held out"
    return "the best by final top-1 counts; its selection and its score use the same test images"


def caption(frames: Frames, profile: str) -> str:
    epochs, steps = (int(frames.epochs[name].max()) for name in ("epoch", "step"))
    return (
        f"Test top-1 of every method at the end (left; grey band: within {number(NEAR)} points of dense), "
        "the share of elements that a worker sent and that the update had (middle), and the accuracy against "
        "the bytes that a worker sent per step, by count (right, with the numbers of the rows): methods "
        "choose their budget differently, and only those near one vertical line compare. Densities (of "
        "elements that are not zero) and bytes are means of rank 0's steps since the validation before the "
        f"last. {captions.setting(frames)} Of the learning rates in the table {_chosen_by(frames)}. "
        f"{epochs} epochs = {steps} optimiser steps, half of fig3's, and one seed: a shorter training "
        f"favours Random-k, a longer one Top-k (fig3).{captions.virtual(frames)} Host synchronisations are "
        "counted where a GPU would make the host wait."
    )


def claims() -> list[Claim]:
    spread = yoon2022.gap_spread("val_top1")
    return [
        claim(
            "eghlidi2020.block-allreduce-below-allgather", _gap, "Block-random-k", "Block-random-k allreduce",
            tolerance=spread,
        ),
        claim(
            "eghlidi2020.topk-layerwise-above-rates", _gap, "Top-k layer-wise", "Top-k",
            id="layerwise-above-global",
        ),
        claim("eghlidi2020.topk-ends-close", _gap, "dense", "Top-k", tolerance=spread),
    ]  # fmt: skip


def _gap(frames: Frames, above: str, below: str) -> Value | None:
    """Final top-1 of one method less that of another, each at its best learning rate."""
    found = chosen(frames)
    if not len(found):
        return None
    top1 = found.set_index("label")["score"]
    return Value(float(top1[above] - top1[below]), n=1) if {above, below} <= set(top1.index) else None
