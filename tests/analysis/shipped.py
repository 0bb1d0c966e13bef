"""Lists of what the repository ships, so that tests of documents ignore what a user has added."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT, fine, process


def shipped(folder: Path | str) -> set[str]:
    """Return the entries of a folder that git tracks, by the names of their Python files."""
    done = fine(process("git", "ls-files", f"{ROOT / folder}/[!_]*.py"))
    return {Path(name).stem for name in done.stdout.split()}
