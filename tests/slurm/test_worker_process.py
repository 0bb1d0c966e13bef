"""Workers end with their starter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, there

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
from slurm.worker_process import WorkerCommand, WorkerStart
folder = Path(sys.argv[1])
command = WorkerCommand([sys.executable, str(folder / "worker.py")], ".", 1, None, [], False)
sys.platform = "another"
command.start(WorkerStart("orders", folder, WorkerPlace(0, 1, 0), 1, 2)).wait()
"""
ANOTHER = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1] + '/worker.py'])"


@pytest.mark.parametrize(
    ("starter", "takes", "watch"),
    [
        (OURS, "end_with_stdin", ""),
        (ANOTHER, "end_with_parent", ""),
        (ANOTHER, "end_with_parent", "vars(os).pop('pidfd_open', None)"),  # not every Linux has it
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
