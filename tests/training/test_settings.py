"""A setting is a field: its type, default and meaning there, and what it means for records that are older."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from analysis.records.configs import run_key
from analysis.records.parquet import read_parquet
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.run import Run
from experiments.training.settings import TrainSettings, iterate_setting_types, setting, setting_meaning
from tests.conftest import ROOT


@dataclass(frozen=True)
class Later(TrainSettings):
    """As `TrainSettings` would be with one setting more."""

    shuffle: Literal["epoch", "never"] = setting("epoch", "when the order is drawn anew", since="2026-11-23")


def test_what_is_added_leaves_older_keys_alone_until_it_is_set() -> None:
    today = compose.resolve([])
    unset = replace(today, train=Later(**today.train.as_dict()))
    given = unset.with_setting("train.shuffle", "never")
    assert unset.as_dict() == today.as_dict()
    assert given.as_dict()["train"]["shuffle"] == "never"
    assert run_key(given.as_dict()) != run_key(unset.as_dict()) == run_key(today.as_dict())
    assert Later.from_dict(unset.train.as_dict()) == unset.train
    assert (
        setting_meaning(dict(iterate_setting_types(Later, {}))["shuffle"]) == "when the order is drawn anew"
    )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["cluster=generic_slurm", "container=gpu", "cluster.sbatch=[--hold]"],
        ["inside=nvlink", "method=topk", "method.density_warmup=[0.1]"],
        ["cluster=local", "variants={a:'method=dense',b:'method=topk select=fused'}"],
    ],
)
def test_what_is_recorded_is_read_as_it_was(words: list[str]) -> None:
    config = compose.resolve(words)
    assert Config.from_record(config.as_dict()) == config
    for dotted in compose.settable_type_by_key(config):
        if dotted != "variants":
            assert config.with_setting(dotted, config.get_setting(dotted)) == config


def test_shipped_records_are_configs_with_the_keys_that_they_have() -> None:
    texts = set(read_parquet(ROOT / "results" / "shipped").runs["config_json"])
    assert len(texts) > 100
    for stored in map(json.loads, texts):
        assert run_key(Config.from_record(stored).as_dict()) == run_key(stored)


def test_a_run_is_made_of_settings_as_of_words_and_says_its_words() -> None:
    made = Run(
        {"task": "cnn_digits", "cluster": "local", "data.root": "a b", "task.lr_milestones": [1, 2]},
        {"dense": {"method": "dense"}, "sparse": {"method": "topk", "method.density_warmup": []}},
    )
    assert Run.coerce(made.to_words()) == made
    assert compose.resolve(made.to_words()) == compose.resolve(made)
    more = made | {"seed": 3} | ["train.validate=never"]
    assert compose.resolve(more).seed == 3
    assert more.without("seed", "train.") == made
