"""What comes with the repository: tests of documents and lists ask nothing of what a user has added."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT, fine, process


def shipped(folder: Path | str) -> set[str]:
    """The entries of a folder that git has, by the names of their Python files."""
    done = fine(process("git", "ls-files", f"{ROOT / folder}/[!_]*.py"))
    return {Path(name).stem for name in done.stdout.split()}
