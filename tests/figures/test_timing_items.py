"""Timing items: what takes turns, what fig1 and fig4 show of it, and what the paper's bars are made of."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.records.attempts import of_attempt
from analysis.records.configs import variant_configs
from analysis.records.frames import Frames
from analysis.records.steps import step_seconds, warm
from analysis.records.store import Store
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig1
from experiments.figures.runs import configs_of
from tests.analysis import synthetic
from tests.figures.made_up import PROFILES

# What takes its turns first, in items whose methods take turns.
FIRST = {
    **dict.fromkeys(("fig1", "fig4", "speed", "fig4-fast", "speed-fast", "straggler"), "dense"),
    "crossover-measured": "dense-buckets-overlapped",
    "shi-selection": "topk",
}


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    timing = {"mode": "serialised", "warmup_steps": 2, "span_steps": None}
    store = Store(tmp_path_factory.mktemp("runs"))
    return of_attempt(synthetic.alternated(store, ["dense", "topk"], timing=timing))[0]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_timing_item_is_measured_in_turns_against_the_same_method(profile: str) -> None:
    for item, first in FIRST.items():
        for config in configs_of(item, profile):
            variants = variant_configs(config)
            assert next(iter(variants)) == first
            assert not any(variant["method"].get("density_warmup") for variant in variants.values())
            if item == "straggler":
                assert config["late"] == {"draw": "uniform", "s": 0.064, "spread": 0, "rank": 1}


def test_the_protocol_is_measured_in_whole_epochs_with_one_counted_validation_each() -> None:
    for config in (config for profile in PROFILES for config in configs_of("speed-protocol", profile)):
        epoch = config["train"]["epoch_steps"] or yoon2022.STEPS_PER_EPOCH
        assert config["alternate"]["block_steps"] == epoch
        # The first step of a turn is not counted, and must not be the one that validates.
        assert config["timing"]["warmup_steps"] % epoch != 0
        for name, variant in variant_configs(config).items():
            assert (variant["train"]["validate"] == "epoch") == name.endswith("-published")


def test_fig1_shows_the_warm_step_nearest_to_the_median_of_those_that_fig4_shows(frames: Frames) -> None:
    for key in frames.runs["key"]:
        spans = frames.spans[frames.spans["key"] == key]
        of_step = spans.groupby("step")["duration_s"].sum()
        shown = yoon2022_fig1.iteration(frames, key)["took_ms"].sum() / 1e3
        step = (of_step - shown).abs().idxmin()
        warm_steps = warm(frames, key).steps.groupby("step")["step_s"].max()
        nearest = (warm_steps - np.median(step_seconds(frames, key))).abs()
        assert nearest[step] == nearest.min()
