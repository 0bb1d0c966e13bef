"""Entries that take part, and the runs that each of them is made of."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from analysis.benchmark.cells import BASELINE
from analysis.records.store import Store
from experiments.commands.enter import describe_cell
from experiments.config.folders import ResultFolders
from experiments.config.run import Run
from experiments.figures.benchmark import entries
from experiments.figures.benchmark.entering import EntryInProgress, UnfairEntryError, resolve_tier_run
from experiments.figures.benchmark.entries import (
    BestSettings,
    TrainingPlace,
    find_or_make_entrant,
    launch_places,
    launch_run,
    plan_trials,
    shipped_entrants_by_name,
    training_runs,
)
from experiments.figures.benchmark.rules import longest_affordable_length, rules
from experiments.tasks import REGISTRY as TASKS
from sparsify.methods import REGISTRY as METHODS
from tests.analysis.benchmark.cells import cell
from tests.config.refusals import check_refusals, read_answers

LAPTOP = rules().parse_tier("laptop")
PLACE = TrainingPlace("gpt-ptb", 4, rules().baseline_length)


def test_settings_of_a_task_that_there_is_not_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "METHODS", dataclasses.replace(METHODS, folder=tmp_path))
    text = (METHODS.folder / "topk.py").read_text()
    (tmp_path / "topk.py").write_text(f"{text}\n\n{entries.ON} = {{'gpt-pbt': {{'task.lr': 0.1}}}}\n")
    with pytest.raises(ValueError, match="did you mean 'gpt-ptb'"):
        find_or_make_entrant("mine", {"method": "topk"})


def test_every_task_has_eight_trials_with_a_rate_each_and_values_of_the_space() -> None:
    for own in shipped_entrants_by_name().values():
        for task in LAPTOP.tasks:
            found = [trial for trial in plan_trials(own, LAPTOP) if trial.task == task]
            assert sorted(trial.lr_factor for trial in found) == sorted(rules().rates)
            assert found[0].lr_factor == 1
            assert found[0].searched == {f"method.{key}": tried[0] for key, tried in own.search.items()}
            for key, tried in own.search.items():
                counts = Counter(trial.searched[f"method.{key}"] for trial in found)
                assert set(counts) == set(tried), "each value has its turns"


def test_trials_are_drawn_by_version_name_and_task_alone() -> None:
    def drawn(name: str) -> list[object]:
        own = msgspec.structs.replace(shipped_entrants_by_name()["diloco"], name=name)
        return [trial.searched for trial in plan_trials(own, LAPTOP)]

    assert drawn("diloco") == drawn("diloco") != drawn("another")


@pytest.mark.parametrize("name", [name for name in shipped_entrants_by_name() if name != BASELINE])
def test_every_run_of_an_entry_is_one_that_can_be_made(name: str) -> None:
    own, base = shipped_entrants_by_name()[name], shipped_entrants_by_name()[BASELINE]
    last = {f"method.{key}": tried[-1] for key, tried in own.search.items()}
    chosen = {task: BestSettings(known.lr, last) for task, known in LAPTOP.tasks.items()}
    for config in (resolve_tier_run(trial.run, "laptop") for trial in plan_trials(own, LAPTOP)[::8]):
        assert (config.workers, config.seed) == (rules().trials.workers, rules().trials.seed)
        assert config.train.held_out
    trained = {}
    for task in LAPTOP.tasks:
        place = TrainingPlace(task, 4, 1200)
        runs = training_runs(own, LAPTOP, place, chosen[task])
        config = resolve_tier_run(runs[0], "laptop")
        assert not config.train.held_out
        assert config.train.epochs * (config.train.epoch_steps or 0) == 1200
        assert config.train.lr_decay_epochs * (config.train.epoch_steps or 0) == 240, "the last fifth"
        assert config.train.epochs // config.train.validate_every == rules().validations
        assert len({run.settings["seed"] for run in runs}) == 5
        trained[config.task.name] = config.task.arguments
    plain = {task: BestSettings(1.0, {}) for task in LAPTOP.tasks}
    for launch_place in launch_places(LAPTOP)[::5]:
        run = launch_run([base, own], LAPTOP, launch_place, 0, {BASELINE: plain, name: chosen})
        config = resolve_tier_run(run, "laptop")
        assert config.variants[0].name == BASELINE
        for each in config.variants:
            every = each.config.method.arguments.get("every", 1)
            assert config.alternate.block_steps % every == 0, "whole rounds"
            METHODS.build(each.config.method.name, each.config.method.arguments)
            TASKS.build(each.config.task.name, each.config.task.arguments)
        timed = config.variants[1].config.task.arguments
        training = trained[config.task.name]
        assert timed == {key: training[key] for key in timed}, "it is timed as it is trained"


REFUSED = read_answers("""
mine method=topk task.lr=1.0 -> task.lr is not for an entry to choose
mine method=topk workers=2 -> workers is not for an entry to choose
mine method=tpk -> did you mean 'topk'
mine -> no entry or method 'mine'
mine method=topk method.density=2.0 -> method.density=2.0 is out of range
mine method=topk method.densty=0.1 -> did you mean 'density'
mine method=diloco method.every=30 -> must be whole rounds
topk method.density=0.05 -> give yours another name
a/b method=topk -> can't be an entry's name
../x method=topk -> can't be an entry's name
-x method=topk -> can't be an entry's name
xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx method=topk -> can't be an entry's name
""")


def test_an_entry_of_ones_own_fixes_settings_of_its_method_and_nothing_else() -> None:
    own = find_or_make_entrant("mine", {"method": "topk", "method.density": 0.05})
    assert (own.method, own.settings["method.density"]) == ("topk", 0.05)
    check_refusals(REFUSED, act=lambda words: find_or_make_entrant(words[0], Run.coerce(words[1:]).settings))


def test_a_search_that_breaks_the_rules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "METHODS", dataclasses.replace(METHODS, folder=tmp_path))
    method = (METHODS.folder / "topk.py").read_text()
    for search, said in (
        ("{'density': [0.1, 2.0]}", "density=2.0 is out of range"),
        ("{'densty': [0.1]}", "did you mean 'density'"),
        ("{'density': 0.1}", "must have a list of values"),
        ("[1, 2]", "must be a dict of at most 3"),
        ("{'density': [0.1, 0.01]}", "its default is"),
        ("{'a': [1], 'b': [1], 'c': [1], 'd': [1]}", "must be a dict of at most 3"),
    ):
        (tmp_path / "topk.py").write_text(f"{method}\n\n{entries.SEARCH} = {search}\n")
        with pytest.raises(ValueError, match=said):
            find_or_make_entrant("mine", {"method": "topk"})


@pytest.mark.parametrize(("tier", "where"), [("gpu", "virtual"), ("cluster@generic_slurm", "slurm")])
def test_other_tiers_have_the_same_rules_and_runs_that_can_be_made(tier: str, where: str) -> None:
    known = rules().parse_tier(tier)
    plain = {task: BestSettings(1.0, {}) for task in known.tasks}
    base, own = shipped_entrants_by_name()[BASELINE], shipped_entrants_by_name()["topk"]
    for run in [plan_trials(own, known)[0].run, *training_runs(base, known, PLACE, plain[PLACE.task])[:1]]:
        config = resolve_tier_run(run, tier)
        assert (config.device, config.profile) == ("cuda", "paper")
        assert config.train.epochs * (config.train.epoch_steps or 0) == rules().baseline_length
    places = launch_places(known)
    assert len(places) == math.prod(map(len, (known.tasks, known.workers, known.links)))
    for place in places[::5]:
        run = launch_run([base, own], known, place, 0, {BASELINE: plain, "topk": plain})
        assert resolve_tier_run(run, tier).cluster.where == where


def test_the_longest_training_that_fits_into_the_baselines_time_and_a_third_counts() -> None:
    expected = {
        0.1: 300,
        0.5: 300,
        0.7: 300,
        0.8: 600,
        1.0: 600,
        1.4: 600,
        1.6: 1200,
        2.9: 1200,
        3.1: 2400,
        50.0: 2400,
    }
    assert {speed: longest_affordable_length(LAPTOP, speed) for speed in expected} == expected


def test_a_tier_of_clusters_needs_one_and_others_take_none() -> None:
    with pytest.raises(ValueError, match="name it, cluster=mine"):
        rules().parse_tier("cluster")
    with pytest.raises(ValueError, match="tier laptop is timed on one machine"):
        rules().parse_tier("laptop@mine")


def test_trainings_beyond_the_trials_are_refused(tmp_path: Path) -> None:
    entering = EntryInProgress(shipped_entrants_by_name()["topk"], "laptop", ResultFolders(tmp_path))
    trial = entering.trials[0].run.settings
    for changed in (
        {},  # one of its trials
        {"task.lr": 0.123, "seed": 5},  # not the tuning seed
        {"task.lr": 0.123, "method.density": 0.1},  # of another entry
        {"task.lr": 0.123},
    ):
        attempt = entering.folders.store.create_attempt(entering.resolve_run(Run({**trial, **changed})))
        is_refused = [*changed] == ["task.lr"]
        refusal = (
            pytest.raises(UnfairEntryError, match="beyond its 8 trials") if is_refused else nullcontext()
        )
        with mock.patch.object(Store, "list_newest_valid_attempts", return_value=[attempt]), refusal:
            entering.check_trials()


def test_a_line_on_a_cell_has_a_word_for_each_level() -> None:
    assert (
        describe_cell(cell()) == "topk on gpt-ptb, 4 workers, 100 Mbit/s and 50 ms one way: 50 % faster 1.9"
    )
