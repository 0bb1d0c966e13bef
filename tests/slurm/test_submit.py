"""What sbatch is called with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm.submit import submit_array
from slurm.task import RunTask

SBATCH = """#!/bin/sh
env > "$0.saw"
echo Submitted batch job 7
"""


@pytest.mark.parametrize(("given", "seen"), [(None, "/etc/slurm-b/slurm.conf"), ("/mine.conf", "/mine.conf")])
def test_a_job_of_our_own_is_hidden_from_sbatch_and_the_choice_of_a_cluster_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str
) -> None:
    for name in ("sbatch", "srun"):  # submitit submits only where both are
        program = tmp_path / name
        program.write_text(SBATCH)
        program.chmod(0o755)
    around = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_CONF": "/etc/slurm-b/slurm.conf",
        "SLURM_CLUSTERS": "b",
        "SLURM_JOB_ID": "12",
        "SLURM_NTASKS": "4",
        "SBATCH_PARTITION": "other",
        "RANK": "3",
    }
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    options = {"job_name": "a", "time": 5}
    assert submit_array([RunTask("spec", "")], tmp_path / "jobs", options, "python", given) == ["7"]
    there = dict(
        line.split("=", 1) for line in (tmp_path / "sbatch.saw").read_text().splitlines() if "=" in line
    )
    assert there["SLURM_CONF"] == seen
    assert there["SLURM_CLUSTERS"] == "b"
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "RANK"} & set(there)
    assert {name: os.environ[name] for name in around} == around
