"""Measured runs can be asked for again, in words."""

from __future__ import annotations

import pytest

from analysis.records.configs import configs_by_variant, measured_config, run_key
from experiments.config import compose


def test_the_words_of_a_run_mean_that_run_in_every_profile() -> None:
    for words in (
        "method=topk task=cnn_digits profile=smoke",
        "method=dgc task=cnn_cifar10 profile=laptop method.density=0.01 workers=8 cluster=virtual",
        "method=topk_layerwise profile=smoke method.density_warmup=[0.1,0.01] seed=3",
        "method=randomk_feedback profile=smoke timing.mode=production method.scope=8",
    ):
        config = measured_config(compose.resolve(words.split()))
        again = compose.rebuild_recorded_run({"": config}, run_key(config))
        for profile in ("smoke", "laptop", "paper"):
            assert run_key(compose.resolve([*again.to_words(), f"profile={profile}"])) == run_key(config)


def test_an_older_record_is_asked_for_with_what_it_meant_and_what_no_words_mean_is_refused() -> None:
    config = measured_config(compose.resolve(["method=topk", "profile=smoke", "select=torch"]))
    assert "select" not in config
    assert compose.rebuild_recorded_run({"": config}, run_key(config)).settings["select"] == "torch"
    with pytest.raises(ValueError, match=r"no words mean|there are"):
        compose.rebuild_recorded_run(
            {"": {**config, "method": {**config["method"], "gone": 1}}}, run_key(config)
        )


def test_what_takes_turns_is_asked_for_with_its_variants() -> None:
    dense, sparse = "method=dense timing.mode=production", "method=topk method.density=0.01"
    asked = [f"variants={{a:'{dense}',b:'{sparse}'}}", "alternate.blocks=4", "profile=smoke", "workers=3"]
    config = measured_config(compose.resolve(asked).as_dict())
    found = compose.rebuild_recorded_run(configs_by_variant(config), run_key(config))
    assert run_key(compose.resolve(found).as_dict()) == run_key(config)
    assert found.settings["workers"] == 3
    assert found.variants["b"]["method.density"] == 0.01
