"""Which runs a command means, and what they need of a machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments import figures
from experiments.config import compose, dataset_files, plan
from experiments.config.config import Config
from experiments.config.plan import (
    PlannedRun,
    plan_distinct_runs_and_ensure_data,
    requested_or_default_profile,
)
from experiments.figures.runs import additional_configs, required_configs


def planned(*words: str) -> PlannedRun:
    return PlannedRun(compose.resolve(words), None)


@pytest.mark.parametrize(
    "profile", ["laptop", *(pytest.param(name, marks=pytest.mark.extended) for name in ("paper", "smoke"))]
)
def test_every_figure_composes_its_runs(profile: str) -> None:
    for item in figures.repository_items():
        assert bool(required_configs(figures.load(item), profile)) == figures.load(item).needs_runs


def test_virtual_ranks_share_one_process() -> None:
    for where, processes in (("virtual", 1), ("local", 8)):
        found = planned(f"cluster={where}", "workers=8", "threads=2")
        assert (found.config.num_processes, found.num_cores) == (processes, 2 * processes)


def test_a_run_is_for_its_times_unless_it_validates_every_epoch() -> None:
    assert planned("train.validate=never").is_timing
    for words, is_timing in (([], False), (["cluster=netns"], True), (["timing.mode=as_published"], True)):
        assert planned("train.validate=epoch", *words).is_timing == is_timing


def test_the_profile_is_the_one_asked_for_or_what_the_machine_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested_or_default_profile(["profile=smoke"]) == "smoke"
    for there, expected in ((True, "paper"), (False, "laptop")):
        monkeypatch.setattr(plan, "has_gpu", lambda there=there: there)
        assert requested_or_default_profile([]) == expected
        assert requested_or_default_profile(["cluster=neuron_a100"]) == "paper"
    with pytest.raises(ValueError, match="no profile 'huge'; there are: laptop, paper, smoke"):
        requested_or_default_profile(["profile=huge"])


def test_a_gpu_that_is_not_there_is_refused_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "has_gpu", lambda: False)

    def plan_digits(*words: str) -> list[PlannedRun]:
        return plan_distinct_runs_and_ensure_data([compose.resolve(["task=cnn_digits", *words])], print)

    with pytest.raises(ValueError, match=r"^device=cuda needs an NVIDIA GPU, .* take device=cpu"):
        plan_digits("device=cuda")
    with pytest.raises(ValueError, match=r"^profile=paper \(device=cuda\) needs .* take profile=laptop"):
        plan_digits("profile=paper")
    assert len(plan_digits("device=cuda", "cluster=neuron_a100")) == 1


def test_what_all_runs_have_in_common_is_said_once_and_when_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = list[str]()

    def find(config: Config, say: Callable[[str], None]) -> tuple[Config, None]:
        say("downloading")
        assert {*said} == {"downloading"}
        return config.with_setting("task.lr", 0.5), None

    monkeypatch.setattr(dataset_files, "ensure_dataset", find)
    runs = plan_distinct_runs_and_ensure_data(
        [compose.resolve([f"seed={seed}"]) for seed in range(3)], said.append
    )
    assert [run.config["task"]["lr"] for run in runs] == [0.5] * 3
    alike = additional_configs(figures.load("local-loss"), "laptop", ["seed=3"])  # which words make one run
    assert (len(alike), len(plan_distinct_runs_and_ensure_data(alike, said.append))) == (3 * 11, 11)
    assert said == ["downloading"] * 2


def test_how_long_variants_take_turns_is_no_word_for_the_trainings_beside_them() -> None:
    words = ["alternate.limit_min=1", "threads=2"]
    assert {
        config["alternate"]["limit_min"]
        for config in required_configs(figures.load("slow-links"), "laptop", words)
    } == {1}
    more = additional_configs(figures.load("stable-throughput"), "laptop", words)
    assert {config["threads"] for config in more} == {2}
    for config in more:
        assert config["alternate"]["limit_min"] == (1 if config.variants else 15)
    with pytest.raises(ValueError, match=r"alternate.limit_min is of runs whose variants take turns"):
        additional_configs(figures.load("fig2"), "laptop", words)
