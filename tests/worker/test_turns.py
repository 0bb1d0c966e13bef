"""A run whose variants take turns: one record for all of them, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.attempts import load_attempt
from analysis.records.steps import warm_steps
from analysis.records.store import Attempt, Store
from analysis.stats import step_time_ratio
from experiments.training.stop_signal import Preempted
from tests.conftest import there
from tests.worker.runs import StopAt, carry_out, orders, recorded, start_workers

VARIANTS = (
    "variants={dense:'method=dense',topk:'method=topk method.density=0.01',"
    "published:'method=topk method.density=0.01 timing.mode=as_published train.validate=epoch'}"
)
WORDS = (
    VARIANTS, "train.validate=never", "timing.mode=serialised", "timing.span_steps=null",
    "train.epoch_steps=3", "alternate.block_steps=3",
)  # fmt: skip
STEPS = 2 + 3 * 3  # of each variant: warm-up and three blocks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def check_whole(attempt: Attempt) -> None:
    manifest = attempt.read_checked_manifest(verify_digests=True)
    ended = manifest["alternated"]
    assert (ended["blocks"], manifest["steps"]) == (3, STEPS)
    assert all(variant["agreed"] for variant in ended["variants"].values())
    frames, notes = load_attempt(attempt)
    assert not notes
    dense, topk, published = frames.runs["key"]
    assert frames.runs["timing.mode"].to_list() == ["serialised", "serialised", "as_published"]
    for key in (dense, topk, published):
        assert warm_steps(frames, key).step_count == 3 * 2
    ratio = there(step_time_ratio(frames, [topk], [dense]))
    assert (ratio.n, ratio.sample_kind) == (3, "blocks")
    assert ratio.half_width_on_log_scale <= ended["half_width"] * (1 + 1e-6)
    validating = frames.steps[frames.steps["validate_s"].notna()]
    assert {*zip(validating["key"], validating["rank"], strict=True)} == {(published, 0)}
    assert set(frames.epochs["key"]) == {published}


@pytest.mark.extended
def test_processes_leave_one_record_with_every_variant(store: Store, tmp_path: Path) -> None:
    told, attempt = orders(store, "cluster=local", *WORDS)
    assert start_workers(told, tmp_path / "start", 2).end() == [0, 0]
    check_whole(attempt)


def test_what_is_stopped_between_two_turns_is_no_record_and_begins_again(
    store: Store, tmp_path: Path
) -> None:
    told, attempt = orders(store, "cluster=virtual", *WORDS)
    with pytest.raises(Preempted):
        carry_out(told, attempt, tmp_path / "start", StopAt(6))
    assert attempt.state == "preempted"
    assert not attempt.is_valid()
    assert not attempt.newest_whole_checkpoint_step_or_zero()
    assert 0 < len(recorded(attempt, 0)) < 3 * STEPS
    carry_out(told, attempt, tmp_path / "start")
    check_whole(attempt)
