"""The rules in numbers and in words are the same rules."""

from __future__ import annotations

import math

import pytest

from analysis.benchmark.cells import BASELINE, target_loss_by_task_and_workers
from analysis.benchmark.files import read_entry
from experiments.config import choices
from experiments.config.folders import ResultFolders
from experiments.figures.benchmark.rules import OWN, rules, rules_digest


def test_tiers_have_links_and_workers_that_there_are() -> None:
    for tier in rules().tiers.values():
        assert {*tier.links} <= {OWN, *choices.option_names("link")}
    with pytest.raises(ValueError, match="did you mean 'laptop'"):
        rules().parse_tier("labtop")


def test_targets_are_the_shipped_baseline_s_rounded_up() -> None:
    base = read_entry(ResultFolders.shipped / "entries" / f"{BASELINE}-laptop-v1.entry")
    assert base.statement.rules == rules_digest("laptop")
    found = target_loss_by_task_and_workers(base, rules().share)
    for name, task in rules().parse_tier("laptop").tasks.items():
        up = {workers: math.ceil(1e4 * loss) / 1e4 for workers, loss in found[name].items()}
        assert task.targets == pytest.approx(up)
