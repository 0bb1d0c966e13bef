"""Runs that were interrupted: their logs, and which of their steps count."""

from __future__ import annotations

import json
from pathlib import Path

from analysis.records.attempts import from_attempts, resumptions
from analysis.records.log import RankLog
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.steps import warm
from analysis.records.store import Store
from tests.analysis import synthetic


def test_steps_after_an_interruption_are_warm_up_again(tmp_path: Path) -> None:
    attempt = synthetic.timed(
        Store(tmp_path), synthetic.config(train={"epochs": 1, "steps": 40, "validate": "never"})
    )
    frames, _ = from_attempts([attempt])
    key = frames.runs["key"].iloc[0]
    at_least = int(frames.runs["timing.warmup_steps"].iloc[0])
    assert warm(frames, key).again == 0

    manifest = attempt.manifest
    attempt.update(resumed=[{"step": 20}, {"step": 38}])
    again, _ = from_attempts([attempt])
    write_parquet(again, tmp_path / "kept")
    for some in (again, read_parquet(tmp_path / "kept")):
        left = warm(some, key)
        assert set(left.steps["step"]).isdisjoint({*range(at_least), *range(20, 20 + at_least), 38, 39})
        assert {19, 37} <= set(left.steps["step"])
        assert left.n + left.dropped + left.again == 40

    older = frames._replace(runs=frames.runs.drop(columns="resumed"))
    assert warm(older, key).n == warm(frames, key).n
    assert resumptions(manifest) == []
    assert resumptions({"resumed": [{"step": 5}, {"step": 30}, {"step": 10}]}) == [5, 10]


def test_a_run_that_is_nothing_but_interruptions_keeps_some_steps(tmp_path: Path) -> None:
    attempt = synthetic.timed(
        Store(tmp_path), synthetic.config(train={"epochs": 1, "steps": 8, "validate": "never"})
    )
    attempt.update(resumed=[{"step": 4}])
    frames, _ = from_attempts([attempt])
    assert warm(frames, frames.runs["key"].iloc[0]).n == 4


def test_a_log_forgets_what_came_later(tmp_path: Path) -> None:
    with RankLog(tmp_path / "rank0.jsonl") as log:
        log.truncate(0)  # nothing is there yet
        log.add("step", step=0)
        size = log.sync()
        log.add("step", step=1)
        assert log.sync() > size
        log.truncate(size)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [0]
