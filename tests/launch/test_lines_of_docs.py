"""Lines of the docs that speak to SLURM, on a real one: as they stand there, but for runs that are small."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import jobs
from tests.conftest import ROOT, fine
from tests.launch.trouble_there import Bench
from tests.launch.troubled import await_
from tests.slurm.devcluster import Environment, say
from tests.test_readme import LINES, WITH_RUNS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
MINE, EXPERIMENTS, SBATCH = "cluster=mine", "python -m experiments ", "sbatch "
SMALL = ["profile=smoke", "task=cnn_digits", "train.validate=never"]
SCRIPT = ROOT / "slurm" / "sweep.sbatch"
SAID = [
    *LINES,
    *(("sweep.sbatch", line) for line in re.findall(r"^# +(sbatch .*)", SCRIPT.read_text(), re.MULTILINE)),
]
ON_CLUSTERS = {page for page, line in SAID if MINE in line}
ALONE = ("new", "doctor")  # have tests of their own: of the file, and with a cluster that has faults
# What lines have as an example, and the development cluster otherwise.
EXAMPLES = {"-p gpu": "-p devel", "--ntasks=8": "--ntasks=2", "--gres=gpu:8": "--gres=gpu:2"}


def lines(beginning: str) -> list[str]:
    """Lines of pages on clusters, each once, in the order of their pages."""
    found = [
        line
        for page, line in SAID
        if line.startswith(beginning) and (page in ON_CLUSTERS or beginning == SBATCH)
    ]
    return list(dict.fromkeys(found))


@pytest.fixture
def bench(devcluster: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Where cluster=mine is the development cluster, as somebody describes it in a file of one's own."""
    file = tmp_path / "conf" / "cluster" / "mine.yaml"
    file.parent.mkdir(parents=True)
    default = "defaults:\n- devcluster\n- override /container@_global_.container: none\n- _self_\n"
    file.write_text(f"{default}slurm_conf: {devcluster['SLURM_CONF']}\n")
    bench = Bench(tmp_path / "results", devcluster)
    for name, value in {**bench.reaching, "SPARSIFY_CONF": str(tmp_path / "conf")}.items():
        monkeypatch.setenv(name, value)
    return bench


def carried_out(line: str, bench: Bench, around: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A line in a shell, which leaves out its comment."""
    for example, here in EXAMPLES.items():
        line = line.replace(example, here)
    words = shlex.split(line, comments=True)
    if words[0] == "sbatch" or words[3] in WITH_RUNS:
        words += SMALL
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**bench.environment, **around},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_commands_for_a_cluster_work_in_their_order(bench: Bench, tmp_path: Path) -> None:
    """Runs that were submitted have ended before the next line."""
    around = {"SPARSIFY_CONF": str(tmp_path / "conf")}
    found = [line for line in lines(EXPERIMENTS) if shlex.split(line, comments=True)[3] not in ALONE]
    assert {shlex.split(line, comments=True)[3] for line in found} >= {
        "plan",
        "submit",
        "status",
        "list",
        "reproduce",
    }
    for line in found:
        fine(carried_out(line, bench, around))
        bench.await_end(
            [last for run in bench.folders.store.runs() for last in bench.folders.store.attempts(run)[-1:]]
        )
    assert {
        attempt.state for run in bench.folders.store.runs() for attempt in bench.folders.store.attempts(run)
    } == {"ok"}


@pytest.mark.parametrize("line", lines(SBATCH))
def test_what_is_said_of_sbatch_works(line: str, bench: Bench, tmp_path: Path) -> None:
    if not (ROOT / ".venv").exists():
        pytest.skip("sweep.sbatch runs .venv of the checkout, and these tests run in another environment")
    log = tmp_path / "log"
    done = fine(
        carried_out(line, bench, {"SBATCH_OUTPUT": str(log), "SPARSIFY_CONF": str(tmp_path / "conf")})
    )
    (job,) = re.findall(r"Submitted batch job (\d+)", done.stdout)
    await_(lambda: job not in jobs.live([job]), "the end of the job", pause=0.5)
    assert "ExitCode=0:0" in say(bench.environment, "scontrol", "show", "job", job), log.read_text()
    assert bench.folders.store.all_valid()
