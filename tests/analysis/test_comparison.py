"""A comparison's points are means over seeds and nothing else; what must not be mixed is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.comparison import Comparison
from analysis.records.frames import Frames, empty_frames, query_runs
from analysis.records.store import Store
from analysis.stats import IncomparableRunsError, final_difference, final_mean, step_time_ratio
from tests.analysis import synthetic
from tests.conftest import there

DENSITIES = (0.001, 0.01)
OVER = Comparison(x="method.density", y="val_top1", ref="dense")


def trained(store: Store, method: str, seed: int, density: float = 0.001, **changes: Any) -> str:
    """Add a training; return its key."""
    config = synthetic.learning_config(method, seed, epochs=3, **changes)
    if method != "dense":
        config["method"]["density"] = density
    return synthetic.learned(store, config).key


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    store = Store(tmp_path)
    for seed in range(3):
        trained(store, "dense", seed)
        for density in DENSITIES:
            trained(store, "topk", seed, density)
    return synthetic.frames_of(store)


def test_a_point_is_the_mean_over_seeds_and_shares_are_subtracted_seed_by_seed(frames: Frames) -> None:
    dense, *of_topk = OVER.points(frames)
    assert (dense.by, dense.x, dense.relative_to_ref) == ("dense", None, None)
    base = list(query_runs(frames, "method.name == 'dense'").runs["key"])
    for point, density in zip(of_topk, DENSITIES, strict=True):
        assert (point.by, point.x) == ("topk", density)
        keys = list(query_runs(frames, f"method.density == {density}").runs["key"])
        assert point.value == pytest.approx(final_mean(frames, keys, "val_top1"))
        assert point.relative_to_ref == pytest.approx(final_difference(frames, keys, base, "val_top1"))


def test_against_a_reference_times_are_divided_seed_by_seed(tmp_path: Path) -> None:
    methods = ("dense", "topk")
    configs = (synthetic.config(method, seed=seed) for method in methods for seed in range(3))
    frames = synthetic.frames_with(tmp_path, *configs)
    compared = Comparison("workers", "step_s", ref="dense")
    dense, topk = (list(query_runs(frames, f"method.name == '{method}'").runs["key"]) for method in methods)
    ratio = there(compared.points(frames)[-1].relative_to_ref)
    assert ratio[:4] == pytest.approx(there(step_time_ratio(frames, topk, dense))[:4])
    # Values are shown in the unit that fits them.
    assert "time of a step (ms)" in compared.table(frames).header()
    assert "bytes sent in a step (kB)" in Comparison("seed", "wire_bytes").table(frames).header()


def test_without_three_seeds_there_is_no_interval_which_is_said(frames: Frames) -> None:
    table = OVER.table(query_runs(frames, "seed < 2"))
    assert "[" not in table.to_markdown().partition("| topk")[2].partition("Fewer")[0]
    assert "Fewer than 3 runs give no interval" in table.note
    assert "Fewer" not in OVER.table(frames).note


PRODUCTION = {"timing": {"mode": "production", "warmup_steps": 4, "span_steps": 2}}


def test_runs_that_differ_in_more_than_their_seed_share_no_interval(tmp_path: Path) -> None:
    differing: list[dict[str, Any]] = [
        PRODUCTION,
        {"precision": "tf32"},
        {"task": {"name": "cnn_cifar10", "batch_size": 16, "lr": 0.2, "lr_milestones": [81, 122]}},
    ]
    for number, changes in enumerate(differing):
        store = Store(tmp_path / str(number))
        trained(store, "topk", 0)
        trained(store, "topk", 1, **changes)
        with pytest.raises(IncomparableRunsError, match="differ in"):
            OVER.points(synthetic.frames_of(store))


def test_points_that_differ_in_their_protocol_say_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    trained(store, "topk", 0)
    trained(store, "topk", 0, 0.01, **PRODUCTION)
    note = Comparison("method.density", "val_top1").table(synthetic.frames_of(store)).note
    assert "differ in timing.mode (production, serialised)" in note


def test_what_there_is_not_is_answered_with_what_there_is(frames: Frames) -> None:
    frames = frames._replace(runs=frames.runs.assign(memory=None))  # a column that no run filled
    for changed, words in (
        ({"y": "val_top"}, "did you mean val_top"),
        ({"x": "method.densty"}, r"did you mean method\.density"),
        ({"by": "method.nme"}, r"did you mean method\.name"),
        ({"ref": "dnse"}, "there are: dense, topk"),
        ({"y": "step_s"}, "none of these 9 runs has measured step_s"),
        ({"y": "memory"}, "none of these 9 runs has measured memory"),
        ({"y": "run_id"}, "no column y=run_id with numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(OVER, **changed).points(frames)
    with pytest.raises(ValueError, match="nothing to draw"):
        OVER.points(empty_frames())
