"""Variants that take turns in one run: composed like any run, and told apart by what they may differ in."""

from __future__ import annotations

from analysis.records.configs import configs_by_variant, measured_config, run_id, run_key
from experiments.config import compose
from experiments.config.config import Config
from tests.config.refusals import check_refusals

BASE = ["task=cnn_digits", "cluster=local", "train.validate=never"]
DENSE, TOPK = "dense:'method=dense'", "topk:'method=topk method.density_warmup=[]'"


def variants(*pairs: str) -> str:
    return f"variants={{{','.join(pairs)}}}"


def test_each_variant_is_the_config_of_its_own_words() -> None:
    config = compose.resolve([*BASE, variants(DENSE, TOPK)])
    found = configs_by_variant(config)
    assert list(found) == ["dense", "topk"]
    assert config["method"]["name"] == "dense", "the first is what the others are compared with"
    for name, words in (("dense", ["method=dense"]), ("topk", ["method=topk", "method.density_warmup=[]"])):
        alone = compose.resolve([*BASE, *words])
        assert not {"variants", "alternate"} & measured_config(alone).keys()
        assert found[name] == {key: value for key, value in alone.items() if key != "variants"}
    other = compose.resolve([*BASE, variants(TOPK, DENSE)])
    assert run_id(config).startswith("alternating-cnn_digits-2w-local-")
    assert run_key(config) != run_key(other)  # the order counts
    assert "alternate" in measured_config(config)


def test_what_records_leave_out_of_a_variant_is_not_the_first_ones() -> None:
    rings = "rings:'method=dense collectives=backend'"
    config = compose.resolve([*BASE, variants(rings, DENSE)])
    for recorded in (config.as_dict(), config):
        found = [each.get("collectives") for each in configs_by_variant(recorded).values()]
        assert found == ["backend", None]
    again = Config.from_record(config.as_dict())
    assert [each.config.collectives for each in again.variants] == ["backend", "auto"]


def test_an_optimiser_is_recorded_of_a_variant_that_has_another_than_the_first() -> None:
    sgd = "demo:'method=demo method.density=0.1 task.optimiser=sgd task.weight_decay=0 task.lr=0.001'"
    config = compose.resolve(["task=gpt_ptbchars", "train.validate=never", variants(DENSE, TOPK, sgd)])
    noted = {part["name"]: {*part.get("task", {})} for part in config.as_dict()["variants"]}
    few = {"momentum"}
    assert noted == {"dense": few, "topk": few, "demo": {*few, "lr", "optimiser", "weight_decay"}}
    again = Config.from_record(config.as_dict())
    optimisers = [variant.config.task.get_setting("optimiser") for variant in again.variants]
    assert optimisers == ["adamw", "adamw", "sgd"]
    assert run_key(again) == run_key(config)


def test_what_does_not_fit_is_refused() -> None:
    late = variants(DENSE, "late:'method=topk overlap=true'")
    production = variants(DENSE, "p:'method=dense timing.mode=production'")
    large = variants(DENSE, "large:'method=dense task.batch_size=64'")
    answers = {
        variants(DENSE): "two or more",
        large: "batch_size ... may differ in method",
        variants(DENSE, "odd:'method=topq'"): "variant odd: no method 'topq'",
        variants(DENSE, "odd:'method=topk \"'"): "variants.odd= ... can't be read",
        (variants(DENSE, TOPK), "train.steps=5"): "train.steps: how long",
        "alternate.blocks=5": "there are no variants",
        "variants=dense": "names with words",
        ("cluster=virtual", late): "variant late: overlap",
        ("cluster=virtual", "device=cuda", production): "one kind of clock",
    }
    check_refusals(answers, *BASE)
