"""Trainings whose processes are forked from one that has loaded torch."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from experiments.launch.fork_server import forking_starter_or_command
from slurm.worker_process import WorkerCommand
from tests.conftest import Command, fine
from tests.worker.runs import manifests, start_command, wait_for

SWEEP = (
    "run", "task=cnn_digits", "profile=smoke", "cluster=virtual", "train.validate=epoch", "train.steps=null",
    "train.epochs=1",
)  # fmt: skip


@pytest.mark.own_processes
def test_a_sweep_of_trainings_is_forked_and_gives_the_bits_of_one_alone(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine(here(*SWEEP, "method=topk", "seed=1"))
    alone = manifests(tmp_path / "results")
    fine(here(*SWEEP, "method=topk", "seed=1,2", "--force"))
    every = sorted(manifests(tmp_path / "results"), key=lambda manifest: str(manifest["started"]))
    forked = [manifest for manifest in every if manifest["provenance"]["forked"]]
    assert (len(alone), len(every), len(forked)) == (1, 3, 2)
    assert alone[0]["weights"] in {manifest["weights"] for manifest in forked}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_forked_workers_end_with_their_starter_and_save_where_it_is_told_to_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = start_command(tmp_path, *SWEEP, "train.epochs=500", "method=dense,topk")
    wait_for(tmp_path, "launch/**/worker0.json", count=2)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 3  # the one that loads, and two workers
    process.send_signal(number)
    process.communicate()
    _, left = psutil.wait_procs(below, timeout=20)
    assert left == []
    states = {manifest["state"] for manifest in manifests(tmp_path)}
    assert number == signal.SIGKILL or states == {"preempted"}


@pytest.mark.parametrize("changed", [{"gpu": True}, {"enter": ["ip"]}, {"command": ["python0"]}])
def test_what_needs_an_environment_of_its_own_is_not_forked(changed: dict[str, Any]) -> None:
    plain = WorkerCommand([sys.executable], ".", threads=1, container=None, binds=[], gpu=False)
    assert forking_starter_or_command(plain) is not plain
    changed_command = replace(plain, **changed)
    assert forking_starter_or_command(changed_command) is changed_command
