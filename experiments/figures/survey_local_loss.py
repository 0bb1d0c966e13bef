"""Loss of a small language model against bytes and against steps: every step, and every H steps.

Not a figure of a paper; the claims are those of DiLoCo, SparseLoCo and DeMo, at a scale far below theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames, keys_of
from analysis.stats import Value, curve, final_difference, final_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _local, papers
from experiments.figures._runs import TRAINED, scale
from experiments.figures.papers import claim

TITLE = "Loss of a small language model against bytes: every step, and every H steps"
COLUMN = "val_loss"
# Streaming DiLoCo's smallest model, Table 5, as columns of the records.
SCALE = {"task.name": "a transformer of 35 M parameters on C4"}
SEEDS = {"smoke": [0], "laptop": [0, 1], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [2, 3, 4], "paper": [3, 4]}
_DATA = papers.item("survey.local-loss")
EVERY: Mapping[str, Sequence[int]] = _DATA["every"]
EVERY_STEP: Mapping[str, RunSettings] = _DATA["every_step"]
LOCAL: Mapping[str, RunSettings] = _DATA["local"]
LOOKS: Mapping[str, style.Look] = {name: style.Look(*look) for name, look in _DATA["looks"].items()}
DENSE, DILOCO, SPARSELOCO, DEMO = "dense", "diloco", "sparseloco", "demo"
MEGA = 1e-6
ENOUGH_ROUNDS = 200  # that a training should have: what is sent of a round is a small part of what has moved


def runs(profile: str) -> list[Run]:
    return _trainings(profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return _trainings(profile, MORE_SEEDS[profile])


def _trainings(profile: str, seeds: Sequence[int]) -> list[Run]:
    shared: RunSettings = {**TRAINED, "profile": profile, **scale("local-loss", profile)}
    methods = [*EVERY_STEP.values()]
    methods += [{**own, "method.every": every} for own in LOCAL.values() for every in EVERY[profile]]
    return [Run({**shared, **own, "seed": seed}) for seed in seeds for own in methods]


def keys(frames: Frames, name: str, every: int | None = None) -> list[str]:
    """The runs of a method, of local steps with this H."""
    chosen: dict[str, Any] = {"method.name": name}
    return keys_of(frames, chosen if every is None else {**chosen, "method.every": every})


def trained(frames: Frames) -> list[tuple[str, int | None, list[str]]]:
    """Each method with its H and its runs, where it has any."""
    asked: list[tuple[str, int | None]] = [(name, None) for name in EVERY_STEP]
    asked += [(name, int(every)) for name in LOCAL for every in _periods(frames, name)]
    found = [(name, every, keys(frames, name, every)) for name, every in asked]
    return [each for each in found if each[2]]


def _periods(frames: Frames, name: str) -> list[int]:
    """Every H that a method's runs have."""
    own = frames.runs[frames.runs.get("method.name", "") == name] if len(frames.runs) else frames.runs
    return sorted({int(every) for every in own["method.every"].dropna()}) if "method.every" in own else []


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
    found = trained(frames)
    if not found:
        raise ValueError(plots.EMPTY)
    periods = sorted({every for _, every, _ in found if every})
    lines = {"steps": list[plots.Curve](), "bytes": list[plots.Curve]()}
    for name, every, own in found:
        at = curve(frames, own, COLUMN)
        share = periods.index(every) / max(1, len(periods) - 1) if every else 0.0
        look = LOOKS[name]._replace(label=label(name, every))
        how = {"alpha": 1 - 0.65 * share, "ms": 3}
        lines["steps"].append(plots.Curve(look, at["step"], at, how))
        lines["bytes"].append(plots.Curve(look, sent_mb(frames, own)[: len(at)], at, how))
    panels = [
        plots.curves(lines["bytes"], xlabel="Megabytes sent by a worker", xscale="log"),
        plots.curves(lines["steps"], xlabel="Optimiser steps", xlim=(0, None)),
    ]
    return plots.picture(panels, 3.8, ylabel="Validation loss (nats a character)", sharey=True)


def table(frames: Frames) -> list[Table]:
    """Loss and bytes at the end of each method's trainings; what a worker sent by step and by round."""
    frames = _local.told(frames)
    ends, sending = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, every, own in trained(frames):
        method = label(name, every)
        ends.append({
            "method": method, **_local.loss(frames, own), "over dense": _over(frames, own),
            "sent by a worker": sent(frames, own), "times fewer bytes": _fewer(frames, own),
            "seeds": len(own),
        })  # fmt: skip
        by_step, messages, of_round = (
            _local.outcome(frames, own, column) for column in ("wire_bytes", "messages", "round_messages")
        )
        sending.append({
            "method": method, "rounds": _steps(frames) // every if every else None,
            "in a step": None if by_step is None else _local.KILO * by_step,
            "in a round": _local.round_kb(frames, own),
            "messages in a step": messages, "messages in a round": of_round,
        })  # fmt: skip
    note, by_round = (papers.words(f"survey.local-loss.{part}") for part in ("note", "by-round"))
    return [
        Table.of("At the end of the trainings", ends, {"loss": "nats", "sent by a worker": "MB"}, note),
        Table.of("Sent by a worker", sending, {"in a step": "kB", "in a round": "kB"}, by_round),
    ]


def _over(frames: Frames, own: Sequence[str]) -> Value | None:
    dense = keys(frames, DENSE)
    return final_ratio(frames, own, dense, COLUMN) if dense else None


def _fewer(frames: Frames, own: Sequence[str]) -> float | None:
    dense = keys(frames, DENSE)
    return sent(frames, dense) / sent(frames, own) if dense else None


def _steps(frames: Frames) -> int:
    return int(frames.epochs["step"].max())


def facts(frames: Frames) -> dict[str, object]:
    steps, periods = _steps(frames), _periods(frames, DILOCO)
    rounds = [f"{steps // every:,} with H = {every}" for every in periods]
    few = [str(every) for every in periods if steps // every < ENOUGH_ROUNDS]
    aim = f", fewer than the {ENOUGH_ROUNDS} aimed at with H = {captions.listed(few)}" if few else ""
    return {
        "steps": f"{steps:,}", "rounds": captions.listed(rounds) + aim,
        "seeds": captions.listed(captions.values(frames, "seed")),
        "rates": captions.listed(map(number, captions.values(frames, "task.lr"))),
    }  # fmt: skip


def claims() -> list[Claim]:
    every = EVERY["laptop"]
    return [
        *(
            claim(f"survey.local-loss.{name}", loss_over, DILOCO, each, case=str(each), every=each)
            for each in every
            for name in (["as-good-at-30"] if each == 30 else ["as-good"])
        ),
        *(
            claim("survey.local-loss.sparseloco-below", below_diloco, each, case=str(each), every=each)
            for each in every
        ),
        claim("survey.local-loss.demo-as-good", loss_over, DEMO, None),
    ]


def loss_over(frames: Frames, name: str, every: int | None) -> Value | None:
    """A method's loss at the end over that of averaging every step's gradients; paired by seed."""
    own, dense = keys(frames, name, every), keys(frames, DENSE)
    return final_ratio(frames, own, dense, COLUMN) if own and dense else None


def below_diloco(frames: Frames, every: int) -> Value | None:
    """DiLoCo's loss at the end less SparseLoCo's, at the same H; paired by seed."""
    dense, sparse = keys(frames, DILOCO, every), keys(frames, SPARSELOCO, every)
    return final_difference(frames, dense, sparse, COLUMN) if dense and sparse else None
