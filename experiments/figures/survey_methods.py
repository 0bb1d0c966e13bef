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
from analysis.records.frames import Frames, cache_by_frames
from analysis.stats import Estimate, final_difference, final_mean
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers
from experiments.figures._runs import MORE_SEEDS, SEEDS, profile_settings, setting_values_text
from experiments.figures.papers import make_claim

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


class MethodVariant(NamedTuple):
    """A method with its settings and the learning rates that are tried."""

    method: str
    settings: Mapping[str, Any] = {}  # besides
    rates: tuple[float, ...] = RATES  # of learning
    reason_far_from_dense: str = ""  # why it may end further from dense than NEAR
    has_density: bool = True

    @property
    def run_settings(self) -> RunSettings:
        """Settings in a run, without the learning rate."""
        return {"method": self.method, **(SPARSE if self.has_density else {}), **self.settings}


# By label.
VARIANTS = {
    label: MethodVariant(**entry)
    for label, entry in papers.item_settings("survey.methods")["variants"].items()
}
SMOKE = ("dense", "Top-k", "Random-k, no feedback")
# The same small task everywhere, on whatever device: the paper's schedule in a tenth of its epochs.
TRAINING: RunSettings = {
    "task": "cnn_cifar10", "cluster": "virtual", "task.batch_size": 16, "train.epochs": 9,
    "task.lr_warmup_epochs": 1, "task.lr_milestones": [5, 8], "train.held_out": 5000,
    "train.validate_every": 3, "timing.mode": "production",
}  # fmt: skip


def runs(profile: str) -> list[Run]:
    """Return one training per method and learning rate."""
    return [
        run
        for variant in _profile_variants(profile)
        for run in _trainings(variant, profile, SEEDS[profile], variant.rates)
    ]


def more_runs(profile: str) -> list[Run]:
    """Return more seeds, at the learning rate that the first seed chose."""
    return [
        run
        for variant in _profile_variants(profile)
        for run in _trainings(variant, profile, MORE_SEEDS[profile], variant.rates[:1])
    ]


def _profile_variants(profile: str) -> list[MethodVariant]:
    return [variant for label, variant in VARIANTS.items() if profile != "smoke" or label in SMOKE]


def _trainings(
    variant: MethodVariant, profile: str, seeds: Sequence[int], rates: Sequence[float]
) -> list[Run]:
    if profile == "smoke":
        shared = yoon2022.recipe_run(profile, profile_settings("convergence", profile)) | {
            "train.held_out": 100
        }
        return [shared | variant.run_settings | {"seed": seed} for seed in seeds]
    more = {"launch.runs_per_gpu": 4} if profile == "paper" else {}
    shared = yoon2022.recipe_run(profile, TRAINING) | more | variant.run_settings
    return [shared | {"seed": seed, "task.lr": rate} for seed in seeds for rate in rates]


class TrainingsAtChosenRate(NamedTuple):
    """A method's trainings at the learning rate that counts."""

    learning_rate: float
    run_keys: list[str]
    top1: Estimate  # percent on the test set at the end
    top1_by_other_rate: Mapping[float, float]  # the choosing seed's percent top-1 at the other rates
    last_epoch_means: pd.Series[float]  # means over seeds of the last validation's numbers


@cache_by_frames
def trainings_at_chosen_rate_by_method(frames: Frames) -> dict[str, TrainingsAtChosenRate]:
    """Return each method that has runs at the rate that ends best on the images held out.

    By the choosing seed. Records of trainings that held no images out were chosen by the test set itself.
    """
    if not len(frames.runs):
        return {}
    chosen = {}
    ends = frames.epochs.sort_values("epoch").groupby("key").tail(1).set_index("key")
    labels = frames.runs["config_json"].map(variant_label_of_config)
    for name in VARIANTS:
        runs = frames.runs[labels == name].sort_values("seed")
        key_by_rate = runs.loc[runs["seed"].eq(CHOOSING)].set_index("task.lr")["key"]
        held_out_top1 = key_by_rate.map(ends["val_top1"])
        if held_out_top1.notna().any():
            rate = float(held_out_top1.idxmax())
            keys = runs.loc[runs["task.lr"].eq(rate), "key"].to_list()
            top1 = final_mean(frames, keys, _test_column(frames))
            assert top1 is not None, "what was chosen was validated"
            other_top1 = key_by_rate.drop(rate).map(ends[_test_column(frames)]).dropna().to_dict()
            last = ends.loc[keys].mean(numeric_only=True)
            chosen[name] = TrainingsAtChosenRate(rate, keys, top1, other_top1, last)
    return chosen


def _test_column(frames: Frames) -> str:
    """Return the column of top-1 on the test set, whatever was validated on."""
    return "test_top1" if frames.epochs["test_top1"].notna().any() else "val_top1"


def variant_label_of_config(config_json: str) -> str:
    """Return the variant that a run with this config is of."""
    method = json.loads(config_json)["method"]
    special = {
        ("topk", method.get("scope") == "layer"): "Top-k layer-wise",
        ("randomk", method.get("feedback") in ("gradient", True)): "Random-k with feedback",
        ("blockrandomk", method.get("exchange") == "allreduce"): "Block-random-k allreduce",
        ("gaussiank", method.get("rule") == "published"): "Gaussian-k as published",
    }
    first_by_method = {variant.method: label for label, variant in reversed(VARIANTS.items())}
    return special.get((method["name"], True)) or first_by_method.get(method["name"], method["name"])


def draw(frames: Frames, profile: str) -> plots.Figure:
    chosen = trainings_at_chosen_rate_by_method(frames)
    if not chosen:
        raise ValueError(plots.NOTHING_TO_DRAW)
    names = [*chosen]
    rows = np.arange(len(chosen))
    top1 = [trainings.top1.value for trainings in chosen.values()]
    last = pd.DataFrame({name: trainings.last_epoch_means for name, trainings in chosen.items()}).T
    sent = last["wire_bytes"].to_list()
    ranges = []
    upright = []
    others = []
    for row, trainings in enumerate(chosen.values()):
        if trainings.top1.can_support_verdict:
            ends = (trainings.top1.low, trainings.top1.high)
            ranges.append(plots.Curve(INTERVAL, ends, (row, row), LINE))
            upright.append(plots.Curve(INTERVAL, (sent[row], sent[row]), ends, LINE))
        for other in trainings.top1_by_other_rate.values():
            others.append(plots.Curve(OTHER, other, row, {"mfc": "white", "ms": 3.2}))
    best = plots.Curve(BEST, top1, rows, {"ms": 3.2, "zorder": 3})
    densities = [last[column].to_list() for column in ("sent_density", "update_density")]
    shares = [
        plots.Curve(JOINED, densities, [rows, rows], {"linestyle": "-", "lw": 1, "zorder": 1}),
        plots.Curve(SENT, densities[0], rows, {"ms": 4}), plots.Curve(UPDATED, densities[1], rows),
    ]  # fmt: skip
    height = ROW_IN * len(chosen)
    label = "Test top-1 (%)"
    panels = [
        plots.dots_panel([*ranges, best, *others], row_labels=names, grid="both", xlabel=label),
        plots.dots_panel(
            shares, row_labels=names, grid="both", xlabel="Share of elements", xscale="log", yticklabels=[]
        ),
        plots.overlay_panels(
            plots.dots_panel(upright),
            plots.panel_maker(marks.draw_labelled_points_log_x)(sent, top1, names, (SCATTER_IN, height)),
            plots.dots_panel([], grid="both", xlabel="Bytes sent per worker and step", ylabel=label),
        ),
    ]
    if "dense" in chosen:
        dense = chosen["dense"].top1.value
        panels[0] = plots.overlay_panels(plots.shaded_span_panel("x", dense - NEAR, dense), panels[0])
        panels[2] = plots.overlay_panels(plots.shaded_span_panel("y", dense - NEAR, dense), panels[2])
    return plots.compose_figure(
        panels, 0.9 + height, legend_loc="outside upper center", width_ratios=(1, 0.7, 1.9)
    )


def table(frames: Frames) -> Table:
    """Return accuracy, densities, bytes and host synchronisations per method, of the last epoch."""
    chosen = trainings_at_chosen_rate_by_method(frames)
    gaps = {name: final_top1_gap(frames, "dense", name) for name in chosen}
    rows = [
        {
            "method": name,
            "test top-1": trainings.top1,
            "below dense": gaps[name],
            "seeds": len(trainings.run_keys),
            "learning rate": trainings.learning_rate,
            "others: their top-1": ", ".join(
                f"{format_number(rate)}: {format_number(other)}"
                for rate, other in trainings.top1_by_other_rate.items()
            ),
            "density": trainings.last_epoch_means["sent_density"],
            "union density": trainings.last_epoch_means["update_density"],
            "per step": trainings.last_epoch_means["wire_bytes"],
            "host syncs per step": trainings.last_epoch_means["host_syncs"],
        }
        for name, trainings in chosen.items()
    ]
    units = {"test top-1": "%", "below dense": "points", "per step": "bytes"}
    far = [name for name, gap in gaps.items() if gap and gap.value > NEAR]
    note = f"More than {format_number(NEAR)} points below dense: {_reasons(far)}." if far else ""
    return Table.from_rows("Every method at the end of its training", rows, units, note)


def _reasons(labels: Iterable[str]) -> str:
    """Return the methods that end far from dense, and why."""
    labels_by_reason: dict[str, list[str]] = {}
    for label in labels:
        labels_by_reason.setdefault(VARIANTS[label].reason_far_from_dense, []).append(label)
    return "; ".join(
        f"{captions.join_with_and(alike)}{f' ({reason})' * bool(reason)}"
        for reason, alike in labels_by_reason.items()
    )


def _describe_choice(frames: Frames) -> str:
    """Return by which images the learning rate was chosen, as the records say."""
    held_out = frames.runs.get("train.held_out", pd.Series(dtype=float)).fillna(0)
    if len(held_out) and held_out.min() > 0:
        return (
            f"that counts which seed {CHOOSING} found best on {format_number(held_out.min())} training "
            "images that were held out"
        )
    return (
        f"the best by seed {CHOOSING}'s final top-1 counts; its selection and its score use the same test "
        "images"
    )


def facts(frames: Frames) -> dict[str, object]:
    epochs, steps = (int(frames.epochs[name].max()) for name in ("epoch", "step"))
    return {
        "near": format_number(NEAR), "chosen_by": _describe_choice(frames), "epochs": epochs, "steps": steps,
        "seeds": setting_values_text(frames, "seed"),
    }  # fmt: skip


def claims() -> list[Claim]:
    spread = yoon2022.published_replicate_gap_spread("val_top1")
    return [
        make_claim(
            "eghlidi2020.block-allreduce-below-allgather", final_top1_gap, "Block-random-k",
            "Block-random-k allreduce", tolerance=spread,
        ),
        make_claim(
            "eghlidi2020.topk-layerwise-above-rates", final_top1_gap, "Top-k layer-wise", "Top-k",
            id="layerwise-above-global",
        ),
        make_claim("eghlidi2020.topk-ends-close", final_top1_gap, "dense", "Top-k", tolerance=spread),
    ]  # fmt: skip


def final_top1_gap(frames: Frames, above: str, below: str) -> Estimate | None:
    """Return the final top-1 of one method less that of another, each at its own rate; paired by seed."""
    trainings = trainings_at_chosen_rate_by_method(frames)
    if not {above, below} <= set(trainings):
        return None
    return final_difference(
        frames, trainings[above].run_keys, trainings[below].run_keys, _test_column(frames)
    )
