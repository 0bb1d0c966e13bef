"""Calls of sbatch in the docs, on a real SLURM: as they stand there, but for runs that are small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT, fine, process
from tests.launch.trouble_there import Bench
from tests.slurm.devcluster import Environment, of_this_venv
from tests.test_readme import LINES

SLURM = "newer"
pytestmark = pytest.mark.slurm
SMALL = ["profile=smoke", "task=cnn_digits"]
SCRIPT = ROOT / "slurm" / "sweep.sbatch"
SCRIPTS_OWN = re.findall(r"^# +(sbatch .*)", SCRIPT.read_text(), re.MULTILINE)
SBATCH = [*dict.fromkeys([*(line for _, line in LINES if line.startswith("sbatch ")), *SCRIPTS_OWN])]


# What lines have as an example, and the development cluster otherwise; and fewer runs.
EXAMPLES = {
    "-p gpu": "-p devel", "--ntasks=8": "--ntasks=2", "--gres=gpu:8": "--gres=gpu:2", "0,1,2": "0",
    "density=0.001,0.01": "density=0.01",
}  # fmt: skip


@pytest.fixture
def bench(devcluster: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Where cluster=mine is the development cluster, as somebody describes it in a file of one's own."""
    file = tmp_path / "conf" / "cluster" / "mine.yaml"
    file.parent.mkdir(parents=True)
    default = "defaults:\n- devcluster\n- override /container@_global_.container: none\n- _self_\n"
    file.write_text(f"{default}slurm_conf: {devcluster['SLURM_CONF']}\n")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path / "conf"))
    return Bench.reached(tmp_path / "results", devcluster, monkeypatch)


@of_this_venv
@pytest.mark.parametrize("line", SBATCH)
def test_what_is_said_of_sbatch_works(line: str, bench: Bench, tmp_path: Path) -> None:
    """As in a shell, which leaves out its comment."""
    for example, here in EXAMPLES.items():
        line = line.replace(example, here)
    words = shlex.split(line, comments=True)
    at = words.index("--") if "--" in words else len(words)  # what follows is for sbatch
    words[at:at] = SMALL
    log = tmp_path / "log"
    around = {"SBATCH_OUTPUT": str(log), "SPARSIFY_CONF": str(tmp_path / "conf")}
    done = fine(process(*words, env={**bench.environment, **around}))
    (job,) = re.findall(r"Submitted batch job (\d+)", done.stdout)
    bench.await_job(job, log)
    assert bench.folders.store.list_newest_valid_attempts()
