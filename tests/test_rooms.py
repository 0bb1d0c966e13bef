"""Where everything is: few entries in experiments/, and tests in folders named as the code's."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT

PACKAGES = ("sparsify", "slurm", "analysis", "examples")


def folders(root: Path) -> set[str]:
    """All folders below it that hold Python, as paths from it."""
    return {str(path.parent.relative_to(root)) for path in root.rglob("*.py")} - {"."}


def test_there_are_at_most_ten_entries_directly_under_experiments() -> None:
    entries = {path.name for path in (ROOT / "experiments").iterdir()} - {"__pycache__"}
    assert len(entries) <= 10, sorted(entries)


def test_every_folder_of_tests_is_named_as_a_folder_of_the_code() -> None:
    code = folders(ROOT / "experiments") | set(PACKAGES)
    code |= {f"{package}/{folder}" for package in PACKAGES for folder in folders(ROOT / package)}
    assert folders(ROOT / "tests") <= code
