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
