"""The rules in numbers and in words are the same rules."""

from __future__ import annotations

import math

import pytest

from analysis.benchmark.cells import BASELINE, targets
from analysis.benchmark.files import read
from experiments.config import choices
from experiments.config.folders import ROOT, Folders
from experiments.figures.benchmark.rules import OWN, digest, rules

WORDS = (ROOT / "docs" / "benchmark.md").read_text()


def test_the_budget_is_what_trainings_have() -> None:
    known = rules()
    trained = known.trained
    assert trained["train.epoch_steps"] == known.epoch_steps == known.steps / trained["train.epochs"]
    assert len(known.rates) == known.trials.number == len(set(known.rates))
    assert known.rates[0] == 1


def test_the_page_of_rules_has_the_same_numbers_and_fits_two_screens() -> None:
    known = rules()
    assert f"{known.steps // known.epoch_steps} times" in WORDS
    assert f"{known.share:.0%}".replace("%", " %") in WORDS
    assert (len(known.seeds), len(known.launches), known.trials.number) == (5, 5, 8)
    assert all(words in WORDS for words in ("five seeds", "five launches", "Eight trials"))
    assert WORDS.partition("## Entering")[0].count("\n") < 60


def test_tiers_have_links_and_workers_that_there_are() -> None:
    for tier in rules().tiers.values():
        assert {*tier.links} <= {OWN, *choices.options("link")}
    with pytest.raises(ValueError, match="did you mean 'laptop'"):
        rules().tier("labtop")


def test_targets_are_the_shipped_baseline_s_rounded_up() -> None:
    base = read(Folders.shipped / "entries" / f"{BASELINE}-laptop-v1.entry")
    assert base.statement.rules == digest("laptop")
    found = targets(base, rules().share)
    for name, task in rules().tier("laptop").tasks.items():
        up = {workers: math.ceil(1e4 * loss) / 1e4 for workers, loss in found[name].items()}
        assert task.targets == pytest.approx(up)
