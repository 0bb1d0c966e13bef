"""Plain sentences that say what runs show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from analysis.pictures import summary
from analysis.pictures.summary import PublishedResult
from analysis.records.frames import empty_frames
from analysis.records.store import Store
from tests.analysis import synthetic

THEIRS = {"topk": PublishedResult(4.67, 77.0, 1.47, "8 A100")}


def trained(store: Store, method: str, **changes: Any) -> None:
    """Add trainings with three seeds."""
    for seed in range(3):
        config = synthetic.learning_config(method, seed)
        synthetic.learned(store, config | {"method": config["method"] | changes})


def test_of_turns_it_tells_the_ratio_and_the_share_of_selection_beside_the_papers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.alternated(store, ["dense", "topk"], blocks=4)
    frames = synthetic.frames_of(store)
    (line,) = summary.summarize_runs_in_sentences(frames, THEIRS)
    assert re.fullmatch(
        r"An iteration with Top-k takes 1\.2.* times as long as a dense one; "
        r"28 % of it is choosing the elements \(4 blocks\)\. Published: 4\.67 times and 77 % on 8 A100\.",
        line,
    )


def test_the_first_sentence_is_on_the_method_that_the_paper_is_about(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.alternated(store, ["dense", "randomk", "topk"], blocks=4)
    told = summary.summarize_runs_in_sentences(synthetic.frames_of(store), THEIRS)
    assert [line.partition(" takes ")[0] for line in told] == [
        "An iteration with Top-k",
        "An iteration with Random-k",
    ]


def test_of_trainings_it_tells_where_they_end_without_the_link_that_times_have(tmp_path: Path) -> None:
    store = Store(tmp_path)
    trained(store, "dense")
    trained(store, "topk")
    frames = synthetic.frames_of(store)
    (line,) = summary.summarize_runs_in_sentences(frames, THEIRS)
    assert re.fullmatch(
        r"Top-k ends 1.* points of top-1 below dense \(3 runs\)\. Published: 1\.47 points below on 8 A100\.",
        line,
    )


def test_trainings_at_two_densities_are_told_apart_and_not_beside_a_paper_s_of_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    trained(store, "dense")
    for density in (0.001, 0.01):
        trained(store, "topk", density=density)
    told = summary.summarize_runs_in_sentences(synthetic.frames_of(store), THEIRS)
    assert [line.partition(" ends ")[0] for line in told] == [
        "Top-k at density 0.001",
        "Top-k at density 0.01",
    ]
    assert all(line.endswith("points of top-1 below dense (3 runs).") for line in told)


def test_of_nothing_it_tells_nothing() -> None:
    for theirs in ({}, THEIRS):
        assert summary.summarize_runs_in_sentences(empty_frames(), theirs) == []
