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

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import Value
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022

TITLE = "All methods on CIFAR-10: accuracy, density, bytes on the wire"
RATES = ("0.1", "0.01")  # the learning rates tried with every method; the best one counts
LOW = (*RATES, "0.001")  # for those that diverge at 0.1
NEAR = 10.0  # points of top-1 from dense: the distance within which a method keeps up at this scale
# Eghlidi and Jaggi's, as columns of the records.
SCALE = {
    "task.name": "resnet18_cifar10", "task.batch_size": 128, "workers": 8, "train.epochs": 300,
    "method.density": 0.01,
}  # fmt: skip
ROW_IN = 0.19  # inches of height per method


class Variant(NamedTuple):
    """A method as it is run here."""

    label: str
    words: tuple[str, ...]
    rates: tuple[str, ...] = RATES
    why: str = ""  # it may end further from dense than NEAR


D = "method.density=0.01"
STALE = "what was not chosen for long is delivered at once, and momentum repeats it"
FEW = "k elements in the update of all workers together, not up to P k"
NO_SCALE = "no residual and no scale: every weight moves by the learning rate"
VARIANTS = (
    Variant("dense", ("method=dense",)),
    Variant("Top-k", ("method=topk", D)),
    Variant("Top-k layer-wise", ("method=topk_layerwise", D)),
    Variant("Random-k, no feedback", ("method=randomk", D), why="99 % of each gradient is thrown away"),
    Variant("Random-k with feedback", ("method=randomk_feedback", D), LOW, STALE),
    Variant("Block-random-k", ("method=blockrandomk", D), LOW, STALE),
    Variant("Block-random-k allreduce", ("method=blockrandomk", D, "method.exchange=allreduce"), LOW, STALE),
    Variant("Gaussian-k", ("method=gaussiank", D)),
    Variant("Gaussian-k as published", ("method=gaussiank", D, "method.rule=published")),
    Variant("DGC", ("method=dgc", D)),
    Variant("SparCML", ("method=sparcml", D)),
    Variant("gTop-k", ("method=gtopk", D), why=FEW),
    Variant("Ok-Topk", ("method=oktopk", D), why=FEW),
    Variant("Stable Top-K", ("method=stable_topk", D, "method.block=10", "method.every=5"), LOW, STALE),
    Variant("hard threshold", ("method=hardthreshold", D)),
    Variant("SIDCo", ("method=sidco", D)),
    Variant("AdaComp", ("method=adacomp",)),
    Variant("ScaleCom", ("method=scalecom", D), why=FEW),
    Variant("DEFT", ("method=deft", D), why=FEW),
    Variant("MiCRO", ("method=micro", D), why=FEW),
    Variant("ExDyna", ("method=exdyna", D), why=FEW),
    Variant("QSGD", ("method=qsgd",)),
    Variant("TernGrad", ("method=terngrad",)),
    Variant("signSGD", ("method=signsgd",), ("0.01", "0.001"), NO_SCALE),
    Variant("EF-signSGD", ("method=efsignsgd",)),
    Variant("PowerSGD", ("method=powersgd",)),
)  # fmt: skip
SMOKE = ("dense", "Top-k", "Random-k, no feedback")
# The same small task everywhere, on whatever device: the paper's schedule in a tenth of its epochs.
TRAINING = (
    "task=cnn_cifar10", "cluster=virtual", "task.batch_size=16", "train.epochs=9", "task.lr_warmup_epochs=1",
    "task.lr_milestones=[5,8]", "train.held_out=5000", "train.validate_every=3", "timing.mode=production",
)  # fmt: skip


def runs(profile: str) -> list[list[str]]:
    """One training per method and learning rate."""
    shared = ["recipe=yoon2022", f"profile={profile}"]
    if profile == "smoke":
        shared += [*yoon2022.CONVERGENCE["smoke"], "train.held_out=100"]
        return [[*shared, *_words(variant), "seed=0"] for variant in VARIANTS if variant.label in SMOKE]
    shared += TRAINING
    if profile == "paper":
        shared += ["launch.runs_per_gpu=4"]
    return [
        [*shared, *_words(variant), *_rate(rate), "seed=0"] for variant in VARIANTS for rate in variant.rates
    ]


def _rate(rate: str) -> list[str]:
    return [] if rate == "0.1" else [f"task.lr={rate}"]


def _words(variant: Variant) -> tuple[str, ...]:
    """The recipe raises the density in the first epochs, which here would be a fifth of the training."""
    return (*variant.words, "method.density_warmup=[]") if D in variant.words else variant.words


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
    name, exchange = method["name"], method.get("exchange")
    layerwise, feedback = method.get("scope") == "layer", method.get("feedback")
    special = {
        ("topk", layerwise): "Top-k layer-wise",
        ("randomk", feedback in ("gradient", True)): "Random-k with feedback",
        ("blockrandomk", exchange == "allreduce"): "Block-random-k allreduce",
        ("gaussiank", method.get("rule") == "published"): "Gaussian-k as published",
    }
    return special.get((name, True)) or NAMES.get(name, name)


NAMES = {variant.words[0].removeprefix("method="): variant.label for variant in reversed(VARIANTS)} | {
    "randomk": "Random-k, no feedback"
}


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = chosen(frames)
    if not len(found):
        raise ValueError("nothing to draw: there is no run")
    rows = np.arange(len(found))
    dense = found.loc[found["label"] == "dense", "score"]
    how = {"width_ratios": (1.1, 1, 1.5)}
    with plots.canvas(style.two_columns(0.9 + ROW_IN * len(found)), 1, 3, **how) as (figure, axes):
        accuracy, density, wire = axes
        for y, row in zip(rows, found.to_dict("records"), strict=True):
            for other in row["others"]:
                accuracy.plot(other["score"], y, "o", mfc="white", mec="#999999", ms=3.2)
            accuracy.plot(row["score"], y, "D", color="#111111", ms=3.2)
            density.plot([row["density"], row["update_density"]], [y, y], color="#BBBBBB", lw=1, zorder=1)
        if len(dense):
            for each, span in ((accuracy, accuracy.axvspan), (wire, wire.axhspan)):
                span(dense.iloc[0] - NEAR, dense.iloc[0], color="#F0F0F0", zorder=-1)
                each.grid(True, axis="both")
        density.plot(found["density"], rows, "o", color="#0072B2", ms=4, label="sent by a worker")
        density.plot(found["update_density"], rows, "s", color="#D55E00", ms=3.5, label="in the update")
        plots.numbered(wire, found["wire_bytes"], found["score"], [str(row + 1) for row in rows])
        accuracy.set(xlabel="Test top-1 (%)")
        accuracy.set_yticks(
            rows, [f"{name}  {row + 1}" for row, name in zip(rows, found["label"], strict=True)]
        )
        density.set(xlabel="Share of elements", xscale="log")
        density.set_yticks(rows, [])
        density.grid(True, axis="both")
        for each in (accuracy, density):
            each.set_ylim(len(found) - 0.4, -0.6)
            each.tick_params(axis="y", length=0)
        wire.set(xlabel="Bytes sent per worker and step", ylabel="Test top-1 (%)")
        handles, labels = density.get_legend_handles_labels()
        best_key = accuracy.plot([], [], "D", color="#111111", ms=3.2)[0]
        other_key = accuracy.plot([], [], "o", mfc="white", mec="#999999", ms=3.2)[0]
        figure.legend(
            [best_key, other_key, *handles],
            ["best learning rate", "other learning rates", *labels],
            loc="outside upper center",
            ncols=4,
        )
    return figure


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
            "density": row["density"],
            "union density": row["update_density"],
            "per step": row["wire_bytes"],
            "host syncs per step": row["host_syncs"],
        })  # fmt: skip
    units = {"test top-1": "%", "below dense": "points", "per step": "bytes"}
    far = [row for row in rows if row["below dense"] > NEAR]
    note = f"More than {number(NEAR)} points below dense: {'; '.join(_reasons(far))}." if far else ""
    return Table("Every method at the end of its training", pd.DataFrame(rows), units, note)


def _reasons(far: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which methods end far from dense, and why."""
    why = {variant.label: variant.why for variant in VARIANTS}
    methods: dict[str, list[str]] = {}
    for row in far:
        methods.setdefault(why[row["method"]], []).append(row["method"])
    return [f"{captions.listed(labels)}{f' ({reason})' * bool(reason)}" for reason, labels in methods.items()]


def _chosen_by(frames: Frames) -> str:
    """By what the learning rate was chosen, as the records say."""
    held_out = frames.runs.get("train.held_out", pd.Series(dtype=float)).fillna(0)
    if len(held_out) and held_out.min() > 0:
        return f"that counts which is best on {number(held_out.min())} training images that were held out"
    return "the best by final top-1 counts; its selection and its score use the same test images"


def caption(frames: Frames, profile: str) -> str:
    epochs, steps = (int(frames.epochs[name].max()) for name in ("epoch", "step"))
    virtual = (
        " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
        if captions.is_simulated(frames)
        else ""
    )
    return (
        f"Test top-1 of every method at the end (left; grey band: within {number(NEAR)} points of dense), "
        "the share of elements that a worker sent and that the update had (middle), and the accuracy against "
        "the bytes that a worker sent per step, by count (right, with the numbers of the rows): methods "
        "choose their budget differently, and only those near one vertical line compare. Densities (of "
        "elements that are not zero) and bytes are means of rank 0's steps since the validation before the "
        f"last. {captions.setting(frames)} Of the learning rates in the table {_chosen_by(frames)}. "
        f"{epochs} epochs = {steps} optimiser steps, half of fig3's, and one seed: a shorter training "
        f"favours Random-k, a longer one Top-k (fig3).{virtual} Host synchronisations are counted "
        "where a GPU would make the host wait."
    )


SPREAD = "give or take what the difference of two runs may vary by, at 95 %, by Yoon and Oh's replicates."
CHOSEN = "Learning rates are chosen for every method alike; the caption says on which images."


def claims() -> list[Claim]:
    source = "Eghlidi and Jaggi 2020, table: ResNet-18, CIFAR-10, 8 workers, density 1 %, 300 epochs"
    return [
        Claim(
            text="Block-random-k with allreduce, global, ends clearly below Block-random-k with allgather",
            paper=12.34,
            unit="points",
            source=f"{source}; 90.45 - 78.11",
            kind="ordering",
            tolerance=yoon2022.gap_spread("val_top1"),
            reason=f"Clearly: more than chance, {SPREAD}",
            ours=lambda frames: _gap(frames, "Block-random-k", "Block-random-k allreduce"),
        ),
        Claim(
            text="Top-k layer-wise ends above Top-k global",
            paper=1.91,
            unit="points",
            source=f"{source}; 93.41 - 91.50, at learning rates 0.1 and 0.01",
            kind="ordering",
            tolerance=0.0,
            reason=f"Any margin counts; their two learning rates differ, ours are chosen alike. {CHOSEN}",
            ours=lambda frames: _gap(frames, "Top-k layer-wise", "Top-k"),
        ),
        Claim(
            text="Top-k global ends close to dense",
            paper=2.80,
            unit="points",
            source=f"{source}; 94.30 - 91.50",
            kind="shape",
            tolerance=yoon2022.gap_spread("val_top1"),
            reason=f"Close: as close as they found it, {SPREAD} {CHOSEN}",
            ours=lambda frames: _gap(frames, "dense", "Top-k"),
            group=yoon2022.TOPK_BEHIND,
        ),
    ]


def _gap(frames: Frames, above: str, below: str) -> Value | None:
    """Final top-1 of one method less that of another, each at its best learning rate."""
    found = chosen(frames)
    if not len(found):
        return None
    top1 = found.set_index("label")["score"]
    return Value(float(top1[above] - top1[below]), n=1) if {above, below} <= set(top1.index) else None
