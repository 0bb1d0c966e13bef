"""Sweeps of several clusters, and of somebody else: which SLURM is asked, with which configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from analysis.records.schema import JobNote
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import Command, fine

# What all of SLURM's commands are here: they note how they were called, and every cluster has a job 7.
SLURM = """#!/bin/sh
echo "$SLURM_CONF $(basename "$0") $*" >> "$NOTED"
[ "$(basename "$0")" = squeue ] && cat <<END
JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND
7|RUNNING|None|n1|N/A|job|/a
END
exit 0
"""


@pytest.fixture
def slurm_here(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Carry out commands where SLURM is only noted; conf/cluster knows the configurations a and b."""
    for name in ("squeue", "sacct", "scancel", "scontrol", "sinfo"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(SLURM)
        program.chmod(0o755)
    for name in ("a", "b"):
        file = tmp_path / "conf" / "cluster" / f"{name}_slurm.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [generic_slurm]\nslurm_conf: ~/{name}.conf\n")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for name, value in {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": tmp_path, "NOTED": tmp_path / "noted",
        "SPARSIFY_CONF": tmp_path / "conf",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return here


def sweep(tmp_path: Path, name: str, slurm_conf: str, seed: int) -> None:
    """Note a sweep of one run, whose job is number 7."""
    folders = Folders(tmp_path / "results")
    attempt = folders.store.begin(synthetic.config(seed=seed))
    attempt.update(state="running", sweep=name)
    attempt.note_job(JobNote("7"))
    folders.launch(attempt).mkdir(parents=True)
    jobs = [{"id": "7", "runs": [attempt.run_id]}]
    array = {"name": f"{name}-a0", "folder": "a0", "shape": "1 node", "nodes": 1, "jobs": jobs}
    note = {"name": name, "created": "2026-01-01T00:00:00Z", "slurm_conf": slurm_conf, "arrays": [array]}
    (folders.sweeps / name).mkdir(parents=True)
    (folders.sweeps / name / "sweep.json").write_text(json.dumps(note))


def test_each_sweep_is_asked_for_and_cancelled_on_its_own_cluster(
    slurm_here: Command, tmp_path: Path
) -> None:
    sweep(tmp_path, "on-a", "~/a.conf", 1)
    sweep(tmp_path, "on-b", f"{tmp_path}/b.conf", 2)
    assert fine(slurm_here("status")).stdout.count("1 running") == 2
    (tmp_path / "noted").unlink()
    assert fine(slurm_here("cancel", "on-a", "on-b")).stdout.startswith("cancelled 2 jobs")
    for name in ("a", "b"):
        assert f"{tmp_path}/{name}.conf scancel 7\n" in (tmp_path / "noted").read_text()


def test_the_configuration_that_a_strangers_results_name_is_never_read(
    slurm_here: Command, tmp_path: Path
) -> None:
    theirs = f"{tmp_path}/results/slurm.conf"
    noted = tmp_path / "noted"
    sweep(tmp_path, "theirs", theirs, 1)
    for words in ("status", "status theirs", "cancel theirs"):
        done = slurm_here(*words.split())
        assert done.returncode == (2 if words.startswith("cancel") else 0), done
        assert "export it as SLURM_CONF" in done.stderr
        assert not noted.exists()
        fine(slurm_here(*words.split(), SLURM_CONF=theirs))
        assert theirs in noted.read_text()
        noted.unlink()
