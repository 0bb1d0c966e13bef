"""Folders with few entries, tests beside what they test, and documented public names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PACKAGES = ("sparsify", "slurm", "analysis", "examples")
CODE = ("sparsify", "slurm", "analysis", "experiments")
# Rooms in which every file is an entry that somebody asks for by its name.
REGISTRIES = (
    "sparsify/methods", "experiments/bench", "experiments/commands", "experiments/figures",
    "experiments/training/datasets",
)  # fmt: skip
MOST_ENTRIES, DOCUMENTED = 15, 0.9


def folders(root: Path) -> set[str]:
    """All folders below it that hold Python, as paths from it."""
    return {str(path.parent.relative_to(root)) for path in root.rglob("*.py")} - {"."}


def modules() -> list[Path]:
    return [path for package in CODE for path in sorted((ROOT / package).rglob("*.py"))]


def test_there_are_at_most_ten_entries_directly_under_experiments() -> None:
    entries = {path.name for path in (ROOT / "experiments").iterdir()} - {"__pycache__"}
    assert len(entries) <= 10, sorted(entries)


def test_what_tests_share_lies_in_the_folder_that_it_serves() -> None:
    loose = {path.name for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert loose == {"conftest.py"}


def test_every_folder_of_tests_is_named_as_a_folder_of_the_code() -> None:
    code = folders(ROOT / "experiments") | set(PACKAGES)
    code |= {f"{package}/{folder}" for package in PACKAGES for folder in folders(ROOT / package)}
    assert folders(ROOT / "tests") <= code


def test_no_room_is_full() -> None:
    entries: dict[str, set[str]] = defaultdict(set)
    for path in modules():
        parts = path.relative_to(ROOT).parts
        for depth, entry in enumerate(parts[1:], 1):
            if entry != "__init__.py":
                entries["/".join(parts[:depth])].add(entry)
    full = {
        room: len(found)
        for room, found in entries.items()
        if len(found) > MOST_ENTRIES and room not in REGISTRIES
    }
    assert not full


def test_what_is_public_has_a_docstring() -> None:
    trees = {path: ast.parse(path.read_text()) for path in modules()}
    nodes = (node for tree in trees.values() for node in tree.body)
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    documented = [
        name in explained(owner, classes)
        for path, tree in trees.items()
        if not path.stem.startswith("_") or path.stem in ("__init__", "__main__")
        for owner, name in public(tree)
    ]
    assert sum(documented) >= DOCUMENTED * len(documented)


def public(owner: ast.Module | ast.ClassDef) -> Iterator[tuple[ast.Module | ast.ClassDef, str]]:
    """The classes, functions and methods in it whose names have no underscore first, each after its owner."""
    for node in owner.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield owner, node.name
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def explained(owner: ast.Module | ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """The names in it that have a docstring: their own or, as `help` shows it, that of what they override."""
    found = {
        node.name
        for node in owner.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    bases = [base.id for base in getattr(owner, "bases", []) if isinstance(base, ast.Name)]
    return found.union(*(explained(classes[base], classes) for base in bases if base in classes))
