"""Lists of files that git tracks, so that tests of documents ignore what a user has added."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT, fine, process


def tracked_modules(folder: Path | str) -> set[str]:
    """Return the names of the modules in a folder that git tracks, without those that start with `_`."""
    done = fine(process("git", "ls-files", f"{ROOT / folder}/[!_]*.py"))
    return {Path(name).stem for name in done.stdout.split()}
