"""`plan` for this machine: how many runs, and how long they will take."""

from __future__ import annotations

from pathlib import Path

from experiments.config import compose
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import Command, fine

WORDS = ("task=cnn_digits", "profile=smoke", "cluster=virtual", "train.validate=epoch", "train.steps=null")


def test_minutes_are_told_by_runs_like_these(here: Command, tmp_path: Path) -> None:
    store = Folders(tmp_path / "results").store
    made = synthetic.timed(store, {**compose.resolve([*WORDS, "method=topk"]).as_dict(), "train": {
        "epochs": 1, "steps": 20, "epoch_steps": None, "validate": "epoch"}})  # fmt: skip
    made.update(started="2026-01-01T00:00:00Z", ended="2026-01-01T01:00:00Z", memory={"host_gib": 0.75})
    said = fine(here("plan", *WORDS, "method=topk", "seed=1,2")).stdout
    assert "runs on this machine: 2 runs, 2 not measured yet" in said
    assert "by the durations of 1 run of the same task, batch and place, scaled to as many steps; " in said
    assert "memory: up to 0.75 GiB a run, as the largest like these had" in said
    assert "`run` or `reproduce` with the same words makes them" in said


def test_what_was_never_measured_is_said_to_be_unknown(here: Command) -> None:
    said = fine(here("plan", *WORDS, "method=dense", "workers=3", "task.batch_size=3")).stdout
    assert "not known of 1 run: none of the same task, batch and place was measured" in said
