"""Timing items: what takes turns, what fig1 and fig4 show of it, and what the paper's bars are made of."""

from __future__ import annotations

import pytest

from analysis.records.configs import configs_by_variant
from experiments import figures
from experiments.figures.runs import required_configs
from tests.figures.made_up import PROFILES

# What takes its turns first, in items whose methods take turns.
FIRST = {
    **dict.fromkeys(("fig1", "fig4", "speed", "fig4-fast", "speed-fast", "straggler"), "dense"),
    "crossover-measured": "dense-buckets-overlapped",
    "shi-selection": "topk",
}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_timing_item_is_measured_in_turns_against_the_same_method(profile: str) -> None:
    for item, first in FIRST.items():
        for config in required_configs(figures.load(item), profile):
            variants = configs_by_variant(config)
            assert next(iter(variants)) == first
            assert not any(variant["method"].get("density_warmup") for variant in variants.values())
            if item == "straggler":
                assert config["late"] == {"draw": "uniform", "s": 0.064, "spread": 0, "rank": 1}
