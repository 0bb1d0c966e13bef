"""Every method on one task: the small CNN on CIFAR-10, 8 workers x batch 16, density 0.01.

Not a figure of a paper; the claims are Eghlidi and Jaggi's (2020), who compare scopes, selections and
exchanges on ResNet-18.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.stats import Value
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


def runs(profile: str) -> list[list[str]]:
    """One training per method and learning rate; dense, Top-k and Random-k at 0.1 are those of fig2."""
    scale = "laptop" if profile == "paper" else profile  # the same small task everywhere, on whatever device
    shared = ["recipe=yoon2022", f"profile={profile}", *yoon2022.CONVERGENCE[scale]]
    if profile == "paper":
        shared += ["launch.runs_per_gpu=4"]
    if profile == "smoke":
        return [[*shared, *_words(variant), "seed=0"] for variant in VARIANTS if variant.label in SMOKE]
    return [
        [*shared, *_words(variant), *_rate(rate), "seed=0"] for variant in VARIANTS for rate in variant.rates
    ]


def _rate(rate: str) -> list[str]:
    return [] if rate == "0.1" else [f"task.lr={rate}"]


def _words(variant: Variant) -> tuple[str, ...]:
    """The recipe raises the density in the first epochs, which here would be a fifth of the training."""
    return (*variant.words, "method.density_warmup=[]") if D in variant.words else variant.words


def chosen(frames: Frames) -> pd.DataFrame:
    """One row per method: the last epoch of the run with the best learning rate, and the others'."""
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        candidates: list[dict[str, Any]] = []
        for run in frames.runs.to_dict("records"):
            epochs = frames.epochs[frames.epochs["key"] == run["key"]].sort_values("epoch")
            if label(str(run["config_json"])) == variant.label and len(epochs):
                last = {str(name): value for name, value in epochs.iloc[-1].to_dict().items()}
                candidates.append({"rate": run["task.lr"], "label": variant.label, **last})
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
    table = chosen(frames)
    if not len(table):
        raise ValueError("nothing to draw: there is no run")
    rows = np.arange(len(table))
    dense = table.loc[table["label"] == "dense", "val_top1"]
    with plots.canvas(style.two_columns(0.9 + ROW_IN * len(table)), 1, 3, sharey=True) as (figure, axes):
        accuracy, density, wire = axes
        for y, row in zip(rows, table.to_dict("records"), strict=True):
            for other in row["others"]:
                accuracy.plot(other["val_top1"], y, "o", mfc="white", mec="#999999", ms=3.2)
            accuracy.plot(row["val_top1"], y, "o", color="#0072B2", ms=4)
            density.plot([row["density"], row["update_density"]], [y, y], color="#BBBBBB", lw=1, zorder=1)
        if len(dense):
            accuracy.axvline(dense.iloc[0], color="#444444", lw=0.7, zorder=0)
            accuracy.axvspan(dense.iloc[0] - NEAR, dense.iloc[0], color="#EEEEEE", zorder=-1)
        density.plot(table["density"], rows, "o", color="#0072B2", ms=4, label="sent by a worker")
        density.plot(table["update_density"], rows, "s", color="#D55E00", ms=3.5, label="in the update")
        wire.plot(table["wire_bytes"], rows, "o", color="#0072B2", ms=4)
        accuracy.set(xlabel="Validation top-1 (%)", ylim=(len(table) - 0.4, -0.6))
        accuracy.set_yticks(rows, table["label"])
        density.set(xlabel="Share of elements", xscale="log")
        wire.set(xlabel="Bytes sent per worker and step", xscale="log")
        for each in axes:
            each.grid(True, axis="both")
            each.tick_params(axis="y", length=0)
        handles, labels = density.get_legend_handles_labels()
        best_key = accuracy.plot([], [], "o", color="#0072B2", ms=4)[0]
        other_key = accuracy.plot([], [], "o", mfc="white", mec="#999999", ms=3.2)[0]
        figure.legend(
            [best_key, other_key, *handles],
            ["best learning rate", "other learning rates", *labels],
            loc="outside upper center",
            ncols=4,
        )
    return figure


def table(frames: Frames) -> str:
    """Accuracy, densities, bytes and host synchronisations per method, of the last epoch."""
    found = chosen(frames)
    dense = found.loc[found["label"] == "dense", "val_top1"]
    head = (
        "method", "top-1 (%)", "below dense (points)", "lr (others tried: their top-1)", "density",
        "union density", "bytes per step", "host syncs per step", f"within {NEAR:g} points of dense",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in found.to_dict("records"):
        below = float(dense.iloc[0]) - row["val_top1"] if len(dense) else np.nan
        others = ", ".join(f"{other['rate']:g}: {other['val_top1']:.2f}" for other in row["others"])
        near = "yes" if below <= NEAR else f"no{': ' if row['why'] else ''}{row['why']}"
        cells = (
            row["label"], f"{row['val_top1']:.2f}", f"{below:.2f}",
            f"{row['rate']:g}" + (f" ({others})" if others else ""), f"{row['density']:.3g}",
            f"{row['update_density']:.3g}", f"{row['wire_bytes']:,.0f}", f"{row['host_syncs']:.3g}", near,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def caption(frames: Frames, profile: str) -> str:
    epochs, steps = (int(frames.epochs[name].max()) for name in ("epoch", "step"))
    virtual = (
        " The workers are virtual ranks of one process: the mathematics of that many workers, exactly."
        if captions.is_simulated(frames)
        else ""
    )
    return (
        f"Final validation top-1 of every method (left; grey band: within {NEAR:g} points of dense), the "
        "share of elements that a worker sent and that the update had (middle), and the bytes that a worker "
        "sent per step, by count (right); densities (of elements that are not zero) "
        "and bytes are means over the last epoch on rank 0. "
        f"{captions.setting(frames)} Of the learning rates in the table the best by final top-1 counts; "
        f"its selection and its score use the same test images. {epochs} epochs = {steps} optimiser steps; "
        f"one seed.{virtual} Host synchronisations are counted where a GPU would make the host wait."
    )


SPREAD = "give or take what the difference of two runs may vary by, at 95 %, by Yoon and Oh's replicates."
CHOSEN = "Learning rates are chosen on the images that the score uses, for every method alike."


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
    top1 = found.set_index("label")["val_top1"]
    return Value(float(top1[above] - top1[below]), n=1) if {above, below} <= set(top1.index) else None
