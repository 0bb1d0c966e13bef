"""What takes part, and which runs each entry is made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from analysis.records.store import Store
from experiments.commands.enter import sentence
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.run import Run
from experiments.figures.benchmark import entries
from experiments.figures.benchmark.entering import Entering, Unfair, resolved
from experiments.figures.benchmark.entries import (
    BASELINE,
    BestSettings,
    entry,
    launches,
    shipped,
    trajectories,
    trials,
    wholes,
)
from experiments.figures.benchmark.rules import rules
from experiments.tasks import REGISTRY as TASKS
from sparsify.methods import REGISTRY as METHODS
from tests.analysis.benchmark.cells import cell

LAPTOP = rules().tier("laptop")


@pytest.mark.parametrize("name", shipped())
def test_every_task_has_eight_trials_with_a_rate_each_and_values_of_the_space(name: str) -> None:
    own = shipped()[name]
    for task in LAPTOP.tasks:
        found = [trial for trial in trials(own, LAPTOP) if trial.task == task]
        assert sorted(trial.rate for trial in found) == sorted(rules().rates)
        assert found[0].rate == 1
        assert found[0].searched == {f"method.{key}": tried[0] for key, tried in own.search.items()}
        for key, tried in own.search.items():
            counts = Counter(trial.searched[f"method.{key}"] for trial in found)
            assert set(counts) == set(tried), "each value has its turns"


def test_trials_are_drawn_by_version_name_and_task_alone() -> None:
    own = shipped()["diloco"]
    assert trials(own, LAPTOP) == trials(own, LAPTOP)
    other = msgspec.structs.replace(own, name="another")
    assert [trial.searched for trial in trials(other, LAPTOP)] != [
        trial.searched for trial in trials(own, LAPTOP)
    ]


@pytest.mark.parametrize("name", shipped())
def test_every_run_of_an_entry_is_one_that_can_be_made(name: str) -> None:
    own, base = shipped()[name], shipped()[BASELINE]
    chosen = {
        task: BestSettings(
            LAPTOP.tasks[task].lr, {f"method.{k}": tried[-1] for k, tried in own.search.items()}
        )
        for task in LAPTOP.tasks
    }
    of_trials = [resolved(trial.run, "laptop") for trial in trials(own, LAPTOP)[::8]]
    assert {config.workers for config in of_trials} == {rules().trials.workers}
    assert all(config.train.held_out and config.seed == rules().trials.seed for config in of_trials)
    trained = [resolved(run, "laptop") for run in trajectories(own, LAPTOP, chosen)[:6]]
    assert not any(config.train.held_out for config in trained)
    assert {config.train.epochs * (config.train.epoch_steps or 0) for config in trained} == {rules().steps}
    plain = {task: BestSettings(1.0, {}) for task in LAPTOP.tasks}
    both = [base, own] if name != BASELINE else [base, shipped()["topk"]]
    of_both = {BASELINE: plain, name: chosen, "topk": plain} | ({} if name != "topk" else {name: chosen})
    for run in launches(both, LAPTOP, of_both)[:24:7]:
        config = resolved(run, "laptop")
        assert config.variants[0].name == BASELINE
        for each in config.variants:
            every = each.config.method.arguments.get("every", 1)
            assert config.alternate.block_steps % every == 0, "whole rounds"
            METHODS.build(each.config.method.name, each.config.method.arguments)
            TASKS.build(each.config.task.name, each.config.task.arguments)
        (training,) = [
            other for other in trained
            if (other.task.name, other.workers) == (config.task.name, config.workers)
        ]  # fmt: skip
        timed = Config.of(config.as_dict()).variants[1].config.task.arguments if name != BASELINE else {}
        different = {key for key, value in timed.items() if training.task.arguments[key] != value}
        assert not different, "it is timed as it is trained"


def test_an_entry_of_ones_own_fixes_settings_of_its_method_and_nothing_else() -> None:
    own = entry("mine", {"method": "topk", "method.density": 0.05})
    assert (own.method, own.settings["method.density"]) == ("topk", 0.05)
    for settings, said in (
        ({"method": "topk", "task.lr": 1.0}, "task.lr is not for an entry to choose"),
        ({"method": "topk", "workers": 2}, "workers is not for an entry to choose"),
        ({"method": "tpk"}, "did you mean 'topk'"),
        ({}, "no entry or method 'mine'"),
        ({"method": "topk", "method.density": 2.0}, "method.density=2.0 is out of range"),
        ({"method": "topk", "method.densty": 0.1}, "did you mean 'density'"),
        ({"method": "diloco", "method.every": 30}, "must be whole rounds"),
    ):
        with pytest.raises(ValueError, match=said):
            entry("mine", settings)
    for name in ("a/b", "../x", "-x", "x" * 41):
        with pytest.raises(ValueError, match="can't be an entry's name"):
            entry(name, {"method": "topk"})
    with pytest.raises(ValueError, match="give yours another name"):
        entry("topk", {"method.density": 0.05})


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("{'density': [0.1, 2.0]}", "density=2.0 is out of range"),
        ("{'densty': [0.1]}", "did you mean 'density'"),
        ("{'density': 0.1}", "must have a list of values"),
        ("[1, 2]", "must be a dict of at most 3"),
        ("{'a': [1], 'b': [1], 'c': [1], 'd': [1]}", "must be a dict of at most 3"),
    ],
)
def test_a_search_that_breaks_the_rules_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str, said: str
) -> None:
    (tmp_path / "topk.py").write_text(
        (METHODS.folder / "topk.py").read_text() + f"\n\n{entries.SEARCH} = {search}\n"
    )
    monkeypatch.setattr(entries, "METHODS", replace_folder(tmp_path))
    with pytest.raises(ValueError, match=said):
        entry("mine", {"method": "topk"})


def replace_folder(folder: Path) -> object:
    """The registry, which looks into another folder."""
    import dataclasses

    return dataclasses.replace(METHODS, folder=folder)


@pytest.mark.parametrize("tier", ["gpu", "cluster@generic_slurm"])
def test_other_tiers_have_the_same_rules_and_runs_that_can_be_made(tier: str) -> None:
    known = rules().tier(tier)
    plain = {task: BestSettings(1.0, {}) for task in known.tasks}
    base, own = shipped()[BASELINE], shipped()["topk"]
    for run in [trial.run for trial in trials(own, known)[::8]] + trajectories(base, known, plain)[:6]:
        config = resolved(run, tier)
        assert (config.device, config.profile) == ("cuda", "paper")
        assert config.train.epochs * (config.train.epoch_steps or 0) == rules().steps
    found = launches([base, own], known, {BASELINE: plain, "topk": plain})
    assert len(found) == len(rules().launches) * len(known.tasks) * len(known.workers) * len(known.links)
    for run in found[::9]:
        config = resolved(run, tier)
        assert config.cluster.where == ("virtual" if tier == "gpu" else "slurm")
    assert not wholes(base, known)


def test_a_tier_of_clusters_needs_one_and_others_take_none() -> None:
    with pytest.raises(ValueError, match="name it, cluster=mine"):
        rules().tier("cluster")
    with pytest.raises(ValueError, match="tier laptop is timed on one machine"):
        rules().tier("laptop@mine")


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ({}, False),  # one of its trials
        ({"task.lr": 0.123}, True),
        ({"task.lr": 0.123, "seed": 5}, False),  # not the tuning seed
        ({"task.lr": 0.123, "method.density": 0.1}, False),  # of another entry
    ],
)
def test_trainings_beyond_the_trials_are_refused(
    tmp_path: Path, changed: dict[str, object], is_refused: bool
) -> None:
    entering = Entering(shipped()["topk"], "laptop", Folders(tmp_path))
    run = entering.trials[0].run
    attempt = entering.folders.store.begin(entering.config(Run({**run.settings, **changed})))
    with mock.patch.object(Store, "all_valid", return_value=[attempt]):
        if is_refused:
            with pytest.raises(Unfair, match="beyond its 8 trials"):
                entering.check_trials()
        else:
            entering.check_trials()


def test_a_line_on_a_cell_that_misses_the_target_tells_no_gain() -> None:
    """Seeds that reach it may be quick: its time is infinite all the same."""
    assert "times as soon as dense" in sentence(cell())
    assert sentence(cell(word="misses the target")) == (
        "topk on gpt-ptb, 4 workers, internet_100m_50ms: misses the target"
    )
