"""Step times: warm-up is dropped by rule, and parts add up to the step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.pictures import captions
from analysis.records.attempts import effective_resumption_steps, load_attempt
from analysis.records.frames import Frames, empty_frames, order_and_type_columns
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.steps import (
    MEDIAN_WINDOW,
    compute_outcomes,
    count_warmup_steps,
    mean_bytes_and_messages_per_round,
    mean_phase_seconds,
    warm_step_seconds_slowest_rank,
    warm_steps,
)
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return synthetic.frames_of(synthetic.item_store(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def topk(frames: Frames) -> str:
    return synthetic.key(frames, "topk")


def test_warm_up_lasts_until_the_rolling_median_settles_at_least_as_declared_and_at_most_half() -> None:
    steady = [1.0] * 20
    falling = [10 * 0.8**i for i in range(8)] + [1.0] * 32
    for step_s, at_least, dropped in (
        (steady, 4, 4),  # steady steps lose only what was declared
        ([*steady[:9], 50.0, *steady], 4, 4),  # one slow step is no warm-up
        ([2.0**-i for i in range(20)], 0, 10),  # never more than half
        (steady[:6], 50, 3),
        ([], 5, 0),
    ):
        assert count_warmup_steps(step_s, at_least) == dropped
    left = falling[count_warmup_steps(falling, at_least=0) :]
    assert 32 <= len(left) <= 37
    assert np.median(left[:MEDIAN_WINDOW]) == pytest.approx(1.0, rel=0.5)


def test_a_step_lasts_as_long_as_its_slowest_rank_and_suspended_ones_are_no_sample(
    frames: Frames, topk: str
) -> None:
    steps = frames.steps
    slowest = steps[steps["key"] == topk].groupby("step")["step_s"].max()
    np.testing.assert_array_equal(warm_step_seconds_slowest_rank(frames, topk), slowest.iloc[4:])
    where = steps["key"].eq(topk) & steps["step"].eq(7) & steps["rank"].eq(1)
    steps = steps.assign(step_s=steps["step_s"].mask(where, 30.0), stops=where.map({True: 1.0}))
    suspended = frames._replace(steps=steps)
    left = slowest.iloc[4:].drop(7)
    assert warm_steps(suspended, topk).dropped_suspended == 1
    np.testing.assert_array_equal(warm_step_seconds_slowest_rank(suspended, topk), left)
    assert compute_outcomes(suspended)["step_s"][topk] == pytest.approx(left.mean())
    assert "and 1 in which a worker was suspended" in captions.describe_timing_and_samples(suspended)


def test_phases_and_the_unaccounted_add_up_to_the_step(frames: Frames, topk: str) -> None:
    validated = frames.steps.assign(validate_s=np.where(frames.steps["rank"] == 0, 0.2, np.nan))
    for steps in (frames.steps, validated):
        parts = mean_phase_seconds(frames._replace(steps=steps), [topk])
        assert parts.drop("step").sum() == pytest.approx(parts["step"], rel=1e-12)
    assert parts["validate"] == pytest.approx(0.1)  # of two ranks, of which one validates
    unaccounted = mean_phase_seconds(frames, [topk])["unaccounted"]
    assert unaccounted == pytest.approx(synthetic.UNACCOUNTED_MS * 1e-3, rel=1e-6)


def test_of_turns_the_warm_up_and_the_first_step_after_a_switch_are_left_out(tmp_path: Path) -> None:
    for block_steps, expected in ((3, [3, 4, 6, 7, 9, 10, 12, 13]), (1, [2, 3, 4, 5])):
        store = Store(tmp_path / str(block_steps))
        frames = load_attempt(synthetic.alternated(store, ["dense", "topk"], 4, block_steps))[0]
        for key in frames.runs["key"]:
            found = warm_steps(frames, key)
            assert sorted(set(found.steps["step"])) == expected
            assert (found.step_count, found.dropped_at_start, found.turn_count) == (len(expected), 2, 4)


def test_a_number_that_no_run_has_is_no_outcome_and_stops_no_other(frames: Frames) -> None:
    tables = {name: getattr(frames, name).drop(columns="wire_bytes") for name in ("steps", "epochs")}
    whole, without = compute_outcomes(frames), compute_outcomes(frames._replace(**tables))
    assert whole["wire_bytes"].notna().any()
    assert without["wire_bytes"].isna().all()
    assert without["step_s"].equals(whole["step_s"])


EVERY = 4
# Bytes in each local step, of 14, from the step that ends a round on; and what a whole round sends.
SENT_AT = {
    "an exchange a round": ([0, 0, 0, 9] * 3 + [0, 0], 9.0),
    "two fragments": ([0, 5, 0, 9] * 3 + [0, 5], 14.0),
    "a moment every third": ([0, 0, 0, 9, 0, 0, 0, 9, 0, 0, 0, 15, 0, 0], 11.0),
    "every step": ([2] * 14, 8.0),
}


def of_rounds(steps: bool, validated: tuple[int, ...]) -> pd.DataFrame:
    """Return the rounds of runs that sent this, from their steps or from their validations."""
    sent_by_name = {name: np.array(sent, dtype=float) for name, (sent, _) in SENT_AT.items()}
    sent_by_name["none"] = np.ones(14)
    runs = pd.DataFrame({"key": [*sent_by_name], "run_id": "r", "workers": 2, "timing.warmup_steps": 0})
    runs["task.name"] = "gpt_ptbchars"
    runs["method.every"] = runs["key"].map(dict.fromkeys(SENT_AT, EVERY))
    lines, epochs = [], []
    for name, sent in sent_by_name.items():
        for rank in (0, 1):
            line = {"key": name, "rank": rank, "epoch": 1, "start_s": 0.0, "step_s": 1.0}
            rows = {"step": range(14), "wire_bytes": sent * (1 + rank), "messages": sent / 2}
            lines.append(pd.DataFrame({**line, **rows}))
        for at, (first, end) in enumerate(pairwise((0, *validated)), 1):
            epochs.append({"key": name, "epoch": at, "step": end, "wire_bytes": sent[first:end].mean()})
    of_steps = order_and_type_columns("steps", pd.concat(lines)[: None if steps else 0])
    of_epochs = order_and_type_columns("epochs", pd.DataFrame(epochs))
    return mean_bytes_and_messages_per_round(
        empty_frames()._replace(runs=order_and_type_columns("runs", runs), steps=of_steps, epochs=of_epochs)
    )


def test_a_round_has_what_its_steps_sent_whatever_is_sent_when() -> None:
    for steps in (True, False):
        found = of_rounds(steps, (3, 12, 14))
        for name, (_, sent) in SENT_AT.items():
            assert found["wire_bytes"][name] == pytest.approx(sent, rel=1e-12)
            messages = sent / 2 if steps else np.nan
            assert found["messages"][name] == pytest.approx(messages, nan_ok=True)
        assert np.isnan(found["wire_bytes"]["none"])
    assert of_rounds(False, (3, 13))["wire_bytes"].isna().all()  # where no validation ends a round


def test_perplexity_follows_from_the_loss_of_text_and_of_nothing_else(frames: Frames) -> None:
    key = frames.runs["key"].iloc[0]
    for task, loss, perplexity in (
        ("gpt_ptbchars", 2.0, np.exp(2.0)),
        ("mine_text", 2.0, np.exp(2.0)),
        ("cnn_cifar10", 2.0, np.nan),
        ("gpt_ptb", 1e6, np.inf),
    ):
        runs = frames.runs.assign(**{"task.name": task})
        epochs = pd.DataFrame({"key": key, "epoch": [1, 2], "val_loss": [9.0, loss]})
        found = compute_outcomes(frames._replace(runs=runs, epochs=epochs))["val_perplexity"][key]
        assert found == pytest.approx(perplexity, nan_ok=True)


def interrupted(folder: Path, steps: int, *resumed: int) -> Frames:
    """Return a run of so many steps that was taken up again at these."""
    train = {"epochs": 1, "steps": steps, "validate": "never"}
    attempt = synthetic.timed(Store(folder / str(resumed)), synthetic.config(train=train))
    if resumed:
        attempt.update_manifest(resumed=[{"step": step} for step in resumed])
    return load_attempt(attempt)[0]


def test_steps_after_an_interruption_are_warm_up_again(tmp_path: Path) -> None:
    whole, again = interrupted(tmp_path, 40), interrupted(tmp_path, 40, 20, 38)
    key = whole.runs["key"].iloc[0]
    write_parquet(again, tmp_path / "kept")
    older = whole._replace(runs=whole.runs.drop(columns="resumed"))
    for frames, kept, later in (
        (whole, {*range(4, 40)}, 0),
        (older, {*range(4, 40)}, 0),
        (again, {*range(4, 20), *range(24, 38)}, 6),
        (read_parquet(tmp_path / "kept"), {*range(4, 20), *range(24, 38)}, 6),
    ):
        left = warm_steps(frames, key)
        assert set(left.steps["step"]) == kept
        assert (left.step_count, left.dropped_at_start, left.dropped_after_resuming) == (len(kept), 4, later)
    assert effective_resumption_steps({}) == []
    assert effective_resumption_steps({"resumed": [{"step": 5}, {"step": 30}, {"step": 10}]}) == [5, 10]
    short = interrupted(tmp_path, 8, 4)  # nothing but interruptions: some steps are kept
    assert warm_steps(short, short.runs["key"].iloc[0]).step_count == 4
