"""Sizes within the budget, tests beside what they test, and documented public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from tests.conftest import ROOT
from tests.sizes import BUDGET, measure_rooms

CODE = ("sparsify", "slurm", "analysis", "experiments")
PACKAGES = ("sparsify", "slurm", "analysis", "examples")
DOCUMENTED = 0.9
SLACK = 0.02  # of a line of the budget, or so many nodes, may be unused
FEW_NODES = 50


def folders(root: Path) -> set[str]:
    """All folders below it that hold Python, as paths from it."""
    return {str(path.parent.relative_to(root)) for path in root.rglob("*.py")} - {"."}


def test_every_folder_of_tests_is_named_as_a_folder_of_the_code() -> None:
    code = folders(ROOT / "experiments") | set(PACKAGES)
    code |= {f"{package}/{folder}" for package in PACKAGES for folder in folders(ROOT / package)}
    assert folders(ROOT / "tests") <= code


def test_every_room_keeps_to_its_line_of_the_budget() -> None:
    """Above it, code was added that nobody has priced; far below it, the line no longer holds anything."""
    sizes = measure_rooms()
    budget = yaml.safe_load(BUDGET.read_text())["sizes"]
    assert sizes.keys() == budget.keys(), "python tests/sizes.py --write"
    excess_by_room = {room: size - budget[room] for room, size in sizes.items() if size > budget[room]}
    assert not excess_by_room, (
        f"remove as much as {excess_by_room} says, or raise these lines in a commit that names the feature: "
        "python tests/sizes.py --write ROOM ..."
    )
    for room, priced in budget.items():
        floor = priced - max(SLACK * priced, FEW_NODES)
        assert sizes[room] >= floor, "lower these lines: python tests/sizes.py --write"


def test_what_is_public_has_a_docstring() -> None:
    documented = [
        ast.get_docstring(node) is not None
        for package in CODE
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"
    ]
    assert sum(documented) >= DOCUMENTED * len(documented)


def test_first_lines_of_docstrings_stand_alone() -> None:
    """None begins with a word that points at something which the line does not name."""
    docstrings = [
        ast.get_docstring(node) or ""
        for folder in (*CODE, "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    vague = re.compile(r"(What|The same|Those|How|Whether|Of|One|It)\b")
    assert list(filter(vague.match, docstrings)) == []
