"""Loss of a small language model against bytes and against steps: every step, and every H steps.

Not a figure of a paper; the claims are those of DiLoCo, SparseLoCo and DeMo, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _trainings, papers
from experiments.figures._trainings import COLUMN as COLUMN
from experiments.figures._trainings import KILO, MEGA, Trainings, outcome
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
Named = tuple[str, int | None]  # a method, and its H


def _named(periods: Sequence[int]) -> dict[Named, RunSettings]:
    named: dict[Named, RunSettings] = {(name, None): own for name, own in EVERY_STEP.items()}
    for name, own in LOCAL.items():
        named |= {(name, every): {**own, "method.every": every} for every in periods}
    return named


TRAININGS = Trainings(
    "local-loss", _named(sorted({*EVERY["smoke"], *EVERY["paper"]})), ("method", "method.every")
)


def runs(profile: str, seeds: dict[str, list[int]] = SEEDS) -> list[Run]:
    return TRAININGS.runs(profile, seeds[profile], _named(EVERY[profile]))


more_runs = partial(runs, seeds=MORE_SEEDS)


def keys(frames: Frames, name: str, every: int | None = None) -> list[str]:
    return TRAININGS.keys(frames, (name, every))


def label(name: str, every: int | None) -> str:
    return LOOKS[name].label + (f", H = {every}" if every else "")


def sent_mb(frames: Frames, of: Sequence[str]) -> np.ndarray:
    """Megabytes that a worker has sent at each validation, the mean over seeds."""
    epochs = frames.epochs[frames.epochs["key"].isin(of)].sort_values("epoch")
    steps = epochs.groupby("key")["step"].diff().fillna(epochs["step"])
    together = (epochs["wire_bytes"] * steps).groupby(epochs["key"]).cumsum()
    means: np.ndarray = together.groupby(epochs["epoch"]).mean().to_numpy() * MEGA
    return means


def sent(frames: Frames, of: Sequence[str]) -> float:
    """Megabytes that a worker sent in all."""
    return float(sent_mb(frames, of)[-1])


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = TRAININGS.found(frames)
    if not found:
        raise ValueError(plots.NOTHING_TO_DRAW)
    faint = _trainings.shades(sorted({every for _, every in found if every}), 1.0)
    ranks = {every: at for at, every in enumerate(faint)}
    by_bytes, by_steps = list[plots.Curve](), list[plots.Curve]()
    for named, own in found.items():
        share = ranks.get(named[1], 0) / max(1, len(ranks) - 1)
        look, how = LOOKS[named[0]]._replace(label=label(*named)), {"alpha": 1 - 0.65 * share, "ms": 3}
        by_steps += TRAININGS.along(frames, named, look, how)
        by_bytes += TRAININGS.along(frames, named, look, how, sent_mb(frames, own))
    panels = [
        plots.curves_panel(by_bytes, xlabel="Megabytes sent by a worker", xscale="log"),
        plots.curves_panel(by_steps, xlabel="Optimiser steps", xlim=(0, None)),
    ]
    return plots.compose_figure(panels, 3.8, ylabel="Validation loss (nats a character)", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Loss and bytes at the end of each method's trainings; what a worker sent by step and by round."""
    frames = _trainings.told(frames)
    found, steps = TRAININGS.found(frames), int(frames.epochs["step"].max())
    dense = found.get((DENSE, None))
    ends, sending = list[dict[str, Any]](), list[dict[str, Any]]()
    for (name, every), own in found.items():
        of, whole = partial(outcome, frames, own), TRAININGS.sent(frames, (name, every))
        ends.append({
            "method": label(name, every), **TRAININGS.cells(frames, (name, every)),
            "over dense": loss_over(frames, name, every), "sent by a worker": sent(frames, own),
            "times fewer bytes": sent(frames, dense) / sent(frames, own) if dense else None,
            "seeds": whole["seeds"],
        })  # fmt: skip
        sending.append({
            "method": label(name, every), "rounds": steps // every if every else None,
            "in a step": of("wire_bytes", KILO), "in a round": whole["in a round"],
            "messages in a step": of("messages"), "messages in a round": of("round_messages"),
        })  # fmt: skip
    note, by_round = (papers.words(f"survey.local-loss.{part}") for part in ("note", "by-round"))
    return [
        Table.of("At the end of the trainings", ends, {"loss": "nats", "sent by a worker": "MB"}, note),
        Table.of("Sent by a worker", sending, {"in a step": "kB", "in a round": "kB"}, by_round),
    ]


def facts(frames: Frames) -> dict[str, object]:
    steps, periods = (
        int(frames.epochs["step"].max()),
        [every for name, every in TRAININGS.found(frames) if name == DILOCO],
    )
    rounds = [f"{steps // every:,} with H = {every}" for every in periods]
    few = [str(every) for every in periods if steps // every < ENOUGH_ROUNDS]
    aim = f", fewer than the {ENOUGH_ROUNDS} aimed at with H = {captions.join_words(few)}" if few else ""
    return {**_trainings.facts(frames), "rounds": captions.join_words(rounds) + aim}


def claims() -> list[Claim]:
    about, every = "survey.local-loss", EVERY["laptop"]
    as_good = {each: "as-good-at-30" if each == 30 else "as-good" for each in every}
    return [
        *(
            claim(f"{about}.{as_good[each]}", loss_over, DILOCO, each, case=str(each), every=each)
            for each in every
        ),
        *(
            claim(f"{about}.sparseloco-below", below_diloco, each, case=str(each), every=each)
            for each in every
        ),
        claim(f"{about}.demo-as-good", loss_over, DEMO, None),
    ]


def loss_over(frames: Frames, name: str, every: int | None) -> Estimate | None:
    """A method's loss at the end over that of averaging every step's gradients; paired by seed."""
    return TRAININGS.over(frames, (name, every), (DENSE, None))


def below_diloco(frames: Frames, every: int) -> Estimate | None:
    """DiLoCo's loss at the end less SparseLoCo's, at the same H; paired by seed."""
    return TRAININGS.above(frames, (DILOCO, every), (SPARSELOCO, every))
