"""Sweeps of several clusters, and of somebody else: which SLURM is asked, with which configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from analysis.records.schema import JobNote
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import python

Ran = CompletedProcess[str]
Command = Callable[..., Ran]

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
def noted(tmp_path: Path) -> Path:
    return tmp_path / "noted"


@pytest.fixture
def command(tmp_path: Path, noted: Path) -> Command:
    """A command of ours where SLURM is only noted; conf/cluster knows the configurations a and b."""
    for name in ("squeue", "sacct", "scancel", "scontrol", "sinfo"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(SLURM)
        program.chmod(0o755)
    for name in ("a", "b"):
        file = tmp_path / "conf" / "cluster" / f"{name}_slurm.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [generic_slurm]\nslurm_conf: ~/{name}.conf\n")

    def run(*words: str, **surroundings: str) -> Ran:
        around = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"} | {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "NOTED": str(noted),
            "SPARSIFY_RESULTS": str(tmp_path / "results"), "SPARSIFY_CONF": str(tmp_path / "conf"),
        }  # fmt: skip
        return python("-m", "experiments", *words, env=around | surroundings)

    return run


def sweep(tmp_path: Path, name: str, slurm_conf: str | None, seed: int) -> None:
    """A sweep of one run, whose job is number 7."""
    folders = Folders(tmp_path / "results")
    attempt = folders.store.begin(synthetic.config(seed=seed))
    attempt.update(state="running", sweep=name)
    attempt.note_job(JobNote("7"))
    folders.launch(attempt).mkdir(parents=True, exist_ok=True)
    array = {
        "name": f"{name}-a0", "folder": "a0", "shape": "1 node", "nodes": 1,
        "jobs": [{"id": "7", "runs": [attempt.run_id]}],
    }  # fmt: skip
    note = {"name": name, "created": "2026-01-01T00:00:00Z", "slurm_conf": slurm_conf, "arrays": [array]}
    (folders.sweeps / name).mkdir(parents=True)
    (folders.sweeps / name / "sweep.json").write_text(json.dumps(note))


def test_each_sweep_is_asked_for_and_cancelled_on_its_own_cluster(
    tmp_path: Path, command: Command, noted: Path
) -> None:
    sweep(tmp_path, "on-a", "~/a.conf", 1)
    sweep(tmp_path, "on-b", f"{tmp_path}/b.conf", 2)
    done = command("status")
    assert (done.returncode, done.stdout.count("1 running")) == (0, 2), done
    noted.unlink()
    done = command("cancel", "on-a", "on-b")
    assert (done.returncode, done.stdout[:16]) == (0, "cancelled 2 jobs"), done
    for conf in ("a", "b"):
        assert f"{tmp_path}/{conf}.conf scancel 7\n" in noted.read_text()


@pytest.mark.parametrize("words", [["status"], ["status", "theirs"], ["cancel", "theirs"]])
def test_the_configuration_that_a_strangers_results_name_is_never_read(
    tmp_path: Path, command: Command, noted: Path, words: list[str]
) -> None:
    theirs = f"{tmp_path}/results/slurm.conf"
    sweep(tmp_path, "theirs", theirs, 1)
    done = command(*words)
    assert done.returncode == (2 if words[0] == "cancel" else 0), done
    assert "export it as SLURM_CONF" in done.stderr
    assert not noted.exists()
    known = command(*words, SLURM_CONF=theirs)
    assert known.returncode == 0, known
    assert theirs in noted.read_text()
