"""Lines of the docs that speak to SLURM, on a real one: as they stand there, but for runs that are small."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path

import pytest

from tests.conftest import ROOT, fine, process
from tests.launch.trouble_there import Bench
from tests.slurm.devcluster import Environment, of_this_venv
from tests.test_readme import LINES, WITH_RUNS

SLURM = "newer"
pytestmark = pytest.mark.slurm
SMALL = ["profile=smoke", "task=cnn_digits"]
SCRIPT = ROOT / "slurm" / "sweep.sbatch"
SCRIPTS_OWN = re.findall(r"^# +(sbatch .*)", SCRIPT.read_text(), re.MULTILINE)
SBATCH = [*dict.fromkeys([*(line for _, line in LINES if line.startswith("sbatch ")), *SCRIPTS_OWN])]
MINE = "cluster mine"  # from where on a page is about the user's own cluster
ALONE = ("new", "doctor")  # have tests of their own: of the file, and with a cluster that has faults
# What lines have as an example, and the development cluster otherwise; and fewer runs.
EXAMPLES = {
    "-p gpu": "-p devel", "--ntasks=8": "--ntasks=2", "--gres=gpu:8": "--gres=gpu:2", "0,1,2": "0",
    "density=0.001,0.01": "density=0.01",
}  # fmt: skip


def on_a_cluster() -> list[str]:
    """Return the lines on the user's own cluster, each once, in the order of their pages."""
    found = list[str]()
    for page in ("README.md", "docs/cluster.md"):
        lines = [line for of, line in LINES if of == page and line.startswith("python -m experiments ")]
        found += dropwhile(lambda line: MINE not in line, lines)
    return [line for line in dict.fromkeys(found) if command_of(line) not in ALONE]


def command_of(line: str) -> str:
    return shlex.split(line)[3]


@pytest.fixture
def bench(devcluster: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Where cluster=mine is the development cluster, as somebody describes it in a file of one's own."""
    file = tmp_path / "conf" / "cluster" / "mine.yaml"
    file.parent.mkdir(parents=True)
    default = "defaults:\n- devcluster\n- override /container@_global_.container: none\n- _self_\n"
    file.write_text(f"{default}slurm_conf: {devcluster['SLURM_CONF']}\n")
    monkeypatch.setenv("SPARSIFY_CONF", str(tmp_path / "conf"))
    return Bench.reached(tmp_path / "results", devcluster, monkeypatch)


def carried_out(line: str, bench: Bench, around: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A line in a shell, which leaves out its comment."""
    for example, here in EXAMPLES.items():
        line = line.replace(example, here)
    words = shlex.split(line, comments=True)
    if words[0] == "sbatch" or words[3] in WITH_RUNS:
        at = words.index("--") if "--" in words else len(words)  # what follows is for sbatch
        words[at:at] = SMALL
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    return process(*words, env={**bench.environment, **around})


def test_the_commands_for_a_cluster_work_in_their_order(bench: Bench, tmp_path: Path) -> None:
    """Runs that were submitted have ended before the next line."""
    lines = on_a_cluster()
    commands = {"plan", "submit", "status", "list", "compare", "reproduce"}
    assert {command_of(line) for line in lines} == commands
    store = bench.folders.store
    for line in lines:
        fine(carried_out(line, bench, {"SPARSIFY_CONF": str(tmp_path / "conf")}))
        bench.await_end(bench.newest())
    assert len(store.all_valid()) == len(store.runs()) > 4


@of_this_venv
@pytest.mark.parametrize("line", SBATCH)
def test_what_is_said_of_sbatch_works(line: str, bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = fine(
        carried_out(line, bench, {"SBATCH_OUTPUT": str(log), "SPARSIFY_CONF": str(tmp_path / "conf")})
    )
    (job,) = re.findall(r"Submitted batch job (\d+)", done.stdout)
    bench.await_job(job, log)
    assert bench.folders.store.all_valid()
