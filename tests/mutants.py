"""Mutation testing: break the code on purpose, and count the breaks that a test notices.

    python tests/mutants.py draw build/mutants --seed 20261129 --number 200
    python tests/mutants.py reach build/mutants
    python tests/mutants.py kill build/mutants

`draw` clones the project into the folder and writes all mutants into that clone's code at once, each behind a
switch that is off. `reach` runs the whole suite there once and notes which tests come by which switch. `kill`
loads the suite once and, for each mutant, forks a process that turns its switch on and runs the tests that
come by, quickest first, until one fails. The same seed draws the same mutants as long as the code is the
same, so two versions of the tests can be compared.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FILES = (
    "sparsify/**/*.py", "analysis/stats.py", "analysis/verdicts.py", "analysis/records/*.py",
    "experiments/config/*.py", "experiments/launch/*.py", "experiments/training/**/*.py",
)  # fmt: skip
# Functions that another compiler reads, which knows no switches.
COMPILED = ("jit", "compile")
SWITCH = """
def _mutant(number):
    import os
    if folder := os.environ.get("MUTANTS_REACHED"):
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(f"{number}\\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\\n")
    return os.environ.get("MUTANT") == str(number)
"""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
DELETED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Assert)
HANGS_S = 60.0  # a test that takes so much longer than without the mutant hangs
MOST_HANGS = 3  # tests that hang with a mutant before it is tried in a process of its own


@dataclass(frozen=True)
class Mutant:
    """A change of the code: where it is, and both texts."""

    number: int
    file: str
    line: int
    before: str
    after: str
    at_import: bool  # outside of functions: no test comes by, it acts when the module is loaded


def mutate(node: ast.AST) -> ast.AST | None:
    """Return the changed node, `ast.Pass` for a deleted statement, None where nothing can be changed."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return ast.BinOp(node.left, SIGNS[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return ast.Constant(node.value + 1)
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, DELETED) and not is_docstring:
        return ast.Pass()
    return None


class Places(ast.NodeVisitor):
    """The nodes of a module that can be mutated, in the order of the text."""

    def __init__(self) -> None:
        self.found = list[tuple[ast.AST, bool]]()
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any(word in ast.unparse(decorator) for decorator in node.decorator_list for word in COMPILED):
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """Pass by `zip(strict=True)` and type variables: their mutants change nothing that runs."""
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg != "strict":
                self.visit(keyword.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Pass by the texts of messages."""

    def visit_match_case(self, node: ast.match_case) -> None:
        for statement in node.body:
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> None:
        if mutate(node) is not None:
            self.found.append((node, self._depth == 0))
        super().generic_visit(node)


class Switches(ast.NodeTransformer):
    """Put a switch at each of these nodes."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers

    def visit(self, node: ast.AST) -> Any:
        number = self.numbers.get(id(node))
        mutated = mutate(node) if number is not None else None
        node = self.generic_visit(node)
        if mutated is None:
            return node
        switch = ast.Call(ast.Name("_mutant", ast.Load()), [ast.Constant(number)], [])
        if isinstance(node, ast.stmt):
            return ast.If(ast.UnaryOp(ast.Not(), switch), [node], [])
        assert isinstance(node, ast.expr)
        assert isinstance(mutated, ast.expr)
        return ast.IfExp(switch, mutated, node)


def draw(folder: Path, seed: int, number: int) -> None:
    """Clone the project into the folder and write this many mutants into its code."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder / "tree")], check=True)
    trees = dict[str, ast.Module]()
    places = list[tuple[str, ast.AST, bool]]()
    for file in sorted({file for pattern in FILES for file in ROOT.glob(pattern)}):
        name = str(file.relative_to(ROOT))
        trees[name] = ast.parse(file.read_text())
        visitor = Places()
        visitor.visit(trees[name])
        places += [(name, node, at_import) for node, at_import in visitor.found]
    drawn = sorted(random.Random(seed).sample(range(len(places)), number))
    mutants = []
    numbers = defaultdict[str, dict[int, int]](dict)
    for mutant, index in enumerate(drawn):
        name, node, at_import = places[index]
        after = ast.unparse(mutated) if (mutated := mutate(node)) else ""
        mutants.append(Mutant(mutant, name, node.lineno, ast.unparse(node), after, at_import))  # type: ignore[attr-defined]
        numbers[name][id(node)] = mutant
    for name, of_file in numbers.items():
        tree = Switches(of_file).visit(trees[name])
        tree.body[count_first(tree) : count_first(tree)] = ast.parse(SWITCH).body
        (folder / "tree" / name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (folder / "mutants.json").write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
    print(f"{number} of {len(places)} places, in {len(numbers)} files")


def count_first(module: ast.Module) -> int:
    """Count the statements that must stay first in a module: its docstring and `from __future__`."""
    has_docstring = ast.get_docstring(module) is not None
    return has_docstring + sum(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in module.body
    )


def run_pytest(folder: Path, words: Sequence[str], **variables: str) -> int:
    """Run pytest in the clone."""
    tree = (folder / "tree").resolve()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-o",
        "addopts=--import-mode=importlib",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), **variables}
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


def reach(folder: Path, words: Sequence[str]) -> None:
    """Run the suite once, and store for each mutant the tests that come by and pass, quickest first."""
    notes = folder.resolve() / "reached"
    times = folder.resolve() / "times.jsonl"
    shutil.rmtree(notes, ignore_errors=True)
    times.unlink(missing_ok=True)
    notes.mkdir()
    run_pytest(folder, ["-p", "tests.mutants", *words], MUTANTS_REACHED=str(notes), MUTANTS_TIMES=str(times))
    seconds_by_test = read_times(folder)
    tests_by_mutant = defaultdict[int, set[str]](set)
    for file in notes.iterdir():
        for line in set(file.read_text(errors="replace").splitlines()):
            number, _, name = line.partition("\t")
            name = re.sub(r" \((setup|call|teardown)\)$", "", name)
            if name in seconds_by_test:
                tests_by_mutant[int(number)].add(name)
    quickest_first = {
        number: sorted(names, key=lambda name: (seconds_by_test[name], name))
        for number, names in tests_by_mutant.items()
    }
    (folder / "reached.json").write_text(json.dumps(quickest_first))
    shutil.rmtree(notes)
    print(f"{len(quickest_first)} mutants are reached by tests that pass")


def read_times(folder: Path) -> dict[str, float]:
    """Return the seconds that each test takes that passes without mutants."""
    return dict(map(json.loads, (folder / "times.jsonl").read_text().splitlines()))


def kill(folder: Path, seconds: float, processes: int, words: Sequence[str]) -> None:
    """Try each mutant that was not tried yet, and print which survive."""
    run_pytest(
        folder,
        ["-p", "tests.mutants", "--capture=sys", "-p", "no:cacheprovider", *words],
        MUTANTS_KILL=str(folder.resolve()), MUTANTS_SECONDS=str(seconds), MUTANTS_PROCESSES=str(processes),
    )  # fmt: skip
    ends = read_ends(folder)
    reached = json.loads((folder / "reached.json").read_text())
    doubtful = set((folder / "doubtful.txt").read_text().splitlines())
    for mutant in read_mutants(folder):
        tests = reached.get(str(mutant.number), [])
        end = ends[mutant.number]["end"] if mutant.number in ends else ""
        if mutant.at_import and not end:
            try_in_new_process(folder, mutant, find_near_tests(folder, mutant), seconds)
        elif end == "hung":
            try_in_new_process(folder, mutant, tests, seconds)
        elif end.startswith("survived") and doubtful.intersection(tests):
            try_in_new_process(folder, mutant, [test for test in tests if test in doubtful], seconds)
    show(folder)


def find_near_tests(folder: Path, mutant: Mutant) -> list[str]:
    """Return the tests of the folder in which a mutant lies, then those of its package, quickest first."""
    folder_of_tests = f"tests/{Path(mutant.file).parent}".replace("tests/experiments", "tests")
    package = "/".join(folder_of_tests.split("/")[:2])
    by_time = sorted(read_times(folder).items(), key=lambda pair: pair[1])
    near = [test for test, _ in by_time if test.startswith(folder_of_tests)]
    return near + [test for test, _ in by_time if test.startswith(package) and test not in near]


def try_in_new_process(folder: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> None:
    """Run tests in a process that has the mutant from its start, as many as fit into the time."""
    seconds_by_test = read_times(folder)
    chosen = list[str]()
    left_s = seconds
    for test in tests:
        if seconds_by_test[test] < left_s:
            chosen.append(test)
            left_s -= seconds_by_test[test]
    (folder / "chosen.txt").write_text("\n".join(chosen))
    began = time.monotonic()
    words = ["-x", "-n", "0", "--timeout", str(HANGS_S), f"@{folder.resolve() / 'chosen.txt'}"]
    code = run_pytest(folder, words, MUTANT=str(mutant.number))
    survived = "survived" if len(chosen) == len(tests) else "survived for as long as tried"
    note(folder / "ends.jsonl", mutant, survived if code == 0 else "killed", seconds=time.monotonic() - began)


def read_mutants(folder: Path) -> list[Mutant]:
    """Return all mutants that were drawn."""
    return [Mutant(**fields) for fields in json.loads((folder / "mutants.json").read_text())]


def read_ends(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what became of each mutant that was tried, by number."""
    file = folder / "ends.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {end["number"]: end for end in map(json.loads, lines)}


def show(folder: Path) -> None:
    """Print how many were killed, in which folders, and the survivors."""
    ends = read_ends(folder)
    for mutant in read_mutants(folder):
        end = ends.get(mutant.number, {"end": "not tried"})
        if end["end"] not in ("killed", "hung"):
            print(f"{end['end']}: {mutant.file}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}")
    print(dict(Counter(end["end"] for end in ends.values())))


# What follows runs within pytest, which loads this file as a plugin.


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took that passed."""
    times = os.environ.get("MUTANTS_TIMES")
    if times and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(times, "a") as file:
            file.write(json.dumps([report.nodeid, round(report.duration, 3)]) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests of each mutant in forked processes, instead of each test once."""
    if "MUTANTS_KILL" not in os.environ:
        return None
    folder = Path(os.environ.pop("MUTANTS_KILL"))
    reached = json.loads((folder / "reached.json").read_text())
    seconds_by_test = read_times(folder)
    ends = folder / "ends.jsonl"
    ended = read_ends(folder)
    items = {item.nodeid: item for item in session.items}
    running = dict[int, Attempt]()
    queue = [m for m in read_mutants(folder) if m.number not in ended and not m.at_import]
    doubtful = set[str]()  # tests that hung: in a forked process some do without a mutant
    hangs = Counter[int]()
    while queue or running:
        while queue and len(running) < int(os.environ["MUTANTS_PROCESSES"]):
            mutant = queue.pop(0)
            names = [name for name in reached.get(str(mutant.number), ()) if name in items]
            tests = [(seconds_by_test[name], items[name]) for name in names if name not in doubtful]
            attempt = Attempt(mutant, tests)
            running[attempt.process] = attempt
        for process, attempt in list(running.items()):
            end = attempt.poll()
            if end is None:
                continue
            del running[process]
            if end[0] == "hung":
                doubtful.add(end[1])
                hangs[attempt.mutant.number] += 1
                if hangs[attempt.mutant.number] < MOST_HANGS:
                    queue.insert(0, attempt.mutant)
                    continue
            note(ends, attempt.mutant, *end)
        time.sleep(0.02)
    (folder / "doubtful.txt").write_text("\n".join(sorted(doubtful)))
    return True


def note(ends: Path, mutant: Mutant, end: str, by: str = "", seconds: float = 0.0) -> None:
    with ends.open("a") as file:
        file.write(json.dumps({"number": mutant.number, "end": end, "by": by, "s": round(seconds, 1)}) + "\n")


class Attempt:
    """A forked process that runs the tests of one mutant."""

    def __init__(self, mutant: Mutant, tests: Sequence[tuple[float, pytest.Item]]) -> None:
        self.mutant = mutant
        self.began = time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="mutant"))
        self._seconds = {item.nodeid: took for took, item in tests}
        self._is_reached = bool(tests)
        self.process = os.fork()
        if self.process == 0:
            self._run([item for _, item in tests])

    def _run(self, items: Sequence[pytest.Item]) -> None:
        """Run the tests until one fails; the process ends here."""
        from _pytest.runner import runtestprotocol

        os.setsid()
        os.environ["MUTANT"] = str(self.mutant.number)
        code = 0
        try:
            if items:
                (self._scratch / "tmp").mkdir()
                items[0].config._tmp_path_factory._basetemp = self._scratch / "tmp"  # type: ignore[attr-defined]
            until = self.began + float(os.environ["MUTANTS_SECONDS"])
            for place, item in enumerate(items):
                if time.monotonic() > until:
                    code = 3
                    break
                (self._scratch / "test").write_text(item.nodeid)
                following = items[place + 1] if place + 1 < len(items) else None
                if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                    code = 1
                    break
        except BaseException:
            code = 1
        finally:
            os._exit(code)

    def poll(self) -> tuple[str, str, float] | None:
        """Return how it ended, by which test, after how many seconds; None while it runs."""
        ended, status = os.waitpid(self.process, os.WNOHANG)
        file = self._scratch / "test"
        test = file.read_text() if file.exists() else ""
        took = time.monotonic() - self.began
        if not ended:
            if not file.exists() or time.time() - file.stat().st_mtime < HANGS_S + 5 * self._seconds.get(
                test, 0
            ):
                return None
            self._clear()
            os.waitpid(self.process, 0)
            return "hung", test, took
        self._clear()
        if not self._is_reached:
            return "not reached", "", took
        codes = {0: "survived", 3: "survived for as long as tried"}
        return codes.get(os.waitstatus_to_exitcode(status), "killed"), test, took

    def _clear(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=["draw", "reach", "kill", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=120, help="of tests that pass, at most, for each mutant"
    )
    parser.add_argument("--processes", type=int, default=2)
    asked, words = parser.parse_known_args()
    if asked.act == "draw":
        draw(asked.folder, asked.seed, asked.number)
    elif asked.act == "reach":
        reach(asked.folder, words)
    elif asked.act == "kill":
        kill(asked.folder, asked.seconds, asked.processes, words)
    else:
        show(asked.folder)


if __name__ == "__main__":
    main()
