"""Sweeps of several clusters, and of somebody else: which SLURM is asked, with which configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Command, fine
from tests.slurm.programs import NAMES, Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module

JOB = "runs-00$([ ${SLURM_CONF##*/} = b.conf ] && echo 2 || echo 1)-a0"  # the second is on b
HEAD = "JOBID|STATE|REASON|NODELIST|END_TIME|NAME|COMMAND"
NOTE = "$(echo $SLURM_CONF ${0##*/} $* >> $NOTED)"  # which they print as nothing


@pytest.fixture
def slurm_here(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs) -> Command:
    """Carry out commands where SLURM is only noted; conf/cluster knows the configurations a and b."""
    for name in NAMES:
        programs.prints(name, f"{NOTE}7" if name == "sbatch" else NOTE)
    programs.prints("squeue", f"{HEAD}{NOTE}\n7|RUNNING|None|n1|N/A|{JOB}|/a")
    folder = tmp_path / "conf" / "cluster"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"{name}_slurm.yaml").write_text(f"defaults: [generic_slurm]\nslurm_conf: ~/{name}.conf\n")
    for name, path in {"HOME": "", "NOTED": "noted", "SPARSIFY_CONF": "conf"}.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    return here


def submit(slurm_here: Command, *words: str) -> str:
    """Queue a sweep of one run, whose job is number 7; return its name."""
    smoke = ("task=cnn_digits", "profile=smoke", "container=none")
    return fine(slurm_here("submit", "method=topk", *smoke, *words)).stdout.strip()


def test_each_sweep_is_asked_for_and_cancelled_on_its_own_cluster(
    slurm_here: Command, tmp_path: Path
) -> None:
    on_a = submit(slurm_here, "cluster=a_slurm", "seed=1")
    on_b = submit(slurm_here, "cluster=b_slurm", "seed=2")
    assert fine(slurm_here("status")).stdout.count("1 queued") == 2
    assert fine(slurm_here("cancel", on_a, on_b)).stdout.startswith("cancelled 2 jobs")
    for name in ("a", "b"):
        assert f"{tmp_path}/{name}.conf scancel 7\n" in (tmp_path / "noted").read_text()


def test_the_configuration_that_a_strangers_results_name_is_never_read(
    slurm_here: Command, tmp_path: Path
) -> None:
    theirs = f"{tmp_path}/results/slurm.conf"
    noted = tmp_path / "noted"
    name = submit(slurm_here, "cluster=a_slurm")
    noted.unlink()
    note = tmp_path / "results" / "sweeps" / name / "sweep.json"
    note.write_text(note.read_text().replace("~/a.conf", theirs))
    for words in ("status", f"status {name}", f"cancel {name}"):
        done = slurm_here(*words.split())
        assert done.returncode == (2 if words.startswith("cancel") else 0), done
        assert "export it as SLURM_CONF" in done.stderr
        assert not noted.exists()
        fine(slurm_here(*words.split(), SLURM_CONF=theirs))
        assert theirs in noted.read_text()
        noted.unlink()
