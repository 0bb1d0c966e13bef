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
from experiments.figures._trainings import KILO, MEGA, NamedTrainings, scaled_mean_outcome
from experiments.figures.papers import make_claim

TITLE = "Loss of a small language model against bytes: every step, and every H steps"
SCALE = _trainings.SCALE
SEEDS = {"smoke": [0], "laptop": [0, 1], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [2, 3, 4], "paper": [3, 4]}
_DATA = papers.item_settings("survey.local-loss")
EVERY: Mapping[str, Sequence[int]] = _DATA["every"]
EVERY_STEP: Mapping[str, RunSettings] = _DATA["every_step"]
LOCAL: Mapping[str, RunSettings] = _DATA["local"]
LOOKS: Mapping[str, style.MethodStyle] = {
    name: style.MethodStyle(*look) for name, look in _DATA["looks"].items()
}
DENSE, DILOCO, SPARSELOCO, DEMO = "dense", "diloco", "sparseloco", "demo"
ENOUGH_ROUNDS = 200  # that a training should have: what is sent of a round is a small part of what has moved


class MethodWithPeriod(NamedTuple):
    """A method, and its H; None averages every step."""

    name: str
    every: int | None = None

    @property
    def label(self) -> str:
        """Name in pictures and tables."""
        return LOOKS[self.name].label + (f", H = {self.every}" if self.every else "")


def settings_by_method(periods: Sequence[int]) -> dict[MethodWithPeriod, RunSettings]:
    """Return the settings of every method, of local steps at each of these H."""
    by_method = {MethodWithPeriod(name): settings for name, settings in EVERY_STEP.items()}
    for name, settings in LOCAL.items():
        for every in periods:
            by_method[MethodWithPeriod(name, every)] = {**settings, "method.every": every}
    return by_method


TRAININGS = NamedTrainings(
    "local-loss", settings_by_method(sorted({*EVERY["smoke"], *EVERY["paper"]})), ("method", "method.every")
)


def runs(profile: str, seeds_by_profile: Mapping[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(profile, seeds_by_profile[profile], settings_by_method(EVERY[profile]))


more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def mean_sent_mb_by_validation(frames: Frames, keys: Sequence[str]) -> np.ndarray:
    """Return the megabytes that a worker has sent at each validation, the mean over seeds."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
    steps = epochs.groupby("key")["step"].diff().fillna(epochs["step"])
    sums = (epochs["wire_bytes"] * steps).groupby(epochs["key"]).cumsum()
    means: np.ndarray = sums.groupby(epochs["epoch"]).mean().to_numpy() * MEGA
    return means


def draw(frames: Frames, profile: str) -> plots.Figure:
    keys_by_method = TRAININGS.run_keys_by_name(frames)
    if not keys_by_method:
        raise ValueError(plots.NOTHING_TO_DRAW)
    positions = _trainings.relative_position_by_name(
        sorted({method.every for method in keys_by_method if method.every})
    )
    by_bytes = []
    by_steps = list[plots.Curve]()
    for method, keys in keys_by_method.items():
        look = LOOKS[method.name]._replace(label=method.label)
        line_style = {"alpha": 1 - 0.65 * positions.get(method.every or 0, 0), "ms": 3}
        by_steps += TRAININGS.loss_curves(frames, method, look, line_style)
        by_bytes += TRAININGS.loss_curves(
            frames, method, look, line_style, mean_sent_mb_by_validation(frames, keys)
        )
    panels = [
        plots.curves_panel(by_bytes, xlabel="Megabytes sent by a worker", xscale="log"),
        plots.curves_panel(by_steps, xlabel="Optimiser steps", xlim=(0, None)),
    ]
    return plots.compose_figure(panels, 3.8, ylabel="Validation loss (nats a character)", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Return loss and bytes at the end of each method's trainings, and what was sent by step and by round."""
    frames = _trainings.with_outcome_columns(frames)
    keys_by_method = TRAININGS.run_keys_by_name(frames)
    sent = {
        method: float(mean_sent_mb_by_validation(frames, keys)[-1]) for method, keys in keys_by_method.items()
    }
    dense_mb = sent.get(MethodWithPeriod(DENSE))
    end_rows = []
    sent_rows = []
    for method, keys in keys_by_method.items():
        columns = TRAININGS.sent_bytes_and_seeds_cells(frames, method)
        end_rows.append({
            "method": method.label, **TRAININGS.loss_cells(frames, method),
            "over dense": final_loss_over_dense(frames, *method), "sent by a worker": sent[method],
            "times fewer bytes": dense_mb / sent[method] if dense_mb else None, "seeds": columns["seeds"],
        })  # fmt: skip
        sent_rows.append(
            {
                "method": method.label,
                "rounds": _trainings.longest_training_steps(frames) // method.every if method.every else None,
                "in a step": scaled_mean_outcome(frames, keys, "wire_bytes", KILO),
                "in a round": columns["in a round"],
                "messages in a step": scaled_mean_outcome(frames, keys, "messages"),
                "messages in a round": scaled_mean_outcome(frames, keys, "round_messages"),
            }
        )
    note, by_round = (
        papers.text_template_or_empty(f"survey.local-loss.{part}") for part in ("note", "by-round")
    )
    units = {"loss": "nats", "sent by a worker": "MB"}
    return [
        Table.from_rows("At the end of the trainings", end_rows, units, note),
        Table.from_rows("Sent by a worker", sent_rows, {"in a step": "kB", "in a round": "kB"}, by_round),
    ]


def facts(frames: Frames) -> dict[str, object]:
    steps = _trainings.longest_training_steps(frames)
    periods = [method.every for method in TRAININGS.run_keys_by_name(frames) if method.name == DILOCO]
    rounds = [f"{steps // every:,} with H = {every}" for every in periods]
    few = [every for every in periods if steps // every < ENOUGH_ROUNDS]
    aim = f", fewer than the {ENOUGH_ROUNDS} aimed at with H = {captions.join_with_and(few)}" if few else ""
    return {**_trainings.training_facts(frames), "rounds": captions.join_with_and(rounds) + aim}


def claims() -> list[Claim]:
    family = "survey.local-loss"
    names = {every: "as-good-at-30" if every == 30 else "as-good" for every in EVERY["laptop"]}
    return [
        *(
            make_claim(f"{family}.{name}", final_loss_over_dense, DILOCO, every, case=str(every), every=every)
            for every, name in names.items()
        ),
        *(
            make_claim(
                f"{family}.sparseloco-below",
                diloco_loss_above_sparseloco,
                every,
                case=str(every),
                every=every,
            )
            for every in names
        ),
        make_claim(f"{family}.demo-as-good", final_loss_over_dense, DEMO, None),
    ]


def final_loss_over_dense(frames: Frames, name: str, every: int | None) -> Estimate | None:
    """Return a method's loss at the end over that of averaging every step's gradients, paired by seed."""
    return TRAININGS.final_loss_ratio(frames, MethodWithPeriod(name, every), MethodWithPeriod(DENSE))


def diloco_loss_above_sparseloco(frames: Frames, every: int) -> Estimate | None:
    """Return DiLoCo's loss at the end less SparseLoCo's, at the same H; paired by seed."""
    return TRAININGS.final_loss_difference(
        frames, MethodWithPeriod(DILOCO, every), MethodWithPeriod(SPARSELOCO, every)
    )
