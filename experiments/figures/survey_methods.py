"""Every method on one task: the small CNN on CIFAR-10, 8 workers x batch 16, density 0.01.

Not a figure of a paper; the claims are Eghlidi and Jaggi's (2020), who compare scopes, selections and
exchanges on ResNet-18.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames, records
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers
from experiments.figures._runs import scale
from experiments.figures.papers import claim

TITLE = "All methods on CIFAR-10: accuracy, density, bytes on the wire"
RATES = (0.1, 0.01)  # the learning rates tried with a method; the best one counts
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


# The recipe raises the density in the first epochs, which here would be a fifth of the training.
SPARSE: RunSettings = {"method.density": 0.01, "method.density_warmup": []}


class Tried(NamedTuple):
    """A method as it is run here."""

    method: str
    settings: Mapping[str, Any] = {}  # besides
    rates: tuple[float, ...] = RATES
    why: str = ""  # it may end further from dense than NEAR
    has_density: bool = True

    @property
    def run(self) -> RunSettings:
        """Its settings in a run, without the learning rate."""
        return {"method": self.method, **(SPARSE if self.has_density else {}), **self.settings}


# By label.
VARIANTS = {label: Tried(**own) for label, own in papers.item("survey.methods")["variants"].items()}
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
        return [shared | VARIANTS[label].run for label in SMOKE]
    more = {"launch.runs_per_gpu": 4} if profile == "paper" else {}
    shared = yoon2022.start(profile, TRAINING) | more | {"seed": 0}
    return [
        shared | {**variant.run, **({} if rate == RATES[0] else {"task.lr": rate})}
        for variant in VARIANTS.values()
        for rate in variant.rates
    ]


def chosen(frames: Frames) -> pd.DataFrame:
    """One row per method: the last epoch of the run with the best learning rate, and the others'.

    `score` is the accuracy on the test set; in records of trainings that held no images out, it is that by
    which the rate was chosen.
    """
    last = frames.epochs.sort_values("epoch").groupby("key").tail(1)
    runs = frames.runs.reindex(columns=["key", "task.lr", "config_json"]).rename(columns={"task.lr": "rate"})
    ended = runs.merge(last, on="key")
    ended["label"] = ended["config_json"].map(label)
    ended["score"] = ended["test_top1"].fillna(ended["val_top1"])
    rows = []
    for name, variant in VARIANTS.items():
        if tried := records(ended[ended["label"] == name]):
            best = max(tried, key=lambda candidate: candidate["val_top1"])
            others = [candidate for candidate in tried if candidate is not best]
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
    first_of_name = {variant.method: name for name, variant in reversed(VARIANTS.items())}
    return special.get((method["name"], True)) or first_of_name.get(method["name"], method["name"])


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = chosen(frames)
    if not len(found):
        raise ValueError(plots.EMPTY)
    rows = np.arange(len(found))
    others = [
        plots.Curve(OTHER, other["score"], y, {"mfc": "white", "ms": 3.2})
        for y, of_row in enumerate(found["others"])
        for other in of_row
    ]
    best = plots.Curve(BEST, found["score"], rows, {"ms": 3.2, "zorder": 3})
    densities = [found["sent_density"], found["update_density"]]
    joined = plots.Curve(JOINED, densities, [rows, rows], {"linestyle": "-", "lw": 1, "zorder": 1})
    shares = [
        joined, plots.Curve(SENT, densities[0], rows, {"ms": 4}), plots.Curve(UPDATED, densities[1], rows),
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
    rows = [
        {
            "method": row["label"],
            "test top-1": row["score"],
            "below dense": float(dense.iloc[0]) - row["score"] if len(dense) else np.nan,
            "learning rate": row["rate"],
            "others: their top-1": ", ".join(
                f"{number(other['rate'])}: {number(other['score'])}" for other in row["others"]
            ),
            "density": row["sent_density"],
            "union density": row["update_density"],
            "per step": row["wire_bytes"],
            "host syncs per step": row["host_syncs"],
        }
        for row in records(found)
    ]
    units = {"test top-1": "%", "below dense": "points", "per step": "bytes"}
    far = [row["method"] for row in rows if row["below dense"] > NEAR]
    note = f"More than {number(NEAR)} points below dense: {'; '.join(_reasons(far))}." if far else ""
    return Table.of("Every method at the end of its training", rows, units, note)


def _reasons(far: Iterable[str]) -> list[str]:
    """The methods that end far from dense, and why."""
    methods: dict[str, list[str]] = {}
    for label in far:
        methods.setdefault(VARIANTS[label].why, []).append(label)
    return [f"{captions.listed(labels)}{f' ({reason})' * bool(reason)}" for reason, labels in methods.items()]


def _chosen_by(frames: Frames) -> str:
    """The images by which the learning rate was chosen, as the records say."""
    held_out = frames.runs.get("train.held_out", pd.Series(dtype=float)).fillna(0)
    if len(held_out) and held_out.min() > 0:
        return f"that counts which is best on {number(held_out.min())} training images that were held out"
    return "the best by final top-1 counts; its selection and its score use the same test images"


def facts(frames: Frames) -> dict[str, object]:
    epochs, steps = (int(frames.epochs[name].max()) for name in ("epoch", "step"))
    return {"near": number(NEAR), "chosen_by": _chosen_by(frames), "epochs": epochs, "steps": steps}


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
