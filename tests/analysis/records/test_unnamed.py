"""What a run wrote and no field is for is not lost: it is a column, at once and after `collect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

import analysis
from analysis.records import columns
from analysis.records.attempts import of_attempt
from analysis.records.files import Damaged
from analysis.records.parquet import collect
from analysis.records.store import Attempt, Store
from tests.analysis import synthetic


def rewritten(attempt: Attempt, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Attempt:
    """The attempt as it would be if each line of its logs had been written like this."""
    for path in attempt.rank_paths():
        lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    attempt.update(files=attempt.fingerprints())
    return attempt


def with_more(line: dict[str, Any]) -> dict[str, Any]:
    if line["kind"] == "epoch":
        return {**line, "val_f1": line["epoch"] / 4}
    more = {"queue": 2**40 + line["step"], "parts": {"a": 0.5, "b": [1, 2]}, "is_full": line["step"] > 3}
    return {**line, **more} if line["step"] else line  # the first step lacks them


@pytest.fixture(autouse=True)
def nothing_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.records.loading.ROOT", tmp_path / "empty")


def test_it_is_seen_as_soon_as_it_is_written_and_survives_collecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "runs")
    rewritten(synthetic.timed(store, synthetic.config("topk")), with_more)
    rewritten(synthetic.learned(store, synthetic.learning_config("topk", epochs=2)), with_more)
    rewritten(synthetic.alternated(store, ["dense", "randomk"], blocks=2), with_more)
    synthetic.timed(store, synthetic.config("dense"))
    words = synthetic.timed(store, synthetic.config("randomk"))
    rewritten(words, lambda line: {**line, "queue": "long"})  # of another version of the code

    written = analysis.load(tmp_path)
    monkeypatch.setattr("analysis.records.parquet.RUNS_OF_A_PART", 1)
    collect(store, tmp_path / "records")
    collected = analysis.load(tmp_path)
    for steps, epochs in ((written.steps, written.epochs), (collected.steps, collected.epochs)):
        numbers = steps[steps["is_full"].notna()]
        assert len(numbers) > 40
        assert (numbers["is_full"] == (numbers["step"] > 3)).all()
        assert numbers["queue"].astype(float).tolist() == (2**40 + numbers["step"]).tolist()
        assert set(numbers["parts.a"]) == {0.5}
        assert set(numbers["parts.b"]) == {"[1, 2]"}
        assert set(steps.loc[steps["key"] == words.key, "queue"]) == {"long"}
        assert epochs["val_f1"].tolist() == [0.25, 0.5]
    assert columns.describe("steps", "queue") is None
    before, after = (
        frames.steps.drop(columns="queue").sort_values(["key", "rank", "step"], ignore_index=True)
        for frames in (written, collected)
    )
    assert_frame_equal(before, after[[*before]], rtol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", ["rank", "key", "select_s", "a b", "", "x" * 100, "\x00", "sent,density"])
def test_what_can_not_name_a_column_is_named_and_its_record_left_out(tmp_path: Path, name: str) -> None:
    attempt = synthetic.timed(Store(tmp_path), synthetic.config("topk"))
    with pytest.raises(Damaged, match="can't be a column of steps"):
        of_attempt(rewritten(attempt, lambda line: {**line, name: 1}))


def test_a_log_of_endless_names_is_left_out(tmp_path: Path) -> None:
    attempt = synthetic.timed(Store(tmp_path), synthetic.config("topk"))
    many = {f"n{place}": place for place in range(300)}
    with pytest.raises(Damaged, match="200 are the most"):
        of_attempt(rewritten(attempt, lambda line: {**line, **many}))


def test_a_number_is_found_under_the_name_that_it_has_now(tmp_path: Path) -> None:
    def older(line: dict[str, Any]) -> dict[str, Any]:
        is_new = line["kind"] == "step" and line["step"] > 4  # it went on with newer code
        return line if is_new else {**line, "density": line.pop("sent_density")}

    store = Store(tmp_path / "runs")
    attempt = synthetic.learned(store, synthetic.learning_config("topk", epochs=2))
    before = of_attempt(attempt)[0]
    rewritten(attempt, older)
    collect(store, tmp_path / "records")
    for frames in (of_attempt(attempt)[0], analysis.load(tmp_path)):
        for name in ("steps", "epochs"):
            found = getattr(frames, name)
            assert "density" not in found
            assert found["sent_density"].tolist() == getattr(before, name)["sent_density"].tolist()
