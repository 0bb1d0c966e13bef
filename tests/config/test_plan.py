"""Which runs a command means, and what they need of a machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments import figures
from experiments.config import compose, data_root, plan
from experiments.config.config import Config
from experiments.config.plan import PlannedRun, plan_runs, profile_of
from experiments.figures.runs import configs_of, more_configs_of


def planned(*words: str) -> PlannedRun:
    return PlannedRun(compose.resolve(words), None)


@pytest.mark.parametrize(
    "profile", ["laptop", *(pytest.param(name, marks=pytest.mark.extended) for name in ("paper", "smoke"))]
)
def test_every_figure_composes_its_runs(profile: str) -> None:
    for item in figures.shipped():
        assert bool(configs_of(item, profile)) == figures.has_runs(item)


def test_virtual_ranks_share_one_process() -> None:
    virtual = planned("cluster=virtual", "workers=8", "threads=2")
    local = planned("cluster=local", "workers=8", "threads=2")
    assert (virtual.config.num_processes, virtual.cores) == (1, 2)
    assert (local.config.num_processes, local.cores) == (8, 16)


def test_a_run_is_for_its_times_unless_it_validates_every_epoch() -> None:
    assert planned("train.validate=never").is_timing
    assert not planned("train.validate=epoch").is_timing
    assert planned("train.validate=epoch", "cluster=netns").is_timing
    assert planned("train.validate=epoch", "timing.mode=as_published").is_timing


def test_the_profile_is_the_one_asked_for_or_what_the_machine_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_of(["profile=smoke"]) == "smoke"
    for there, expected in ((True, "paper"), (False, "laptop")):
        monkeypatch.setattr(plan, "has_gpu", lambda there=there: there)
        assert profile_of([]) == expected
        assert profile_of(["cluster=neuron_a100"]) == "paper"
    with pytest.raises(ValueError, match="no profile 'huge'; there are: laptop, paper, smoke"):
        profile_of(["profile=huge"])


def test_a_gpu_that_is_not_there_is_refused_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "has_gpu", lambda: False)
    words = ("device=cuda", "task=cnn_digits")
    with pytest.raises(ValueError, match=r"^device=cuda needs an NVIDIA GPU, .* take device=cpu"):
        plan_runs([compose.resolve(words)], print)
    with pytest.raises(ValueError, match=r"^profile=paper \(device=cuda\) needs .* take profile=laptop"):
        plan_runs([compose.resolve(["profile=paper", "task=cnn_digits"])], print)
    assert len(plan_runs([compose.resolve([*words, "cluster=neuron_a100"])], print)) == 1


def test_what_all_runs_have_in_common_is_said_once_and_when_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = list[str]()

    def find(config: Config, say: Callable[[str], None]) -> tuple[Config, None]:
        say("downloading")
        assert said == ["downloading"]
        return config.having("task.lr", 0.5), None

    monkeypatch.setattr(data_root, "find", find)
    runs = plan_runs([compose.resolve([f"seed={seed}"]) for seed in range(3)], said.append)
    assert said == ["downloading"]
    assert [run.config["task"]["lr"] for run in runs] == [0.5] * 3


def test_how_long_variants_take_turns_is_no_word_for_the_trainings_beside_them() -> None:
    words = ["alternate.limit_min=1", "threads=2"]
    assert {config["alternate"]["limit_min"] for config in configs_of("slow-links", "laptop", words)} == {1}
    more = more_configs_of("stable-throughput", "laptop", words)
    assert {config["threads"] for config in more} == {2}
    for config in more:
        assert config["alternate"]["limit_min"] == (1 if config.variants else 15)
    with pytest.raises(ValueError, match=r"alternate.limit_min is of runs whose variants take turns"):
        more_configs_of("fig2", "laptop", words)


def test_what_words_make_alike_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_root, "find", lambda config, say: (config, None))
    configs = more_configs_of("local-loss", "laptop", ["seed=3"])
    assert (len(configs), len(plan_runs(configs, print))) == (3 * 11, 11)
