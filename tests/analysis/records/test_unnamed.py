"""Recorded values without a field of their own become columns, at once and after `collect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

import analysis
from analysis.records import columns
from analysis.records.attempts import load_attempt
from analysis.records.collection import collect_runs_into_parquet
from analysis.records.files import DamagedFileError
from analysis.records.store import Attempt, Store
from tests.analysis import synthetic


def rewritten(attempt: Attempt, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Attempt:
    """Return the attempt as it would be if each line of its logs had been written like this."""
    for path in attempt.find_rank_logs():
        lines = [json.dumps(change(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")
    attempt.update_manifest(files=attempt.size_and_digest_by_log())
    return attempt


def with_more(line: dict[str, Any]) -> dict[str, Any]:
    if line["kind"] == "epoch":
        return {**line, "val_f1": line["epoch"] / 4}
    more = {"queue": 2**40 + line["step"], "parts": {"a": 0.5, "b": [1, 2]}, "is_full": line["step"] > 3}
    return {**line, **more} if line["step"] else line  # the first step lacks them


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return the store of a checkout that ships no runs."""
    monkeypatch.setattr("analysis.records.loading.ROOT", tmp_path / "empty")
    return Store(tmp_path / "runs")


def test_it_is_seen_as_soon_as_it_is_written_and_survives_collecting(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten(synthetic.timed(store, synthetic.config("topk")), with_more)
    rewritten(synthetic.learned(store, synthetic.learning_config("topk", epochs=2)), with_more)
    rewritten(synthetic.alternated(store, ["dense", "randomk"], blocks=2), with_more)
    synthetic.timed(store, synthetic.config("dense"))
    words = synthetic.timed(store, synthetic.config("randomk"))
    rewritten(words, lambda line: {**line, "queue": "long"})  # of another version of the code

    written = analysis.load(tmp_path)
    monkeypatch.setattr("analysis.records.attempts.BATCH_RUNS", 1)
    collect_runs_into_parquet(store, tmp_path / "records")
    collected = analysis.load(tmp_path)
    for frames in (written, collected):
        numbers = frames.steps[frames.steps["is_full"].notna()]
        assert len(numbers) > 40
        assert numbers["is_full"].eq(numbers["step"] > 3).all()
        assert numbers["queue"].astype(float).eq(2**40 + numbers["step"]).all()
        assert set(zip(numbers["parts.a"], numbers["parts.b"], strict=True)) == {(0.5, "[1, 2]")}
        assert set(frames.steps.loc[frames.steps["key"] == words.key, "queue"]) == {"long"}
        assert frames.epochs["val_f1"].tolist() == [0.25, 0.5]
    assert columns.find_column_description("steps", "queue") is None
    before, after = (
        frames.steps.drop(columns="queue").sort_values(["key", "rank", "step"], ignore_index=True)
        for frames in (written, collected)
    )
    assert_frame_equal(before, after, rtol=1e-6, check_dtype=False, check_like=True)


def test_what_can_not_name_a_column_is_named_and_its_record_left_out(store: Store) -> None:
    names = ("rank", "key", "select_s", "a b", "", "x" * 100, "\x00", "sent,density")
    refused = [({name: 1}, "can't be a column of steps") for name in names]
    for more, reason in (*refused, ({f"n{place}": 1 for place in range(300)}, "200 are the most")):
        attempt = synthetic.timed(store, synthetic.config("topk"))
        with pytest.raises(DamagedFileError, match=reason):
            load_attempt(rewritten(attempt, lambda line, more=more: {**line, **more}))  # type: ignore[misc]


def test_a_number_is_found_under_the_name_that_it_has_now(store: Store, tmp_path: Path) -> None:
    def older(line: dict[str, Any]) -> dict[str, Any]:
        if line["step"] <= 4 or line["kind"] == "epoch":  # it went on with newer code
            line["density"] = line.pop("sent_density")
        return line

    synthetic.timed(store, synthetic.config("topk"))
    synthetic.learned(store, synthetic.learning_config("topk", epochs=2))
    before = synthetic.frames_of(store)
    for attempt in store.list_newest_valid_attempts():
        rewritten(attempt, older)
    collect_runs_into_parquet(store, tmp_path / "records")
    for frames in (synthetic.frames_of(store), analysis.load(tmp_path)):
        for found, expected in ((frames.steps, before.steps), (frames.epochs, before.epochs)):
            assert "density" not in found
            assert found["sent_density"].tolist() == pytest.approx(expected["sent_density"].tolist())
