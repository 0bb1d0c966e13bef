"""A run whose processes somebody else started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.records import locks
from experiments.commands import run
from experiments.config.folders import ResultFolders
from experiments.launch import external
from experiments.launch.attempt import run_lock, wait_to_acquire_run_lock
from slurm import worker_process
from slurm.worker_process import STOP_SIGNALS
from tests.conftest import Command, refused

ALONE = ("run", "method=topk", "task=cnn_digits", "profile=smoke", "cluster=local", "workers=4")
OF_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}


@pytest.fixture
def task_of_srun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the first of four tasks, which soon reports for whom it waits."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCONT)}
    monkeypatch.setattr(worker_process, "kill_self_when_parent_ends", lambda: None)
    monkeypatch.setattr(locks, "REPORT_AFTER_S", 0.0)
    for name, value in OF_STEP.items():
        monkeypatch.setenv(name, value)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("task_of_srun")
def test_a_signal_ends_the_wait_for_other_tasks(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        said = list[str]()

        def say(line: str, number: int = number, said: list[str] = said) -> None:
            said.append(line)
            os.kill(os.getpid(), number)

        monkeypatch.setattr(run, "say", say)
        refused(here(*ALONE), "told to end while it waited for other processes", code=1)
        assert said == ["waiting for workers 1, 2, 3 to come; Ctrl-C ends the wait"]


@pytest.mark.usefixtures("task_of_srun")
def test_the_only_process_of_a_terminals_step_says_what_to_do(
    here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "PATIENCE_IN_TERMINALS_S", 0.0)
    refused(here(*ALONE, SLURM_PTY_PORT="40000"), "(--pty) with 4 tasks", "`unset SLURM_PROCID")


def test_a_signal_ends_the_wait_for_another_process_that_makes_the_run(tmp_path: Path) -> None:
    said = list[str]()
    with run_lock(ResultFolders(tmp_path), "topk-1") as held:
        assert held.acquire()
        lock = run_lock(ResultFolders(tmp_path), "topk-1")
        assert not wait_to_acquire_run_lock(lock, "topk-1", said.append, lambda: True)
    assert said == ["topk-1: another process is measuring this run; waiting for it"]
