"""Worker processes of this machine: their notes, logs and ends, also that of their starter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slurm import local
from slurm.local import LocalWorkers
from slurm.worker_process import WorkerCommand, read_exit_code_by_rank
from tests.conftest import ROOT, there

Start = Callable[..., LocalWorkers]
ENDS_AS_TOLD = """
import os, signal, sys, time
orders, folder = sys.argv[1:]
rank = int(os.environ["SPARSIFY_RANK"])
print(f"rank {rank} of {os.environ['SPARSIFY_SIZE']}: {orders}", flush=True)
print("to standard error", file=sys.stderr, flush=True)
how = orders.split(",")[rank]
if how == "takes it":
    signal.sigwait([signal.SIGUSR2])
    sys.exit(0)
if how == "waits":
    time.sleep(60)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LocalWorkers] = []

    def start(*ends: str, gpu: bool = False) -> LocalWorkers:
        command = WorkerCommand([sys.executable, "-c", ENDS_AS_TOLD], str(tmp_path), 1, None, [], gpu)
        started.append(LocalWorkers(command, ",".join(ends), tmp_path, len(ends)))
        return started[-1]

    yield start
    for workers in started:
        workers.kill_and_close_network()


def end_of(workers: LocalWorkers) -> dict[int, int]:
    deadline = time.monotonic() + 30
    while (ended := workers.poll_exit_codes()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ended


def test_all_workers_end_well_and_leave_notes_and_logs(start: Start, tmp_path: Path) -> None:
    ended = end_of(start("0", "0"))
    assert ended == read_exit_code_by_rank(tmp_path) == {0: 0, 1: 0}
    for rank in (0, 1):
        assert json.loads((tmp_path / f"worker{rank}.json").read_text())["rank"] == rank
        assert (tmp_path / f"worker{rank}_log.out").read_text() == f"rank {rank} of 2: 0,0\n"
        assert (tmp_path / f"worker{rank}_log.err").read_text() == "to standard error\n"


def test_once_one_has_failed_the_others_are_stopped_and_have_no_exit_code(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = start("waits", "killed", "3")
    while len(workers.code_by_rank) < 2:
        assert workers.poll_exit_codes() is None
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    ended = end_of(workers)
    assert ended == read_exit_code_by_rank(tmp_path) == {1: -signal.SIGKILL, 2: 3}
    assert all(process.poll() is not None for process in workers.processes)


def test_cancelled_workers_are_gone_when_it_returns(start: Start) -> None:
    workers = start("waits", "waits")
    pids = [process.pid for process in workers.processes]
    workers.kill_and_close_network()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_signal_that_comes_before_a_worker_can_take_it_is_not_lost(start: Start) -> None:
    """Otherwise the signal would end a Python that is only just starting."""
    workers = start("takes it")
    workers.request_save_and_stop()
    assert end_of(workers) == {0: 0}


def test_a_run_without_a_gpu_shows_its_workers_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for gpu, expected in ((False, ""), (True, "2,3")):
        workers = start("waits", gpu=gpu)
        seen = psutil.Process(workers.processes[0].pid).environ()
        assert seen["CUDA_VISIBLE_DEVICES"] == expected
        workers.kill_and_close_network()


WORKER = """
import os, time
{}
from slurm import worker_process
worker_process.{}()
print("begun", flush=True)
time.sleep(60)
"""
# As our launchers do, where the kernel can't help: it does not on every system, nor through a container.
OURS = """
import sys
from pathlib import Path
from slurm.environment import WorkerPlace
from slurm.worker_process import WorkerCommand, WorkerStartSpec
folder = Path(sys.argv[1])
command = WorkerCommand([sys.executable, str(folder / "worker.py")], ".", 1, None, [], False)
sys.platform = "another"
command.start(WorkerStartSpec("orders", folder, WorkerPlace(0, 1, 0), 1, 2)).wait()
"""
ANOTHER = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1] + '/worker.py'])"


@pytest.mark.parametrize(
    ("starter", "takes", "watch"),
    [
        (OURS, "kill_self_when_stdin_closes", ""),
        (ANOTHER, "kill_self_when_parent_ends", ""),
        (ANOTHER, "kill_self_when_parent_ends", "vars(os).pop('pidfd_open', None)"),  # not every Linux has it
    ],
)
def test_a_worker_ends_with_its_starter(starter: str, takes: str, watch: str, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER.format(watch, takes))
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", starter, str(tmp_path)]
    parent = subprocess.Popen(command, env=around, stdout=subprocess.PIPE)
    assert there(parent.stdout).readline() == b"begun\n"
    (child,) = psutil.Process(parent.pid).children()
    assert child.is_running()
    parent.kill()
    parent.communicate(timeout=20)  # returns when the child has closed its end as well
    gone, _ = psutil.wait_procs([child], timeout=20)
    assert gone
