"""Trainings of one model that differ in named settings: their runs, where they end, and how far apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from analysis import plots
from analysis.pictures.style import MethodStyle
from analysis.records.columns import OUTCOMES
from analysis.records.frames import Frames, find_run_keys
from analysis.records.steps import add_missing_outcomes
from analysis.stats import Estimate, final_difference, final_mean, final_ratio, mean_curve
from experiments.config.run import Run, RunSettings
from experiments.figures._runs import TRAINED, scaled_settings, setting_values_text

T = TypeVar("T")
COLUMN = "val_loss"
MAX_LOSS_NATS = 20.0  # up to which perplexity is shown: e to it is more than any vocabulary has entries
KILO, MEGA = 1e-3, 1e-6
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2, 3, 4], "paper": [3, 4]}
# As columns of the records: the smallest model of Streaming DiLoCo's Table 5, and the largest of DeMo.
SCALE = {"task.name": "transformers of 35 M to 1 B parameters on text of the web"}


@dataclass(frozen=True)
class NamedTrainings:
    """Trainings by name, whose records are found by the settings of each.

    Args:
        item: whose entry in scales.yaml they have in common.
        settings_by_name: the settings of each.
        identifying_settings: the settings by which records are told apart; all of them by default.
    """

    item: str
    settings_by_name: Mapping[Any, RunSettings]
    identifying_settings: Collection[str] | None = None

    def runs(self, profile: str, seeds: Sequence[int], names: Iterable[Any]) -> list[Run]:
        """Return the runs of the named trainings, all of a seed before the next seed."""
        shared = scaled_settings(TRAINED, self.item, profile)
        trainings = [self.settings_by_name[name] for name in names]
        return [Run({**shared, **settings, "seed": seed}) for seed in seeds for settings in trainings]

    def run_keys(self, frames: Frames, name: Any, extra_columns: RunSettings | None = None) -> list[str]:
        """Return the runs of a training, one a seed.

        Args:
            extra_columns: columns of the records that identify them besides.
        """
        settings = self.settings_by_name[name]
        columns = {
            "method.name" if key == "method" else key: value
            for key, value in settings.items()
            if key in (self.identifying_settings or settings)
        }
        return find_run_keys(frames, columns | dict(extra_columns or {}))

    def run_keys_by_name(self, frames: Frames) -> dict[Any, list[str]]:
        """Return the runs of each training that has any."""
        keys_by_name = {name: self.run_keys(frames, name) for name in self.settings_by_name}
        return {name: keys for name, keys in keys_by_name.items() if keys}

    def mean_final_loss(self, frames: Frames, name: Any) -> Estimate | None:
        """Return the loss at the end, over seeds."""
        return final_mean(frames, self.run_keys(frames, name), COLUMN)

    def final_loss_difference(self, frames: Frames, name: Any, baseline: Any) -> Estimate | None:
        """Return a training's loss at the end less that of the baseline, paired by seed."""
        return self._compare(final_difference, frames, name, baseline)

    def final_loss_ratio(self, frames: Frames, name: Any, baseline: Any) -> Estimate | None:
        """Return a training's loss at the end over that of the baseline, paired by seed."""
        return self._compare(final_ratio, frames, name, baseline)

    def _compare(
        self, statistic: Callable[..., Estimate | None], frames: Frames, *names: Any
    ) -> Estimate | None:
        keys = [self.run_keys(frames, name) for name in names]
        return statistic(frames, *keys, COLUMN) if all(keys) else None

    def loss_curves(
        self, frames: Frames, name: Any, look: MethodStyle, line_style: Mapping[str, Any], x: Any = None
    ) -> list[plots.Curve]:
        """Return the loss at each validation against optimiser steps, or `x`; no curve where nothing ran."""
        table = mean_curve(frames, self.run_keys(frames, name), COLUMN)
        if not len(table):
            return []
        return [plots.Curve(look, table["step"] if x is None else x[: len(table)], table, line_style)]

    def loss_cells(self, frames: Frames, name: Any) -> dict[str, object]:
        """Return the cells of a table's row: the loss at the end, and the perplexity."""
        loss = self.mean_final_loss(frames, name)
        return {
            "loss": loss,
            "perplexity": perplexity(loss) if loss and loss.value <= MAX_LOSS_NATS else None,
        }

    def sent_bytes_and_seeds_cells(self, frames: Frames, name: Any) -> dict[str, object]:
        """Return the cells of a table's row: kilobytes that a worker sent in a round, and the seeds.

        Args:
            frames: with outcomes (`with_outcome_columns`).
        """
        keys = self.run_keys(frames, name)
        return {"in a round": scaled_mean_outcome(frames, keys, "round_bytes", KILO), "seeds": len(keys)}


def relative_position_by_name(names: Sequence[T]) -> dict[T, float]:
    """Return places from 0 to 1, in the order of the names."""
    return {name: place / max(1, len(names) - 1) for place, name in enumerate(names)}


def perplexity(loss: Estimate) -> Estimate:
    """Return among how many characters the next one is left to guess, with the interval of the loss.

    Without one where two seeds say so little that it has no end.
    """
    low = loss.low
    high = loss.high
    low, high = (
        (None, None) if high is None or high > MAX_LOSS_NATS else (math.exp(low or 0.0), math.exp(high))
    )
    return loss._replace(value=math.exp(loss.value), low=low, high=high, floor=1.0)


def with_outcome_columns(frames: Frames) -> Frames:
    """Return the frames with the outcomes of their runs, which older records lack."""
    return frames if {*OUTCOMES} <= {*frames.runs} else add_missing_outcomes(frames)


def scaled_mean_outcome(
    frames: Frames, keys: Sequence[str], column: str, factor: float = 1.0
) -> float | None:
    """Return the mean of an outcome over runs, times a factor; None where it was not recorded."""
    mean = float(frames.runs.loc[frames.runs["key"].isin(keys), column].astype(float).mean())
    return None if math.isnan(mean) else factor * mean


def training_facts(frames: Frames) -> dict[str, object]:
    """Return how long, with which seeds and rates was trained."""
    return {
        "steps": f"{longest_training_steps(frames):,}", "seeds": setting_values_text(frames, "seed"),
        "rates": setting_values_text(frames, "task.lr"),
    }  # fmt: skip


def longest_training_steps(frames: Frames) -> int:
    """Return the length of the longest training in steps."""
    return int(frames.epochs["step"].max())
