"""A run whose processes somebody else started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from analysis.records.store import Store
from experiments.config.folders import Folders
from tests.conftest import ROOT, environment_for, fine, process
from tests.worker.runs import recorded, wait_for

STEPS = 200


def processes_of(pid: int) -> list[int]:
    """Those of ours that this one started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in started if b"experiments" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_run_under_torchrun_stops_as_told_and_goes_on(tmp_path: Path) -> None:
    """Its processes are another program's, which ends them all when one ends without success."""
    words = ("task=cnn_digits", "profile=smoke", "cluster=local", "workers=2", f"train.steps={STEPS}")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "experiments", "run", "method=topk", "method.density=0.01", *words,
    ]  # fmt: skip
    around = environment_for(tmp_path, GLOO_SOCKET_IFNAME="lo")
    with (tmp_path / "said").open("wb") as said:
        first = subprocess.Popen(command, cwd=ROOT, env=around, stderr=said)
    wait_for(Folders(tmp_path).scratch, "*/progress.json")
    os.kill(processes_of(first.pid)[0], signal.SIGUSR2)
    assert first.wait(timeout=100) == 1, (tmp_path / "said").read_text()
    store = Store(tmp_path / "runs")
    (attempt,) = store.attempts(*store.runs())
    done = attempt.manifest["step"]
    assert attempt.state == "preempted"
    assert 0 < done < STEPS
    assert f"told to stop, saved at step {done}; run again to go on" in (tmp_path / "said").read_text()

    fine(process(*command, env=around))
    assert [told["step"] for told in attempt.manifest["resumed"]] == [done]
    for rank in range(2):
        assert [line["step"] for line in recorded(attempt, rank)] == list(range(STEPS))
