"""A comparison's points are means over seeds and nothing else; what must not be mixed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.comparison import Comparison
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, query
from analysis.records.store import Store
from analysis.stats import Mixed, final, slowdown
from tests.analysis import synthetic
from tests.conftest import there

DENSITIES = (0.001, 0.01)


def trained(store: Store, method: str, seed: int, density: float = 0.001, **changes: Any) -> None:
    config = synthetic.learning_config(method, seed, epochs=3, **changes)
    if method != "dense":
        config["method"] = config["method"] | {"density": density}
    synthetic.learned(store, config)


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    store = Store(tmp_path)
    for seed in range(3):
        trained(store, "dense", seed)
        for density in DENSITIES:
            trained(store, "topk", seed, density)
    return from_attempts(store.all_valid())[0]


OVER = Comparison(x="method.density", y="val_top1", ref="dense")


def test_a_point_is_the_mean_over_seeds_as_the_statistics_have_it(frames: Frames) -> None:
    points = {(point.by, point.x): point for point in OVER.points(frames)}
    assert list(points) == [("dense", None), *(("topk", density) for density in DENSITIES)]
    for density in DENSITIES:
        keys = query(frames, f"method.density == {density}").runs["key"].to_list()
        assert points["topk", density].value == pytest.approx(final(frames, keys, "val_top1"))


def test_against_a_reference_shares_are_subtracted_and_times_divided_seed_by_seed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        for method in ("dense", "topk"):
            synthetic.timed(store, synthetic.config(method, seed=seed), slow=1 + 0.1 * seed)
    frames = from_attempts(store.all_valid())[0]
    keys = {
        method: query(frames, f"method.name == '{method}'").runs["key"].to_list()
        for method in ("dense", "topk")
    }
    point = Comparison("workers", "step_s", ref="dense").points(frames)[-1]
    assert there(point.against)[:4] == pytest.approx(there(slowdown(frames, keys["topk"], keys["dense"]))[:4])


def test_differences_of_shares_are_paired(frames: Frames) -> None:
    dense, topk = OVER.points(frames)[:2]
    assert dense.against is None
    pairs = [ours - theirs for ours, theirs in zip(topk.samples, dense.samples, strict=True)]
    assert there(topk.against).value == pytest.approx(sum(pairs) / 3)


def test_without_three_seeds_there_is_no_interval_which_is_said(frames: Frames) -> None:
    table = OVER.table(query(frames, "seed < 2"))
    assert "[" not in table.markdown().split("\n---")[0].partition("| topk")[2].partition("Fewer")[0]
    assert "Fewer than 3 runs give no interval" in table.note
    assert "Fewer" not in OVER.table(frames).note


@pytest.mark.parametrize(
    "changes",
    [
        {"timing": {"mode": "production", "warmup_steps": 4, "span_steps": 2}}, {"precision": "tf32"},
        {"task": {"name": "cnn_cifar10", "batch_size": 16, "lr": 0.2, "lr_milestones": [81, 122]}},
    ],
)  # fmt: skip
def test_runs_that_differ_in_more_than_their_seed_share_no_interval(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    store = Store(tmp_path)
    trained(store, "topk", 0)
    trained(store, "topk", 1, **changes)
    frames = from_attempts(store.all_valid())[0]
    with pytest.raises(Mixed, match="differ in"):
        OVER.points(frames)


def test_data_of_another_digest_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed, digest in enumerate(("a", "b")):
        config = synthetic.learning_config("topk", seed, epochs=3)
        synthetic.learned(store, config, data={"name": "synthetic", "digest": digest})
    with pytest.raises(Mixed, match=r"provenance\.data\.digest \(a, b\)"):
        OVER.points(from_attempts(store.all_valid())[0])


def test_points_that_differ_in_their_protocol_say_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    trained(store, "topk", 0)
    trained(store, "topk", 0, 0.01, timing={"mode": "production", "warmup_steps": 4, "span_steps": 2})
    table = OVER_ALONE.table(from_attempts(store.all_valid())[0])
    assert "differ in timing.mode (production, serialised)" in table.note


OVER_ALONE = Comparison(x="method.density", y="val_top1")


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (Comparison("method.density", "val_top"), "did you mean val_top"),
        (Comparison("method.densty", "val_top1"), r"did you mean method\.density"),
        (Comparison("method.density", "val_top1", "method.nme"), r"did you mean method\.name"),
        (Comparison("method.density", "val_top1", ref="dnse"), "there are: dense, topk"),
        (Comparison("method.density", "step_s"), "none of these 9 runs has measured step_s"),
        (Comparison("method.density", "run_id"), "no column y=run_id with numbers"),
    ],
)
def test_what_there_is_not_is_answered_with_what_there_is(
    frames: Frames, compared: Comparison, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        compared.points(frames)


def test_a_column_that_no_run_filled_is_not_said_to_be_absent(frames: Frames) -> None:
    nobodys = frames._replace(runs=frames.runs.assign(memory=None))
    with pytest.raises(ValueError, match="none of these 9 runs has measured memory"):
        Comparison("method.density", "memory").points(nobodys)


def test_values_are_shown_in_the_unit_that_fits_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config("topk"))
    frames = from_attempts(store.all_valid())[0]
    assert "time of a step (ms)" in Comparison("seed", "step_s").table(frames).header()
    assert "bytes sent in a step (kB)" in Comparison("seed", "wire_bytes").table(frames).header()


def test_the_picture_has_a_line_per_method_and_one_across_for_what_has_no_x(frames: Frames) -> None:
    (axes,) = OVER.picture(frames).axes
    legend = there(axes.get_legend())
    assert [text.get_text() for text in legend.get_texts()] == ["dense", "Top-k"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.001", "0.01"]
    assert axes.get_xscale() == "log"
    assert "3 per point" in OVER.caption(frames)
