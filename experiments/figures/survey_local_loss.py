"""Loss of a small language model against bytes and against steps: every step, and every H steps.

Not a figure of a paper; the claims are those of DiLoCo, SparseLoCo and DeMo, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _trainings, papers
from experiments.figures._trainings import KILO, MEGA, NamedTrainings, mean_outcome
from experiments.figures.papers import claim

TITLE = "Loss of a small language model against bytes: every step, and every H steps"
SCALE = _trainings.SCALE
SEEDS = {"smoke": [0], "laptop": [0, 1], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [2, 3, 4], "paper": [3, 4]}
_DATA = papers.item("survey.local-loss")
EVERY: Mapping[str, Sequence[int]] = _DATA["every"]
EVERY_STEP: Mapping[str, RunSettings] = _DATA["every_step"]
LOCAL: Mapping[str, RunSettings] = _DATA["local"]
LOOKS: Mapping[str, style.MethodStyle] = {
    name: style.MethodStyle(*look) for name, look in _DATA["looks"].items()
}
DENSE, DILOCO, SPARSELOCO, DEMO = "dense", "diloco", "sparseloco", "demo"
ENOUGH_ROUNDS = 200  # that a training should have: what is sent of a round is a small part of what has moved


class LocalMethod(NamedTuple):
    """A method, and its H; None averages every step."""

    name: str
    every: int | None = None

    @property
    def label(self) -> str:
        """Name in pictures and tables."""
        return LOOKS[self.name].label + (f", H = {self.every}" if self.every else "")


def settings_by_method(periods: Sequence[int]) -> dict[LocalMethod, RunSettings]:
    """Return the settings of every method, of local steps at each of these H."""
    by_method = {LocalMethod(name): settings for name, settings in EVERY_STEP.items()}
    for name, settings in LOCAL.items():
        for every in periods:
            by_method[LocalMethod(name, every)] = {**settings, "method.every": every}
    return by_method


TRAININGS = NamedTrainings(
    "local-loss", settings_by_method(sorted({*EVERY["smoke"], *EVERY["paper"]})), ("method", "method.every")
)


def runs(profile: str, seeds: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(profile, seeds[profile], settings_by_method(EVERY[profile]))


more_runs = partial(runs, seeds=MORE_SEEDS)


def sent_mb(frames: Frames, keys: Sequence[str]) -> np.ndarray:
    """Return the megabytes that a worker has sent at each validation, the mean over seeds."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
    steps = epochs.groupby("key")["step"].diff().fillna(epochs["step"])
    sums = (epochs["wire_bytes"] * steps).groupby(epochs["key"]).cumsum()
    means: np.ndarray = sums.groupby(epochs["epoch"]).mean().to_numpy() * MEGA
    return means


def draw(frames: Frames, profile: str) -> plots.Figure:
    keys_by_method = TRAININGS.keys_by_name(frames)
    if not keys_by_method:
        raise ValueError(plots.NOTHING_TO_DRAW)
    positions = _trainings.position_by_name(
        sorted({method.every for method in keys_by_method if method.every})
    )
    by_bytes = []
    by_steps = list[plots.Curve]()
    for method, keys in keys_by_method.items():
        look = LOOKS[method.name]._replace(label=method.label)
        how = {"alpha": 1 - 0.65 * positions.get(method.every or 0, 0), "ms": 3}
        by_steps += TRAININGS.curves(frames, method, look, how)
        by_bytes += TRAININGS.curves(frames, method, look, how, sent_mb(frames, keys))
    panels = [
        plots.curves_panel(by_bytes, xlabel="Megabytes sent by a worker", xscale="log"),
        plots.curves_panel(by_steps, xlabel="Optimiser steps", xlim=(0, None)),
    ]
    return plots.compose_figure(panels, 3.8, ylabel="Validation loss (nats a character)", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Return loss and bytes at the end of each method's trainings, and what was sent by step and by round."""
    frames = _trainings.ensure_outcomes(frames)
    keys_by_method = TRAININGS.keys_by_name(frames)
    sent = {method: float(sent_mb(frames, keys)[-1]) for method, keys in keys_by_method.items()}
    dense_mb = sent.get(LocalMethod(DENSE))
    end_rows = []
    sent_rows = []
    for method, keys in keys_by_method.items():
        columns = TRAININGS.sent_columns(frames, method)
        end_rows.append({
            "method": method.label, **TRAININGS.loss_columns(frames, method),
            "over dense": loss_over_dense(frames, *method), "sent by a worker": sent[method],
            "times fewer bytes": dense_mb / sent[method] if dense_mb else None, "seeds": columns["seeds"],
        })  # fmt: skip
        sent_rows.append({
            "method": method.label,
            "rounds": _trainings.last_step(frames) // method.every if method.every else None,
            "in a step": mean_outcome(frames, keys, "wire_bytes", KILO), "in a round": columns["in a round"],
            "messages in a step": mean_outcome(frames, keys, "messages"),
            "messages in a round": mean_outcome(frames, keys, "round_messages"),
        })  # fmt: skip
    note, by_round = (papers.words(f"survey.local-loss.{part}") for part in ("note", "by-round"))
    units = {"loss": "nats", "sent by a worker": "MB"}
    return [
        Table.from_rows("At the end of the trainings", end_rows, units, note),
        Table.from_rows("Sent by a worker", sent_rows, {"in a step": "kB", "in a round": "kB"}, by_round),
    ]


def facts(frames: Frames) -> dict[str, object]:
    steps = _trainings.last_step(frames)
    periods = [method.every for method in TRAININGS.keys_by_name(frames) if method.name == DILOCO]
    rounds = [f"{steps // every:,} with H = {every}" for every in periods]
    few = [every for every in periods if steps // every < ENOUGH_ROUNDS]
    aim = f", fewer than the {ENOUGH_ROUNDS} aimed at with H = {captions.join_words(few)}" if few else ""
    return {**_trainings.facts(frames), "rounds": captions.join_words(rounds) + aim}


def claims() -> list[Claim]:
    family = "survey.local-loss"
    names = {every: "as-good-at-30" if every == 30 else "as-good" for every in EVERY["laptop"]}
    return [
        *(
            claim(f"{family}.{name}", loss_over_dense, DILOCO, every, case=str(every), every=every)
            for every, name in names.items()
        ),
        *(
            claim(f"{family}.sparseloco-below", diloco_above_sparseloco, every, case=str(every), every=every)
            for every in names
        ),
        claim(f"{family}.demo-as-good", loss_over_dense, DEMO, None),
    ]


def loss_over_dense(frames: Frames, name: str, every: int | None) -> Estimate | None:
    """Return a method's loss at the end over that of averaging every step's gradients, paired by seed."""
    return TRAININGS.loss_ratio(frames, LocalMethod(name, every), LocalMethod(DENSE))


def diloco_above_sparseloco(frames: Frames, every: int) -> Estimate | None:
    """Return DiLoCo's loss at the end less SparseLoCo's, at the same H; paired by seed."""
    return TRAININGS.loss_above(frames, LocalMethod(DILOCO, every), LocalMethod(SPARSELOCO, every))
