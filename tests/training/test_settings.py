"""A setting is a field: its type, default and meaning there, and what it means for records that are older."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest

from analysis.records.columns import IMPLIED_SETTINGS
from analysis.records.configs import run_key
from analysis.records.parquet import read_parquet
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.machines import EmulatedCluster
from experiments.config.run import Run
from experiments.training.settings import (
    Settings,
    TrainSettings,
    iterate_setting_types,
    nested_settings_class,
    setting,
    setting_meaning,
    type_by_field,
)
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


def added_settings(kind: type[Settings], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings with a `since`, each with its default."""
    for field in fields(kind):  # type: ignore[arg-type]  # each kind of Settings is a dataclass
        inner = nested_settings_class(type_by_field(kind)[field.name])
        if field.metadata.get("since"):
            yield prefix + field.name, field.default
        elif inner:
            yield from added_settings(inner, f"{prefix}{field.name}.")


def test_what_reads_records_knows_the_default_of_each_setting_that_older_records_lack() -> None:
    added = dict(added_settings(Config, "")) | dict(added_settings(EmulatedCluster, "cluster."))
    del added["cluster.windows"]  # which runs on other clusters have not at all
    assert len(added) > 5
    for name, default in added.items():
        text = f"{name} needs a row in analysis/records/columns.yaml with implied_value: {default}"
        assert IMPLIED_SETTINGS.get(name, "missing") == default, text


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
