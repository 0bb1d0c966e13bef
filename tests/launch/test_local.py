"""Runs here whose starter is killed, told to end, or loses its folder."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from analysis.records.log import LogInUseError, RankLog
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.launch import attempt as attempts
from experiments.launch import local
from experiments.launch.attempt import prepare_attempt
from experiments.launch.diagnosis import CommandInterrupted
from experiments.launch.local import END_SIGNALS, EndSignalHandler, LocalBackend
from tests.conftest import Command, refused
from tests.launch import trouble_here
from tests.worker.runs import wait_for

RUN = ("method=topk", "task=cnn_digits", "profile=smoke", "cluster=virtual", "train.validate=never")


def test_runs_share_a_gpu_as_far_as_they_say_and_never_with_what_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "count_usable_cores", lambda: 3)

    def planned(*words: str) -> PlannedRun:
        return PlannedRun(compose.resolve(["task=cnn_cifar10", "device=cuda", *words]), None)

    curve = planned()
    four = planned("launch.runs_per_gpu=4")
    on_cpu = planned("device=cpu")
    assert not local.has_room_for(curve, [curve])  # one to a GPU, unless asked for
    assert local.has_room_for(four, [four, four])
    assert not local.has_room_for(four, [four, four, four])  # there are three cores
    assert not local.has_room_for(four, [curve])
    assert local.has_room_for(on_cpu, [curve])
    assert local.has_room_for(curve, [on_cpu])
    for words in ("train.validate=never", "cluster=local"):  # it is timed, or has several processes
        alone = planned(words, "launch.runs_per_gpu=4")
        assert not local.has_room_for(alone, [four])
        assert not local.has_room_for(four, [alone])
        assert local.has_room_for(alone, [])


def test_a_run_in_trouble_leaves_no_process_and_does_each_step_once(tmp_path: Path) -> None:
    """$TROUBLES says which of trouble_here.TROUBLES, and how often."""
    for word in os.environ.get("TROUBLES", "starter-kill=1").split():
        name, _, times = word.partition("=")
        for number in range(int(times)):
            assert trouble_here.run(name, tmp_path, number) == [], (name, number)


@pytest.mark.extended
def test_a_run_under_torchrun_stops_as_told_and_goes_on(tmp_path: Path) -> None:
    """Its processes are another program's, which ends them all when one ends without success."""
    assert trouble_here.run("torchrun-stop", tmp_path, 0) == []


def test_results_that_are_removed_in_mid_run_are_missed_in_a_sentence(here: Command, tmp_path: Path) -> None:
    def remove() -> None:
        wait_for(tmp_path, "results/launch/*/progress.json")
        while (tmp_path / "results" / "runs").exists():  # others write there meanwhile
            shutil.rmtree(tmp_path / "results", ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    done = here("run", *RUN, "train.steps=100000")
    thread.join()
    refused(done, "was removed while the run was under way", code=1)


def test_an_attempt_that_somebody_writes_is_not_taken_up_or_measured_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where its starter is gone, and with it the lock of those who start."""
    monkeypatch.setattr(attempts, "LEAVE_S", 0.2)
    run, folders = PlannedRun(compose.resolve([*RUN]), None), ResultFolders(tmp_path)
    first = prepare_attempt(run, folders).attempt
    for force_new in (False, True):
        with (
            RankLog(first.rank_log_path(1)),
            pytest.raises(LogInUseError, match=f"process {os.getpid()} .* is still writing"),
        ):
            prepare_attempt(run, folders, force_new=force_new)
    assert prepare_attempt(run, folders).attempt.number == 2


def test_the_first_signal_is_noted_and_the_second_one_ends() -> None:
    for number in END_SIGNALS:
        before = signal.getsignal(number)
        with EndSignalHandler() as signals:
            assert not signals.consume_first_signal()
            os.kill(os.getpid(), number)
            assert signals.was_received
            assert [signals.consume_first_signal(), signals.consume_first_signal()] == [True, False]
            with pytest.raises(CommandInterrupted):
                os.kill(os.getpid(), number)
            signals.ignore_further_signals()
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == before


def test_workers_that_can_not_save_are_ended_some_time_after_the_signal(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SAVE_S", 0.0)
    begin = LocalBackend._begin

    def begin_and_stop_one(backend: LocalBackend) -> None:
        begin(backend)
        stopped = backend.running[0].workers.processes[1].pid
        os.kill(stopped, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalBackend, "_begin", begin_and_stop_one)
    done = here("run", "method=topk", "task=vector", "profile=smoke", "cluster=local", "workers=2")
    refused(done, "no step for 0 s", "interrupted: ", code=1)
    store = ResultFolders(tmp_path / "results").store
    (run,) = store.list_run_ids()
    (attempt,) = store.list_attempts(run)
    assert (attempt.state, attempt.manifest["failure"]) == ("failed", "interrupted")
    assert attempt.describe_writer() is None


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EndSignalHandler() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.was_received
    finally:
        signal.signal(signal.SIGHUP, before)
