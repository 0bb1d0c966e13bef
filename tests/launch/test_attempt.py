"""Where an attempt begins: what its manifest and its orders say, on this machine and for SLURM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.records.store import Attempt
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.launch.attempt import prepare_attempt, resume_or_create_attempt, worker_command
from experiments.launch.diagnosis import CANCEL_FILE
from experiments.worker.orders import RunOrders

WORDS = ("method=topk", "task=cnn_digits", "profile=smoke", "cluster=local")


def planned(*words: str) -> PlannedRun:
    return PlannedRun(compose.resolve([*WORDS, *words]), None)


def end_with_checkpoint(attempt: Attempt, **changes: Any) -> None:
    """Let an attempt end so, with a checkpoint."""
    folder = attempt.checkpoint_folder / "7"
    folder.mkdir(parents=True)
    (folder / "whole.json").write_text("{}")
    attempt.update_manifest(**changes)


def test_a_new_attempt_is_submitted_and_its_workers_know_what_to_do(tmp_path: Path) -> None:
    run = planned("train.validate=never")
    folders = ResultFolders(tmp_path)
    begun = prepare_attempt(run, folders)
    manifest = begun.attempt.manifest
    assert (manifest["state"], manifest["alone"], manifest["sweep"]) == ("submitted", True, None)
    assert begun.folder == folders.launch_folder(begun.attempt)
    orders = RunOrders.read(Path(begun.orders_file))
    assert Config.from_record(orders.config).as_dict() == run.config.as_dict()
    assert (orders.attempt_folder, orders.same_host) == (str(begun.attempt.path), True)
    shared = prepare_attempt(run, folders, alone_on_machines=False)  # other jobs may run on the same nodes
    assert shared.attempt.manifest["alone"] is False
    # One that is there for its curve shares the machine.
    curve = prepare_attempt(planned("train.validate=epoch"), folders)
    assert curve.attempt.manifest["alone"] is False


def test_an_attempt_that_goes_on_forgets_its_job_its_sweep_and_why_it_ended(tmp_path: Path) -> None:
    run, folders = planned(), ResultFolders(tmp_path)
    first = prepare_attempt(run, folders, job="12_3", sweep="runs-001", array="runs-001-a0:3").attempt
    end_with_checkpoint(first, state="failed", failure="killed", why="worker 1 was killed by SIGKILL")
    again = prepare_attempt(run, folders).attempt
    assert again == first
    assert again.manifest["state"] == "submitted"
    assert [again.manifest[key] for key in ("why", "failure", "sweep", "array")] == [None] * 4
    assert again.slurm_job.id is None


def test_what_can_not_go_on_begins_anew(tmp_path: Path) -> None:
    run, folders = planned(), ResultFolders(tmp_path)
    assert prepare_attempt(run, folders).attempt.number == 1
    second = resume_or_create_attempt(run.config, folders.store)
    assert second.number == 2  # the first has no checkpoint
    end_with_checkpoint(
        resume_or_create_attempt(run.config, folders.store), state="failed", failure="bad_input"
    )
    assert prepare_attempt(run, folders).attempt.number == 4


def test_starts_of_a_job_are_kept_but_a_cancellation_is_not(tmp_path: Path) -> None:
    run, folders = planned(), ResultFolders(tmp_path)
    first = prepare_attempt(run, folders, job="12", sweep="a")
    end_with_checkpoint(first.attempt, state="preempted")
    (first.folder / "start-12-0").mkdir()
    (first.folder / CANCEL_FILE).touch()
    again = prepare_attempt(run, folders, job="13", sweep="a")
    assert (again.folder / "start-12-0").is_dir()
    assert not (again.folder / CANCEL_FILE).exists()
    assert again.attempt.slurm_job.id == "13"
    prepare_attempt(run, folders)  # on this machine: one start, in a clean folder
    assert not (again.folder / "start-12-0").exists()


def test_a_container_sees_code_results_python_and_data(tmp_path: Path) -> None:
    run = PlannedRun(compose.resolve([*WORDS]), tmp_path / "data")
    command = worker_command(run, ResultFolders(tmp_path), tmp_path / "code")
    assert {str(tmp_path / "code"), str(tmp_path), str(tmp_path / "data")} <= set(command.binds)
    assert command.cwd == str(tmp_path / "code")
    assert command.command[-2:] == ["-m", "experiments.worker"]
