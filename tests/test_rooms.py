"""Sizes within the budget, tests beside what they test, and documented public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.sizes import BUDGET, count_nodes, measure_rooms

PACKAGES = ("sparsify", "slurm", "analysis", "examples")
CODE = ("sparsify", "slurm", "analysis", "experiments")
DOCUMENTED = 0.9
SLACK = 0.02  # of a line of the budget, or so many nodes, may be unused
FEW_NODES = 50


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
    assert loose == {"conftest.py", "mutants.py", "sizes.py"}


def test_every_folder_of_tests_is_named_as_a_folder_of_the_code() -> None:
    code = folders(ROOT / "experiments") | set(PACKAGES)
    code |= {f"{package}/{folder}" for package in PACKAGES for folder in folders(ROOT / package)}
    assert folders(ROOT / "tests") <= code


def test_every_room_keeps_to_its_line_of_the_budget() -> None:
    """Above it, code was added that nobody has priced; far below it, the line no longer holds anything."""
    sizes = measure_rooms()
    budget = yaml.safe_load(BUDGET.read_text())["sizes"]
    assert sizes.keys() == budget.keys(), "python tests/sizes.py --write"
    too_large = {room: (size, budget[room]) for room, size in sizes.items() if size > budget[room]}
    too_small = {
        room: (size, budget[room])
        for room, size in sizes.items()
        if size < budget[room] - max(SLACK * budget[room], FEW_NODES)
    }
    assert not too_large, "remove something, or raise these lines in a commit that names the feature"
    assert not too_small, "lower these lines: python tests/sizes.py --write"


@pytest.mark.parametrize(
    "cheaper",
    [
        "x = f(1)  # a comment",
        "def f(x: int) -> list[int]:\n    'A docstring.'\n    return [x]",
        "x = (\n    f(\n        1\n    )\n)",
    ],
)
def test_neither_comments_annotations_nor_layout_count(cheaper: str) -> None:
    bare = {"x": "x = f(1)", "d": "def f(x):\n    return [x]"}[cheaper[0]]
    assert count_nodes(cheaper) == count_nodes(bare)


def test_a_module_that_is_split_is_not_smaller() -> None:
    imports = "import ast\n"
    halves = ["def f():\n    return ast.x\n", "def g():\n    return ast.y\n"]
    assert count_nodes(imports + "".join(halves)) < sum(count_nodes(imports + half) for half in halves)


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
