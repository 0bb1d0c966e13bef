"""The benchmark of records times whole ones, of which nothing was measured."""

from __future__ import annotations

from pathlib import Path

from analysis.attempts import newest
from analysis.records import Store
from experiments.bench.records import RANKS, STEPS, invent


def test_invented_records_are_whole_and_say_that_they_are_invented(tmp_path: Path) -> None:
    store = Store(tmp_path)
    invent(store, 2)
    frames, notes = newest(store, store.runs())
    assert notes == []
    assert len(frames.steps) == 2 * RANKS * STEPS
    assert set(frames.runs["provenance.cpu"]) == {"invented"}
    assert set(frames.runs["seed"]) == {0, 1}
