"""Guarantees that hold with this machine's SLURM and a newer one (`slurm/devcluster/install --newer`)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from slurm import commands
from tests.conftest import fine
from tests.launch import trouble_there
from tests.launch.trouble_there import Bench
from tests.launch.troubled import await_
from tests.slurm.devcluster import Environment, say

pytestmark = pytest.mark.slurm
SMOKE = (
    "method=topk", "profile=smoke", "task=vector", "train.validate=never", "cluster=devcluster",
    "container=none",
)  # fmt: skip


@pytest.fixture
def bench(each_slurm: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench.reached(tmp_path / "results", each_slurm, monkeypatch)


@pytest.mark.parametrize("words", [["--oversubscribe"], [], ["--exclusive"]], ids=str)
def test_only_an_exclusive_job_has_its_nodes_alone(bench: Bench, words: list[str]) -> None:
    call = ["sbatch", "--parsable", "--output=/dev/null", *words, "--wrap", "sleep 60"]
    job = say(bench.environment, *call).strip()
    await_(lambda: trouble_there.state_of(job) == "RUNNING", "a running job", pause=0.1)
    assert commands.has_exclusive_nodes(job) == (words == ["--exclusive"])
    commands.cancel_jobs([job])


SBATCH = """#!/bin/sh
echo "Welcome. This is your job 3 of 500."
{sbatch} "$@" || exit
echo "Have a nice day."
"""
EXPORTED = {
    "SBATCH_EXPORT": "PATH", "SBATCH_CONSTRAINT": "nvlink", "SBATCH_PARTITION": "urgent", "SBATCH_WAIT": "1",
    "SQUEUE_STATES": "PENDING", "SACCT_FORMAT": "user", "SLURM_TIME_FORMAT": "%s", "USER": "nobody",
}  # fmt: skip


def test_a_sites_own_sbatch_and_what_its_manual_advises_to_export(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "site" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH.format(sbatch=shutil.which("sbatch", path=bench.surroundings["PATH"])))
    program.chmod(0o755)
    path = f"{program.parent}:{bench.surroundings['PATH']}"
    for name, value in EXPORTED.items():
        monkeypatch.setenv(name, value)
    there = replace(bench, surroundings={**bench.surroundings, "PATH": path})
    done = fine(there.command("run", *SMOKE, bench.conf))
    assert "SBATCH_PARTITION=urgent (--partition=devel counts); SBATCH_WAIT=1" in done.stderr
    (attempt,) = bench.folders.store.list_newest_valid_attempts()
    job = say(bench.environment, "scontrol", "--oneliner", "show", "job", str(attempt.slurm_job.id)).split()
    assert {"Partition=devel", "Features=nvlink"} <= {*job}
