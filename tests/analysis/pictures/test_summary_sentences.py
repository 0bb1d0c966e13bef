"""What runs show, in plain sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.pictures import summary
from analysis.pictures.summary import Theirs
from analysis.records.frames import Frames, empty
from analysis.records.parquet import newest_frames
from analysis.records.store import Store
from tests.analysis import synthetic

THEIRS = {"topk": Theirs(4.67, 77.0, 1.47)}


def frames_of(store: Store) -> Frames:
    return newest_frames(store, store.runs(), store.root.parent / "kept")[0]


def test_of_turns_it_tells_the_ratio_and_the_share_of_selection_beside_the_papers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.alternated(store, ["dense", "topk"], blocks=4)
    (line,) = summary.in_words(frames_of(store), THEIRS)
    assert line.startswith("an iteration with Top-k takes 1.2")
    assert "of the time of dense's (paper: 4.67)" in line
    assert "selection is 28 % of it (paper: 77 %)" in line
    assert line.endswith("(4 blocks)")
    sure = summary.precision(frames_of(store))
    assert sure.startswith("Top-k takes 1.2")
    assert "of dense's time, give or take" in sure


def test_of_trainings_it_tells_where_they_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        for method in ("dense", "topk"):
            synthetic.learned(store, synthetic.learning_config(method, seed))
    (line,) = summary.in_words(frames_of(store), THEIRS)
    assert line.startswith("Top-k ends 1")
    assert "points of top-1 below dense (paper: 1.47 below) (3 runs)" in line
    assert summary.precision(frames_of(store)) == ""


def test_a_link_is_told_of_times_and_not_of_where_trainings_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method in ("dense", "topk"):
        trained = synthetic.learning_config(method)
        trained["cluster"] = trained["cluster"] | {"link": {"name": "simulated"}}
        synthetic.learned(store, trained)
    synthetic.alternated(store, ["dense", "topk"], blocks=4)
    told = summary.in_words(frames_of(store), THEIRS)
    of_time, of_end = sorted(told, key=lambda line: "points of top-1" in line)
    link = synthetic.config("dense")["cluster"]["link"]["name"]
    assert f"{link}: an iteration with Top-k takes" in of_time
    assert "Top-k ends" in of_end
    assert "simulated" not in of_end


def test_trainings_that_differ_in_more_than_their_seed_are_not_taken_together(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        synthetic.learned(store, synthetic.learning_config("dense", seed))
        for momentum in (0.0, 0.5):
            config = synthetic.learning_config("topk", seed)
            config["method"]["momentum"] = momentum
            synthetic.learned(store, config)
    assert summary.in_words(frames_of(store), THEIRS) == []


def test_trainings_at_two_densities_are_told_apart_and_not_beside_a_paper_s_of_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        synthetic.learned(store, synthetic.learning_config("dense", seed))
        for density in (0.001, 0.01):
            config = synthetic.learning_config("topk", seed)
            config["method"]["density"] = density
            synthetic.learned(store, config)
    told = summary.in_words(frames_of(store), THEIRS)
    assert [line.partition(" ends ")[0] for line in told] == [
        "Top-k at density 0.001",
        "Top-k at density 0.01",
    ]
    assert all(line.endswith("points of top-1 below dense (3 runs)") for line in told)


@pytest.mark.parametrize("theirs", [{}, THEIRS])
def test_of_nothing_it_tells_nothing(theirs: dict[str, Theirs]) -> None:
    assert summary.in_words(empty(), theirs) == []
    assert summary.precision(empty()) == ""
