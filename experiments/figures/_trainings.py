"""Trainings of one model that differ in named settings: their runs, where they end, and how far apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import plots
from analysis.pictures import captions
from analysis.pictures.numbers import format_number
from analysis.pictures.style import MethodStyle
from analysis.records.columns import OUTCOMES
from analysis.records.frames import Frames, find_keys
from analysis.records.steps import add_outcomes
from analysis.stats import Estimate, final_difference, final_ratio, final_value, mean_curve
from experiments.config.run import Run, RunSettings
from experiments.figures._runs import TRAINED, scale

COLUMN = "val_loss"
LARGEST = 20.0  # nats, to which perplexity is told: e to them is more than any vocabulary has entries
KILO, MEGA = 1e-3, 1e-6
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2, 3, 4], "paper": [3, 4]}
# Streaming DiLoCo's smallest model, Table 5, as columns of the records.
SCALE = {"task.name": "a transformer of 35 M parameters on C4"}


@dataclass(frozen=True)
class Trainings:
    """Trainings by name.

    Args:
        item: whose entry in scales.yaml they have in common.
        named: the settings of each.
        told_by: the settings that tell them apart; all of them by default.
    """

    item: str
    named: Mapping[Any, RunSettings]
    told_by: Collection[str] | None = None

    def runs(self, profile: str, seeds: Sequence[int], names: Iterable[Any]) -> list[Run]:
        """All of a seed before the next seed."""
        shared: RunSettings = {**TRAINED, "profile": profile, **scale(self.item, profile)}
        chosen = [self.named[name] for name in names]
        return [Run({**shared, **own, "seed": seed}) for seed in seeds for own in chosen]

    def keys(self, frames: Frames, name: Any) -> list[str]:
        """The runs of a training, one a seed."""
        own = {
            key: value for key, value in self.named[name].items() if key in (self.told_by or self.named[name])
        }
        return find_keys(
            frames, {"method.name" if key == "method" else key: value for key, value in own.items()}
        )

    def found(self, frames: Frames) -> dict[Any, list[str]]:
        """The runs of each training that has any."""
        return {name: own for name in self.named if (own := self.keys(frames, name))}

    def end(self, frames: Frames, name: Any) -> Estimate | None:
        """The loss at the end, over seeds."""
        return final_value(frames, self.keys(frames, name), COLUMN)

    def above(self, frames: Frames, name: Any, other: Any) -> Estimate | None:
        """A training's loss at the end less that of another; paired by seed."""
        return self._compared(final_difference, frames, name, other)

    def over(self, frames: Frames, name: Any, other: Any) -> Estimate | None:
        """A training's loss at the end over that of another; paired by seed."""
        return self._compared(final_ratio, frames, name, other)

    def _compared(
        self, compare: Callable[..., Estimate | None], frames: Frames, *names: Any
    ) -> Estimate | None:
        here, there = (self.keys(frames, name) for name in names)
        return compare(frames, here, there, COLUMN) if here and there else None

    def along(
        self, frames: Frames, name: Any, look: MethodStyle, how: Mapping[str, Any], x: Any = None
    ) -> list[plots.Curve]:
        """The loss at each validation against optimiser steps, or `x`; no curve where nothing ran."""
        at = mean_curve(frames, self.keys(frames, name), COLUMN)
        return [plots.Curve(look, at["step"] if x is None else x[: len(at)], at, how)] if len(at) else []

    def cells(self, frames: Frames, name: Any) -> dict[str, object]:
        """Of a table: the loss at the end, and e to it."""
        end = self.end(frames, name)
        return {"loss": end, "perplexity": perplexity(end) if end and end.value <= LARGEST else None}

    def sent(self, frames: Frames, name: Any) -> dict[str, object]:
        """Of a table: kilobytes that a worker sent in a round, and the number of seeds."""
        own = self.keys(frames, name)
        return {"in a round": outcome(frames, own, "round_bytes", KILO), "seeds": len(own)}


def shades(names: Sequence[Any], least: float = 0.3) -> dict[Any, float]:
    """Opacities from `least` to 1, in this order."""
    return {name: least + (1 - least) * at / max(1, len(names) - 1) for at, name in enumerate(names)}


def perplexity(loss: Estimate) -> Estimate:
    """Among how many characters the next one is left to guess, with the interval of the loss; without one
    where two seeds say so little that it has no end.
    """
    low, high = loss.low, loss.high
    low, high = (None, None) if high is None or high > LARGEST else (math.exp(low or 0.0), math.exp(high))
    return loss._replace(value=math.exp(loss.value), low=low, high=high, floor=1.0)


def told(frames: Frames) -> Frames:
    """These frames, whose runs have their outcomes: records from before one was added lack it."""
    return frames if {*OUTCOMES} <= {*frames.runs} else add_outcomes(frames)


def outcome(frames: Frames, own: Sequence[str], column: str, unit: float = 1.0) -> float | None:
    """An outcome of `told` runs, the mean over seeds; None where it was not recorded."""
    mean = float(frames.runs.loc[frames.runs["key"].isin(own), column].astype(float).mean())
    return None if math.isnan(mean) else unit * mean


def facts(frames: Frames) -> dict[str, object]:
    """How long, with which seeds and rates was trained."""
    return {
        "steps": f"{int(frames.epochs['step'].max()):,}",
        "seeds": captions.join_words(captions.distinct_values(frames, "seed")),
        "rates": captions.join_words(map(format_number, captions.distinct_values(frames, "task.lr"))),
    }
