"""Real processes that are told to stop go on.

That every method does, whatever its state, and whatever becomes of the checkpoints, is told by
tests/training/test_checkpoint.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from analysis.records.store import Store
from tests.worker.runs import carry_out, check_equal, orders, recorded, start_workers, wait_for

WORDS = ("method=dgc", "method.density=0.01", "workers=2", "train.steps=120")


@pytest.mark.extended
def test_workers_told_at_any_moment_end_together_and_go_on_to_the_same_weights(tmp_path: Path) -> None:
    """Stop one rank in the middle of training; then, before they have even begun, all, and twice."""
    told, attempt = orders(Store(tmp_path / "runs"), *WORDS, "cluster=local")
    workers = start_workers(told, tmp_path / "first", 2)
    wait_for(tmp_path / "first", "progress.json")
    workers.processes[1].send_signal(signal.SIGUSR2)
    assert workers.end() == [75, 75]
    done = attempt.manifest["step"]
    assert attempt.state == "preempted"
    assert 0 < done < 120
    assert [line["step"] for line in recorded(attempt, 1)] == list(range(done))

    workers = start_workers(told, tmp_path / "second", 2)
    for process in workers.processes:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR2)
    assert workers.end() == [75, 75]
    assert (attempt.state, attempt.manifest["step"]) == ("preempted", done)

    assert start_workers(told, tmp_path / "third", 2).end() == [0, 0]
    assert not attempt.checkpoint_folder.exists()
    assert [again["step"] for again in attempt.manifest["resumed"]] == [done]

    # SLURM starts a job again whose node died after the last step: nothing is left to do.
    whole = attempt.rank_log_path(0).read_bytes()
    assert start_workers(told, tmp_path / "fourth", 2).end() == [0, 0]
    assert attempt.rank_log_path(0).read_bytes() == whole
    assert attempt.is_valid(verify_digests=True)

    # Virtual ranks, in this process, do the same as two processes that nobody tells anything.
    told, straight = orders(Store(tmp_path / "runs"), *WORDS, "cluster=virtual")
    carry_out(told, straight, tmp_path / "straight")
    check_equal(attempt, straight)
