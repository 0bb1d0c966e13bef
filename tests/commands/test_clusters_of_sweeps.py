"""Sweeps of several clusters, and of somebody else: which SLURM is asked, with which configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.records.schema import JobNote
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import Command, fine
from tests.slurm.programs import NAMES, Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module

HEAD = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND"
NOTE = "$(echo $SLURM_CONF ${0##*/} $* >> $NOTED)"  # which they print as nothing


@pytest.fixture
def slurm_here(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs) -> Command:
    """Carry out commands where SLURM is only noted; conf/cluster knows the configurations a and b."""
    for name in NAMES:
        programs.prints(name, NOTE)
    programs.prints("squeue", f"{HEAD}{NOTE}\n7|RUNNING|None|n1|N/A|job|/a")
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"{name}_slurm.yaml").write_text(f"defaults: [generic_slurm]\nslurm_conf: ~/{name}.conf\n")
    for name, path in {"HOME": "", "NOTED": "noted", "SPARSIFY_CONF": "conf"}.items():
        monkeypatch.setenv(name, str(tmp_path / path))
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
