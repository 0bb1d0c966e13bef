"""Runs of items: settings that several items need, grids of them, and methods in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, reduce
from itertools import product
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

from analysis.pictures import captions
from analysis.pictures.numbers import CHOSEN_DIGITS, format_number
from analysis.records.frames import Frames
from experiments.config.run import Run, RunSettings

T = TypeVar("T")
# Of trainings that take long; more with --all.
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0]}
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2], "paper": [1, 2]}
# Of items whose claims' rules were written after the trainings with seeds 0 to 2: unseen seeds decide them.
UNSEEN_SEEDS = {"smoke": [0], "laptop": [5], "paper": [0]}
MORE_UNSEEN_SEEDS = {"smoke": [1], "laptop": [6, 7, 8, 9], "paper": [1, 2]}
TRAINED: RunSettings = {
    "recipe": "none", "cluster": "virtual", "timing.mode": "production", "data.fallback": "refuse",
}  # fmt: skip
TIMED: RunSettings = {
    "recipe": "none", "timing.mode": "serialised", "train.validate": "never", "timing.warmup_steps": 2,
}  # fmt: skip


def span_grid(shared: RunSettings, *axes: Iterable[RunSettings]) -> list[Run]:
    """Return a run for each point of a grid, the last axis fastest."""
    return [reduce(or_, point, Run(shared)) for point in product(*axes)]


def setting_axis(key: str, values: Iterable[Any]) -> list[RunSettings]:
    """Return an axis of a grid: one setting, with each of these values."""
    return [{key: value} for value in values]


def with_density_except_dense(
    settings_by_method: Mapping[str, RunSettings], density: float
) -> dict[str, RunSettings]:
    """Return the settings by method, with this density in all but those of dense."""
    return {
        name: settings if name == "dense" else {**settings, "method.density": density}
        for name, settings in settings_by_method.items()
    }


def setting_values_text(frames: Frames, column: str) -> str:
    """Return the values of a setting among the runs in words: '0.01 and 0.1'."""
    values = captions.distinct_values(frames, column)
    return captions.join_with_and(
        value if isinstance(value, str) else format_number(value, CHOSEN_DIGITS) for value in values
    )


def scaled_settings(base: RunSettings, item: str, profile: str) -> dict[str, Any]:
    """Return settings that several items need, with those by which a profile scales an item."""
    return {**base, "profile": profile, **profile_settings(item, profile)}


def profile_settings(item: str, profile: str) -> RunSettings:
    """Return the settings by which a profile scales an item, from scales.yaml."""
    return profile_entry(_read_settings_file("scales")[item], profile)


def settings_by_variant(item: str) -> Mapping[str, RunSettings]:
    """Return the settings in which each of an item's variants differs, from variants.yaml."""
    return _read_settings_file("variants")[item]


@cache
def _read_settings_file(file: str) -> Mapping[str, Mapping[str, RunSettings]]:
    import yaml  # listing the items needs no reader

    settings: Mapping[str, Mapping[str, RunSettings]]
    settings = yaml.safe_load(Path(__file__).with_name(f"{file}.yaml").read_text())
    return settings


def profile_entry(table: Mapping[str, T], profile: str) -> T:
    """Return a profile's entry of a table.

    Raises:
        ValueError: there is no such profile; with those that there are.
    """
    if profile not in table:
        raise ValueError(f"no profile {profile!r}; there are: {', '.join(table)}")
    return table[profile]
