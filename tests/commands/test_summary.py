"""The summary that a run prints when it has ended."""

from __future__ import annotations

from pathlib import Path

from analysis.records.store import Store
from experiments.commands.why import describe_attempt
from experiments.launch.status import RunStatus
from tests.analysis import synthetic


def test_the_median_step_leaves_out_the_warm_up_and_says_where_it_is_simulated(tmp_path: Path) -> None:
    for where, word in {"virtual": "*simulated*, ", "local": ""}.items():
        config = synthetic.config("topk")
        config["cluster"]["where"] = where
        said = describe_attempt(synthetic.timed(Store(tmp_path), config), RunStatus("done"))
        assert f" ms on rank 0 ({word}serialised, n = 16, 4 steps of warm-up left out)" in said


def test_of_turns_each_variant_has_its_own_median_and_it_says_how_they_ended(tmp_path: Path) -> None:
    attempt = synthetic.alternated(Store(tmp_path), ["dense", "topk"], blocks=4, block_steps=3)
    said = describe_attempt(attempt, RunStatus("done"))
    assert said.count(": median step ") == said.count("on rank 0 (serialised, n = 8)") == 2
    assert "4 turns each, ended by the half-width; half-width of the ratios 1 %" in said
