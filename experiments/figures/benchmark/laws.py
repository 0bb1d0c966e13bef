"""Laws of an entry, checked before it costs hours.

They are the suite's, what its file may use, and three that need processes of their own.
"""

from __future__ import annotations

import ast
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import yaml

from analysis.benchmark.statement import LawResult
from experiments.config import code_version
from experiments.config.folders import ROOT
from experiments.figures.benchmark.entries import Entrant
from sparsify.methods import REGISTRY as METHODS

REWRITTEN = Path(__file__).parent / "rewritten.yaml"
# A method's file may import these, and nothing by which data, files or other processes can be reached.
IMPORTS = {
    "__future__", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "itertools",
    "math", "numpy", "operator", "sparsify", "statistics", "torch", "types", "typing", "warnings",
}  # fmt: skip
FORBIDDEN = {
    "setattr",
    "getattr",
    "open",
    "exec",
    "eval",
    "compile",
    "__import__",
    "globals",
    "breakpoint",
    "input",
}
PARTS = {
    ("torch", name)
    for name in (
        "distributed", "load", "save", "hub", "multiprocessing", "from_file", "os", "sys", "serialization",
        "set_", "autograd.set_", "utils", "package", "ops", "_C", "jit", "cuda",
    )
}  # fmt: skip
PARTS |= {("numpy", "memmap"), ("sparsify", "comm.virtual")}
FOLDER = METHODS.package.replace(".", "/")  # of methods, in a checkout
LAW_TESTS = ("tests/sparsify/test_laws.py", "tests/sparsify/local")
LIMIT_S, NO_TESTS = 900, 5  # pytest's exit code where none was selected
# Of the trainings in processes of their own, `_probe`; HALF lies within a round of most local steps.
SIZE, STEPS, HALF = 2, 40, 17
PAST = 3  # the exit code of one that reached past what it is given


class BrokenLawError(ValueError):
    """An entry breaks a law that it does not name."""


class Probe(NamedTuple):
    """A process of `_probe`, and what it said."""

    digests: list[str]
    why: str  # it ended without


def check_laws(entry: Entrant, say: Callable[[str], None]) -> list[LawResult]:
    """Return all laws of an entry, those that it is excused from among them.

    Raises:
        BrokenLawError: one that it is not excused from, with what to do.
    """
    say(f"{entry.name}: the laws of {entry.method}, the suite's and those of processes of their own")
    found = list[LawResult]()
    for part in (_static, _apart, _suite):  # what is quick first
        found += part(entry)
        if broken := [law for law in found if not law.holds]:
            raise BrokenLawError(_sentence(entry, broken))
    excused = METHODS.build(entry.method, method_values(entry)).broken_laws()
    return [*found, *(LawResult(name, False, why) for name, why in excused.items())]


def method_values(entry: Entrant) -> dict[str, Any]:
    """Return the method's values, with the defaults of what is searched."""
    fixed = {key[7:]: value for key, value in entry.settings.items() if key.startswith("method.")}
    return {**{name: tried[0] for name, tried in entry.search.items()}, **fixed}


def _sentence(entry: Entrant, broken: list[LawResult]) -> str:
    lines = "; ".join(f"{law.name}: {law.why}" for law in broken)
    return f"{entry.name} can't enter: {lines} (rule 2, docs/benchmark.md#laws-first)"


def find_method_files(method: str) -> list[Path]:
    """Return a method's file, those beside it that it imports, and what they import in turn.

    Return none for a method that is no file there.
    """
    imported = sorted(code_version.add_imported_names([method]) - {method})
    paths = [METHODS.folder / f"{name}.py" for name in (method, *imported)]
    return [path for path in paths if path.exists()]


def read_method_code(method: str) -> str:
    """Return the text of a method's files, the method's own first."""
    own, beside = find_method_files(method)[:1], sorted(find_method_files(method)[1:])
    more = (f"\n\n# --- {path.name}\n{path.read_text()}" for path in beside)
    return "".join((*(path.read_text() for path in own), *more))


def is_todays_method_code(method: str, code: str) -> bool:
    """Return whether a text that an entry carries is the method's text of today.

    So is an earlier text that `rewritten.yaml` lists: names and comments changed, the results did not.
    """
    today = read_method_code(method)
    return bool(today) and (code == today or _rewritten().get(digest_text(code)) == digest_text(today))


def digest_text(text: str) -> str:
    """Return 16 hexadecimal digits that differ when the texts do."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rewritten() -> dict[str, str]:
    pairs: list[dict[str, str]] = yaml.decode(REWRITTEN.read_bytes())
    return {pair["before"]: pair["today"] for pair in pairs}


def _static(entry: Entrant) -> Iterator[LawResult]:
    """Check that the method's files use nothing but what they may, as far as their text shows it."""
    found = [fault for path in find_method_files(entry.method) for fault in find_forbidden_uses(path)]
    yield LawResult("nothing but what it is handed", not found, "; ".join(found))


def find_forbidden_uses(path: Path) -> Iterator[str]:
    """Yield the uses in a method's file that are not for methods, with their lines."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"] if node.value.id in ("torch", "numpy", "np") else []
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN:
            yield f"{path.name}, line {node.lineno}: {node.id} is no part of a method"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for lhs in targets:
                if isinstance(lhs, ast.Attribute) and _root(lhs) in imported:
                    yield f"{path.name}, line {node.lineno}: {ast.unparse(lhs)} is not a method's to change"
        for name in names:
            top, _, rest = name.replace("np.", "numpy.", 1).partition(".")
            if top not in IMPORTS or any(top == module and rest.startswith(part) for module, part in PARTS):
                yield f"{path.name}, line {getattr(node, 'lineno', 1)}: {name} is not for methods to use"


def _root(node: ast.expr) -> str:
    """Return the name that an attribute hangs on: torch of torch.backends.cudnn.enabled."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def digest_law_tests() -> str:
    """Return a digest of the tests that state the laws."""
    paths = sorted(path for place in LAW_TESTS for path in [ROOT / place, *(ROOT / place).rglob("*.py")])
    return digest_text("".join(path.read_text() for path in paths if path.is_file()))


def _suite(entry: Entrant) -> Iterator[LawResult]:
    """Run the repository's tests that have the method as a parameter."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--method",
        entry.method, *LAW_TESTS,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        yield LawResult("the law suite", False, f"it did not end within {LIMIT_S} s")
        return
    if "No module named pytest" in done.stderr:
        raise ValueError("the law suite needs pytest: `make .venv/.dev` installs it")
    if done.returncode == NO_TESTS:
        # No law is parametrised with the names of strategies of local steps; those of `_apart` hold of them.
        if not _is_local(entry):
            yield LawResult(
                "the law suite", False, f"no test has the name {entry.method}: is `every` its parameter?"
            )
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    why = "" if done.returncode == 0 else "; ".join(line[:200] for line in lines[-3:]) or "it failed"
    yield LawResult("the law suite", done.returncode == 0, why)


def _is_local(entry: Entrant) -> bool:
    from sparsify.local.strategy import LocalSteps  # torch comes with it

    return isinstance(METHODS.build(entry.method, method_values(entry)), LocalSteps)


def _apart(entry: Entrant) -> Iterator[LawResult]:
    """Laws that need processes of their own."""
    whole, second, *joined = _probes(entry)
    failed = [each.why for each in (whole, second, *joined) if each.why]
    yield LawResult("it trains, and reaches for nothing else", not failed, "; ".join(dict.fromkeys(failed)))
    if failed:
        return
    of_ranks = [whole.digests[at : at + STEPS] for at in range(0, SIZE * STEPS, STEPS)]
    rest = [second.digests[at : at + STEPS - HALF] for at in range(0, len(second.digests), STEPS - HALF)]
    resumed = min(_same(own[HALF:], later) for own, later in zip(of_ranks, rest, strict=True))
    yield LawResult(
        "all state is saved", resumed == STEPS - HALF,
        f"after {resumed} of {STEPS - HALF} steps it goes on otherwise in another process than without "
        "having been saved: some state is outside of state_dict",
    )  # fmt: skip
    alike = min(_same(own, each.digests) for own, each in zip(of_ranks, joined, strict=True))
    yield LawResult(
        "processes and virtual workers do the same", alike == STEPS,
        f"after {alike} steps workers in processes of their own do otherwise than virtual ones, which share "
        "memory: what they exchange must go through Comm",
    )  # fmt: skip


def _same(one: list[str], other: list[str]) -> int:
    """Return the number of steps that agree, from the first."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))])


def _probes(entry: Entrant) -> list[Probe]:
    """Run the trainings of `_probe`: as a whole, its second half, and one of each process."""
    with tempfile.TemporaryDirectory() as folder:
        declared = Path(folder) / "entry.json"
        declared.write_text(json.dumps({"method": entry.method, "values": method_values(entry)}))
        command = [sys.executable, "-m", "experiments.figures.benchmark._probe", str(declared), folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainings of {entry.name}'s laws could not begin: {done.stderr}")
    return [_probe(**each) for each in json.loads(done.stdout.splitlines()[-1]).values()]


def _probe(code: int, said: str, digests: list[str]) -> Probe:
    last = (said.strip().splitlines() or [f"exit code {code}"])[-1]
    if code == -signal.SIGKILL:
        last = f"it did not end within {LIMIT_S} s, or memory ran out"
    return Probe(digests, "" if code == 0 else last if code == PAST else f"its training ended: {last}")
