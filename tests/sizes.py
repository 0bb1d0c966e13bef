"""The size of each folder, in a measure that neither formatting nor splitting makes smaller.

    python tests/sizes.py                        # print the sizes as budget.yaml has them
    python tests/sizes.py --write                # write them there, keeping its other parts
    python tests/sizes.py --write tests conf     # write those of these rooms alone

Python counts by the nodes of its syntax tree, without docstrings, annotations and operators. An import counts
as any statement does, so a module that is split pays for what both halves import. Other languages and data
count by tokens, so code that moves into YAML, a template or C++ stays counted.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePath

import yaml

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / "budget.yaml"
# How many folders deep a room lies, of each folder of the project whose size counts.
DEPTHS = {
    "sparsify": 2, "analysis": 2, "experiments": 2, "tests": 2,
    "slurm": 1, "conf": 1, "singularity": 1, "examples": 1, ".ci": 1,
}  # fmt: skip
UNCOUNTED = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BY_TOKENS = {
    ".cpp", ".js", ".css", ".yaml", ".jinja", ".sh", ".sbatch", ".bash", ".zsh", ".fish", ".toml", ".def", "",
}  # fmt: skip
TOKEN = re.compile(r"\w+|[^\w\s]")


def count_nodes(source: str) -> int:
    """Return the number of syntax nodes of a Python module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return sum(not isinstance(node, UNCOUNTED) for node in ast.walk(tree))


def room_of(path: PurePath) -> str:
    """Return the folder under whose line of the budget a file counts."""
    folders = path.parts[:-1]
    return "/".join(folders[: DEPTHS[folders[0]]])


def measure_rooms() -> dict[str, int]:
    """Return the size of each room, of the files that git knows."""
    size_by_room = Counter[str]()
    names = subprocess.check_output(["git", "ls-files", *DEPTHS], cwd=ROOT, text=True).splitlines()
    for path in map(PurePath, names):
        if not (ROOT / path).is_file():  # removed, not committed yet
            continue
        text = (ROOT / path).read_text(errors="replace")
        if path.suffix == ".py":
            size_by_room[room_of(path)] += count_nodes(text)
        elif path.suffix in BY_TOKENS:
            size_by_room[f"{room_of(path)} (other)"] += len(TOKEN.findall(text))
    return dict(sorted(size_by_room.items()))


def main() -> None:
    sizes = measure_rooms()
    rooms = sys.argv[2:]
    unknown_rooms = sorted(set(rooms) - set(sizes))
    if unknown_rooms:
        sys.exit(f"no room {', '.join(unknown_rooms)}; there are: {', '.join(sizes)}")
    if sys.argv[1:2] == ["--write"]:
        head, heading, lines_of_budget = BUDGET.read_text().partition("sizes:\n")
        written = {room: sizes[room] for room in rooms or sizes}
        if rooms:
            written = yaml.safe_load(lines_of_budget) | written
        BUDGET.write_text(head + heading + format_sizes(dict(sorted(written.items()))))
        return
    tests = {room: size for room, size in sizes.items() if room.startswith("tests")}
    print(format_sizes(sizes), end="")
    print(f"# nodes of Python: {sum_nodes(sizes) - sum_nodes(tests)}, of tests: {sum_nodes(tests)}")


def format_sizes(sizes: dict[str, int]) -> str:
    """Return the lines of the budget with these sizes."""
    return "".join(f"  {room}: {size}\n" for room, size in sizes.items())


def sum_nodes(sizes: dict[str, int]) -> int:
    """Return the syntax nodes of these rooms together, without what counts by tokens."""
    return sum(size for room, size in sizes.items() if not room.endswith("(other)"))


if __name__ == "__main__":
    main()
