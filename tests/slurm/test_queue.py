"""What SLURM says, passed on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm import queue


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: what all of SLURM's commands print here, and `asked` beside it: their words."""
    script = f'#!/bin/sh\n{{ echo "$@"; env; }} > {tmp_path}/asked\ncat {tmp_path}/says\n'
    for name in ("squeue", "scontrol", "sacct"):
        program = tmp_path / name
        program.write_text(script)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "says"


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ("OverSubscribe=NO", True),  # 22.05
        ("OverSubscribe=OK", False),
        ("OverSubscribe=YES", False),
        ("OverSubscribe=NO Exclusive=NODE", True),  # 26.05
        ("OverSubscribe=NO Exclusive=NO", False),
        ("OverSubscribe=NO Exclusive=USER", False),
        ("", False),
    ],
)
def test_nodes_are_a_jobs_alone_where_its_version_of_slurm_says_so(
    says: Path, fields: str, alone: bool
) -> None:
    says.write_text(f"JobId=7 JobName=a {fields} Contiguous=0 Requeue=1\n")
    assert queue.has_nodes_alone("7") is alone


def test_what_a_person_exported_for_squeue_hides_no_job_from_us(
    says: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says.write_text("7|RUNNING|None|n1|a\n")
    exported = {
        "SQUEUE_STATES": "PENDING", "SQUEUE_PARTITION": "x", "SQUEUE_ACCOUNT": "x", "SQUEUE_NAMES": "x",
        "SQUEUE_QOS": "x", "SQUEUE_LICENSES": "x", "SQUEUE_FORMAT": "%j", "SCANCEL_USER": "x",
        "SACCT_FEDERATION": "1", "SLURM_TIME_FORMAT": "%s", "LOGNAME": "somebody",
    }  # fmt: skip
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    assert [*queue.queue()] == ["7"]
    words, *environment = (says.parent / "asked").read_text().splitlines()
    assert f"--user={os.getuid()}" in words.split()
    assert "--all" in words.split()
    assert not {line.partition("=")[0] for line in environment} & {*exported} - {"LOGNAME"}
