"""`submit` and `plan` where there is no SLURM."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Command, fine, refused


def test_where_there_is_no_slurm_that_is_said(here: Command, tmp_path: Path) -> None:
    words = ("method=topk", "cluster=devcluster", "profile=smoke", "task=cnn_digits", "container=none")
    refused(here("submit", *words, PATH=str(tmp_path)), "no squeue", "make slurm-up")
    refused(here("submit", "method=topk"), "conf/cluster")
    done = fine(here("plan", *words, PATH=str(tmp_path)))
    assert "1 runs, 1 not measured" in done.stdout
