"""SLURM's commands where there is no SLURM: each prints what a test says, and notes how it was called."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import jobs

NAMES = ("sbatch", "squeue", "sacct", "scontrol", "scancel")
PROGRAM = """#!/bin/sh
printf '%s\\n' "$@" > "$0.words"
env > "$0.environment"
{variables}
{gone}
case "$*" in *"{unless}"*) echo "$0: not here" >&2; exit 1;; esac
cat <<END{stream}
{text}
END
exit {code}
"""
ONCE = '[ ! -e "$0.called" ] || exit 0; touch "$0.called"'


class Programs:
    """A folder of such programs, first of $PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in NAMES:
            self.prints(name, "")

    def prints(
        self,
        name: str,
        text: str,
        code: int = 0,
        unless: str = "no such word",
        once: bool = False,
        **variables: str,
    ) -> None:
        """Let it print a text from now on: an error if it ends with a code, or is told a word.

        `once`: from its second call on it prints nothing. The text may have these variables.
        """
        program = self.folder / name
        program.write_text(
            PROGRAM.format(
                text=text, code=code, unless=unless, gone=ONCE if once else "", stream=" >&2" if code else "",
                variables="\n".join(f'{name}="{value}"' for name, value in variables.items()),
            )
        )  # fmt: skip
        program.chmod(0o755)

    def words(self, name: str) -> list[str]:
        """Its words when it was called last; none before."""
        noted = self.folder / f"{name}.words"
        return noted.read_text().splitlines() if noted.exists() else []

    def environment(self, name: str) -> dict[str, str]:
        """Its variables when it was called last."""
        lines = (self.folder / f"{name}.environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Instead of SLURM's."""
    for name in [*os.environ]:
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    found = Programs(tmp_path / "programs")
    monkeypatch.setenv("PATH", str(found.folder), prepend=os.pathsep)
    jobs._cluster_settings.cache_clear()
    yield found
    jobs._cluster_settings.cache_clear()
