"""Every method on one task: the small CNN on CIFAR-10, 8 workers x batch 16, density 0.01.

Not a figure of a paper; the claims are Eghlidi and Jaggi's (2020), who compare scopes, selections and
exchanges on ResNet-18.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import Estimate, final_difference, final_value
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers
from experiments.figures._runs import MORE_SEEDS, SEEDS, scale
from experiments.figures.papers import claim

TITLE = "All methods on CIFAR-10: accuracy, density, bytes on the wire"
RATES = (0.1, 0.01)  # the learning rates tried with a method; more seeds train at the first
CHOOSING = 0  # the seed by whose trainings the rate that counts is chosen, on images that were held out
NEAR = 10.0  # points of top-1 from dense: the distance within which a method keeps up at this scale
# Eghlidi and Jaggi's, as columns of the records.
SCALE = {
    "task.name": "resnet18_cifar10", "task.batch_size": 128, "workers": 8, "train.epochs": 300,
    "method.density": 0.01,
}  # fmt: skip
ROW_IN = 0.19  # inches of height per method
SCATTER_IN = 2.7  # the width of the right panel, about
BEST = style.MethodStyle("best learning rate", "#111111", "D", "")
OTHER = style.MethodStyle("other learning rates", "#999999", "o", "")
INTERVAL = style.MethodStyle("", "#111111", "", "")
LINE: dict[str, Any] = {"linestyle": "-", "lw": 1, "zorder": 2}
JOINED = style.MethodStyle("", "#BBBBBB", "", "")
SENT = style.MethodStyle("sent by a worker", "#0072B2", "o", "")
UPDATED = style.MethodStyle("in the update", "#D55E00", "s", "")


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
    return [run for variant in _variants(profile) for run in _trainings(variant, profile, SEEDS[profile])]


def more_runs(profile: str) -> list[Run]:
    """More seeds, at the learning rate that the first seed chose."""
    return [
        run
        for variant in _variants(profile)
        for run in _trainings(variant._replace(rates=variant.rates[:1]), profile, MORE_SEEDS[profile])
    ]


def _variants(profile: str) -> list[Tried]:
    return [variant for label, variant in VARIANTS.items() if profile != "smoke" or label in SMOKE]


def _trainings(variant: Tried, profile: str, seeds: Sequence[int]) -> list[Run]:
    if profile == "smoke":
        shared = yoon2022.recipe_run(profile, scale("convergence", profile)) | {"train.held_out": 100}
        return [shared | variant.run | {"seed": seed} for seed in seeds]
    more = {"launch.runs_per_gpu": 4} if profile == "paper" else {}
    shared = yoon2022.recipe_run(profile, TRAINING) | more | variant.run
    return [shared | {"seed": seed, "task.lr": rate} for seed in seeds for rate in variant.rates]


class Found(NamedTuple):
    """A method's trainings at the learning rate that counts."""

    rate: float
    keys: list[str]
    others: Mapping[float, float]  # the choosing seed's percent top-1 at the other rates
    last: pd.Series[float]  # means over seeds of what the last validation told


def chosen(frames: Frames) -> dict[str, Found]:
    """Each method that has runs, at the rate with the best end on the images held out, of the choosing seed.

    Records of trainings that held no images out were chosen by the test set itself.
    """
    found = dict[str, Found]()
    if not len(frames.runs):
        return found
    ends = frames.epochs.sort_values("epoch").groupby("key").tail(1).set_index("key")
    labels = frames.runs["config_json"].map(label)
    for name in VARIANTS:
        own = frames.runs[labels == name].sort_values("seed")
        tried = own.loc[own["seed"].eq(CHOOSING)].set_index("task.lr")["key"]
        tops = tried.map(ends["val_top1"])
        if tops.notna().any():
            rate = float(tops.idxmax())
            keys = own.loc[own["task.lr"].eq(rate), "key"].to_list()
            others = tried.drop(rate).map(ends[_column(frames)]).dropna().to_dict()
            found[name] = Found(rate, keys, others, ends.loc[keys].mean(numeric_only=True))
    return found


def score(frames: Frames, keys: Sequence[str]) -> Estimate:
    """Percent top-1 on the test set at the end."""
    value = final_value(frames, keys, _column(frames))
    assert value is not None, "what was chosen was validated"
    return value


def _column(frames: Frames) -> str:
    """Of the epochs: top-1 on the test set, whatever was validated on."""
    return "test_top1" if frames.epochs["test_top1"].notna().any() else "val_top1"


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
    if not found:
        raise ValueError(plots.NOTHING_TO_DRAW)
    rows, names = np.arange(len(found)), [*found]
    ends = [score(frames, each.keys) for each in found.values()]
    tops, sent = [end.value for end in ends], [each.last["wire_bytes"] for each in found.values()]
    others = [
        plots.Curve(OTHER, other, y, {"mfc": "white", "ms": 3.2})
        for y, each in enumerate(found.values())
        for other in each.others.values()
    ]
    best = plots.Curve(BEST, tops, rows, {"ms": 3.2, "zorder": 3})
    edges = [(at, (end.low, end.high)) for at, end in enumerate(ends) if end.is_decisive]
    ranges = [plots.Curve(INTERVAL, both, (at, at), LINE) for at, both in edges]
    upright = [plots.Curve(INTERVAL, (sent[at],) * 2, both, LINE) for at, both in edges]
    densities = [[each.last[name] for each in found.values()] for name in ("sent_density", "update_density")]
    shares = [
        plots.Curve(JOINED, densities, [rows, rows], {"linestyle": "-", "lw": 1, "zorder": 1}),
        plots.Curve(SENT, densities[0], rows, {"ms": 4}), plots.Curve(UPDATED, densities[1], rows),
    ]  # fmt: skip
    top1, height = "Test top-1 (%)", ROW_IN * len(found)
    panels = [
        plots.dots_panel([*ranges, best, *others], rows=names, grid="both", xlabel=top1),
        plots.dots_panel(
            shares, rows=names, grid="both", xlabel="Share of elements", xscale="log", yticklabels=[]
        ),
        plots.overlay_panels(
            plots.dots_panel(upright),
            plots.panel_maker(marks.draw_labelled_points)(sent, tops, names, (SCATTER_IN, height)),
            plots.dots_panel([], grid="both", xlabel="Bytes sent per worker and step", ylabel=top1),
        ),
    ]
    for dense in (top for top, name in zip(tops, names, strict=True) if name == "dense"):
        panels[0] = plots.overlay_panels(plots.shaded_span_panel("x", dense - NEAR, dense), panels[0])
        panels[2] = plots.overlay_panels(plots.shaded_span_panel("y", dense - NEAR, dense), panels[2])
    return plots.compose_figure(panels, 0.9 + height, loc="outside upper center", width_ratios=(1, 0.7, 1.9))


def table(frames: Frames) -> Table:
    """Accuracy, densities, bytes and host synchronisations per method, of the last epoch."""
    found = chosen(frames)
    below = {name: _difference(frames, found, "dense", name) for name in found}
    rows = [
        {
            "method": name,
            "test top-1": score(frames, each.keys),
            "below dense": below[name],
            "seeds": len(each.keys),
            "learning rate": each.rate,
            "others: their top-1": ", ".join(
                f"{format_number(rate)}: {format_number(other)}" for rate, other in each.others.items()
            ),
            "density": each.last["sent_density"],
            "union density": each.last["update_density"],
            "per step": each.last["wire_bytes"],
            "host syncs per step": each.last["host_syncs"],
        }
        for name, each in found.items()
    ]
    units = {"test top-1": "%", "below dense": "points", "per step": "bytes"}
    far = [name for name, gap in below.items() if gap and gap.value > NEAR]
    note = f"More than {format_number(NEAR)} points below dense: {'; '.join(_reasons(far))}." if far else ""
    return Table.from_rows("Every method at the end of its training", rows, units, note)


def _reasons(far: Iterable[str]) -> list[str]:
    """The methods that end far from dense, and why."""
    methods: dict[str, list[str]] = {}
    for label in far:
        methods.setdefault(VARIANTS[label].why, []).append(label)
    return [
        f"{captions.join_words(labels)}{f' ({reason})' * bool(reason)}" for reason, labels in methods.items()
    ]


def _chosen_by(frames: Frames) -> str:
    """The images by which the learning rate was chosen, as the records say."""
    held_out = frames.runs.get("train.held_out", pd.Series(dtype=float)).fillna(0)
    if len(held_out) and held_out.min() > 0:
        return (
            f"that counts which seed {CHOOSING} found best on {format_number(held_out.min())} "
            "training images that "
            "were held out"
        )
    return (
        f"the best by seed {CHOOSING}'s final top-1 counts; its selection and its score use the same test "
        "images"
    )


def facts(frames: Frames) -> dict[str, object]:
    epochs, steps = (int(frames.epochs[name].max()) for name in ("epoch", "step"))
    return {
        "near": format_number(NEAR), "chosen_by": _chosen_by(frames), "epochs": epochs, "steps": steps,
        "seeds": captions.join_values(frames, "seed"),
    }  # fmt: skip


def claims() -> list[Claim]:
    spread = yoon2022.replicate_gap_spread("val_top1")
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


def _gap(frames: Frames, above: str, below: str) -> Estimate | None:
    """Final top-1 of one method less that of another, each at its own learning rate; paired by seed."""
    return _difference(frames, chosen(frames), above, below)


def _difference(frames: Frames, found: Mapping[str, Found], above: str, below: str) -> Estimate | None:
    if not {above, below} <= set(found):
        return None
    return final_difference(frames, found[above].keys, found[below].keys, _column(frames))
