"""The rules in numbers and in words are the same rules."""

from __future__ import annotations

import math

import pytest

from experiments.config import choices
from experiments.figures.benchmark.rules import OWN, floors_by_task, rules


def test_tiers_have_links_and_workers_that_there_are() -> None:
    for tier in rules().tiers.values():
        assert {*tier.links} <= {OWN, *choices.option_names("link")}
    with pytest.raises(ValueError, match="did you mean 'laptop'"):
        rules().parse_tier("labtop")


def test_floors_are_of_tasks_that_there_are() -> None:
    assert {*floors_by_task("laptop")} == {*rules().parse_tier("laptop").tasks}
    assert floors_by_task("gpu") == {"cnn-cifar10": pytest.approx(math.log(10), abs=1e-4)}
