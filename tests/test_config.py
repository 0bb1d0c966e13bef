"""Override words in, one plain dict out; whoever misspells is told what there is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from analysis.records import run_key
from experiments import config as configs
from experiments import figures
from experiments.reproduce import plan
from sparsify.methods import REGISTRY as METHODS
from tests.conftest import ROOT


@pytest.mark.parametrize("group", configs.GROUPS)
def test_every_option_composes(group: str) -> None:
    for option in configs.options(group):
        words = [f"{group}={option}"] + ["cluster=local"] * (
            option == "loopback"
        )  # virtual ranks can't have it
        config = configs.resolve(words)
        json.dumps(config)  # a plain dict
        if group in ("method", "task"):
            assert config[group]["name"] in configs.options(group)


@pytest.mark.parametrize("profile", configs.options("profile"))
def test_every_figure_composes_its_runs(profile: str) -> None:
    for item in figures.items():
        assert plan(item, profile)


def test_a_signature_is_a_schema() -> None:
    for name in METHODS.names():
        expected = {key: list(v) if isinstance(v, tuple) else v for key, v in METHODS.defaults(name).items()}
        assert configs.resolve([f"method={name}"])["method"] == {"name": name, **expected}


def test_presets_build_on_registered_methods() -> None:
    assert configs.resolve(["method=randomk_feedback"])["method"]["feedback"] == "gradient"
    assert configs.resolve(["method=randomk_feedback"])["method"]["name"] == "randomk"
    assert configs.resolve(["method=topk_layerwise"])["method"]["scope"] == "layer"


def test_the_recipe_sets_densities_where_there_are_any_and_the_user_wins() -> None:
    assert configs.resolve(["recipe=yoon2022", "method=topk"])["method"]["density_warmup"] == [
        0.015625,
        0.004,
    ]
    assert configs.resolve(["recipe=yoon2022", "method=dense"])["method"] == {
        "name": "dense",
        "scope": "global",
    }
    given = configs.resolve(
        ["recipe=yoon2022", "method=topk", "method.density_warmup=[]", "method.density=0.5"]
    )
    assert given["method"]["density_warmup"] == []
    assert given["method"]["density"] == 0.5


def test_who_searches_is_part_of_what_is_measured_and_the_recipe_takes_the_published_operators() -> None:
    plain, fused, published = (
        configs.resolve(["method=topk", *words])
        for words in ([], ["select=fused"], ["recipe=yoon2022", "task=cnn_cifar10", "select=torch"])
    )
    assert plain["select"] == "auto"
    assert run_key(plain) != run_key(fused)
    assert configs.resolve(["recipe=yoon2022"])["select"] == "torch"
    # Records that are older than the choice were made with torch's operators, and keep their keys.
    older = {name: value for name, value in published.items() if name not in ("select", "overlap")}
    assert run_key(older) == run_key(published)


def test_a_method_with_momentum_inside_takes_the_optimisers() -> None:
    assert configs.resolve(["method=topk"])["task"]["momentum"] == 0.9
    assert configs.resolve(["method=dgc"])["task"]["momentum"] == 0
    with pytest.raises(ValueError, match=r"method=dgc applies momentum itself"):
        configs.resolve(["method=dgc", "task.momentum=0.9"])


def test_links_belong_to_clusters() -> None:
    assert configs.resolve(["cluster=local"])["cluster"]["link"]["name"] == "loopback"
    link = configs.resolve(["cluster=virtual", "link=ethernet", "cluster.link.alpha_s=1e-3"])["cluster"][
        "link"
    ]
    assert link == {"name": "ethernet", "alpha_s": 1e-3, "beta_s_per_byte": 8e-10}


@pytest.mark.parametrize(
    ("word", "answers"),
    [
        ("method=topq", ["no method 'topq'", "did you mean 'topk'", "dense, "]),
        ("task=imagenet", ["no task 'imagenet'", "vgg16_cifar10"]),
        ("cluster=mars", ["no cluster 'mars'", "local, neuron_a100"]),
        ("profile=huge", ["no profile 'huge'", "laptop, paper, smoke"]),
        ("recipe=shi", ["no recipe 'shi'", "yoon2022"]),
        ("link=wifi", ["no link 'wifi'", "ethernet"]),
        ("method.densty=0.1", ["no key 'method.densty'", "did you mean 'method.density'", "method.scope"]),
        ("task.rate=1", ["no key 'task.rate'", "task.lr"]),
        ("train.epoch=2", ["no key 'train.epoch'", "did you mean 'train.epochs'"]),
        ("wrokers=2", ["no key 'wrokers'", "did you mean 'workers'"]),
        ("method.name=dense", ["'method.name'", "choice of method="]),
        ("workers", ["not of the form key=value"]),
        ("method.density=[1", ["method.density"]),
        ("timing.mode=fast", ["no timing.mode 'fast'", "serialised, production, as_published"]),
        ("device=tpu", ["no device 'tpu'", "cpu, cuda"]),
        ("method.density=0", ["density=0", "(0, 1]"]),
        ("method.density=-0.1", ["density=-0.1", "(0, 1]"]),
        ("method.density=1.01", ["density=1.01", "(0, 1]"]),
        ("method.density=nan", ["density=nan", "(0, 1]"]),
        ("method.density=much", ["density=much", "(0, 1]"]),
        ("method.density_warmup=[0.1,0]", ["density=0", "(0, 1]"]),
        ("workers=0", ["workers=0", "1 or more"]),
        ("workers=1.5", ["workers=1.5", "whole number"]),
        ("train.steps=0", ["train.steps=0", "1 or more"]),
        ("task.batch_size=0", ["task.batch_size=0", "1 or more"]),
        ("task.lr=inf", ["task.lr=inf", "finite"]),
        ("select=quick", ["no select 'quick'", "auto, torch, fused"]),
        ("overlap=often", ["no overlap 'often'", "False, True"]),
        ("overlap=true", ["overlap=true needs processes", "timing.mode=production"]),
        ("link=loopback", ["alpha and beta", "link=nvlink"]),
    ],
)
def test_bad_words_are_answered_with_what_there_is(word: str, answers: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        configs.resolve(["method=topk", word])
    for answer in answers:
        assert answer in str(refusal.value)


def test_help_imports_neither_torch_nor_pandas() -> None:
    """That is what keeps it under two seconds."""
    script = (
        "import sys; from experiments.__main__ import main; code = main(['run', '--help']);"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "method",
        "topk_layerwise",
        "method.density=0.001",
        "timing.mode=serialised",
        "feedback=none",
    ):
        assert word in done.stdout
