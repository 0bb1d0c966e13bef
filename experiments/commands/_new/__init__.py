"""Files to begin with, for what users add: figures, methods, tasks, data sets, clusters.

Those beside this one are working code, checked as such; `example` in them becomes the name that was asked
for. A cluster's is a copy of conf/cluster/generic_slurm.yaml.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from experiments import figures
from experiments.config import choices
from experiments.config.folders import ROOT
from sparsify.ranges import shown

Kind = Literal["figure", "method", "task", "dataset", "cluster"]
FOLDER = Path(__file__).parent
FOLDERS: dict[str, Path] = {
    "figure": figures.FOLDER,
    "method": ROOT / "sparsify" / "methods",
    "task": ROOT / "experiments" / "tasks",
    "dataset": ROOT / "experiments" / "training" / "datasets",
    "cluster": ROOT / "conf" / "local" / "cluster",
}
CLUSTER = ROOT / "conf" / "cluster" / "generic_slurm.yaml"
WIDEST = 110  # characters of a line, as pyproject.toml has it
LONGEST = 40  # characters of a name: longer ones would break the lines of the file
EXAMPLES = {
    "figure": "thesis_density", "method": "comb", "task": "mlp_digits", "dataset": "patterns",
    "cluster": "mine",
}  # fmt: skip
CALL = "python -m experiments"
TRY = "profile=smoke cluster=virtual"


def text(kind: Kind, name: str) -> str:
    """The file's text.

    Raises:
        ValueError: there can be no file of this name.
    """
    check_name(kind, name)
    if kind == "cluster":
        header = f"# The cluster {name}: change what differs, and take cluster={name}.\n"
        return header + CLUSTER.read_text().partition("\n")[2]
    source = re.sub(r"\bexample\b", name, (FOLDER / f"{kind}.py").read_text())
    title = _item(name) if kind == "figure" else name
    source = source.replace("EXAMPLE", title, 1)
    return _assigned(source, {"DATASET": _quoted(_dataset_of(name))}) if kind == "task" else source


def figure(name: str, title: str, runs: Sequence[Sequence[str]], axes: Mapping[str, str]) -> str:
    """The text of a figure's file with these runs.

    Args:
        runs: the settings of each, as one would type them behind `run`.
        axes: x, y, by and ref of its `analysis.comparison.Comparison`.
    """
    given = ", ".join(f"{axis}={_quoted(value)}" for axis, value in axes.items())
    values = {"TITLE": _quoted(title), "COMPARED": f"Comparison({given})", "RUNS": _listed(runs)}
    kept = _without(_assigned(text("figure", name), values), ("claims", "_gap"))
    unused = ("analysis.claims", "analysis.stats")  # by what is left
    return "".join(line for line in kept.splitlines(keepends=True) if not line.startswith(_imports(unused)))


def write(kind: Kind, name: str, content: str) -> Path:
    """The new file. One that is there already is never overwritten.

    Raises:
        ValueError: there is one.
    """
    path = _path(kind, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(content)
    except FileExistsError:
        raise ValueError(f"{path} is there already: take another name, or remove it") from None
    return path


def next_commands(kind: Kind, name: str) -> tuple[str, str]:
    """What to type next: one tries it out, one goes on."""
    if kind == "figure":
        item = next(item for item, module in figures.items().items() if module.endswith(f".{name}"))
        return f"{CALL} reproduce {item} profile=smoke", f"{CALL} reproduce {item}"
    if kind == "dataset":
        return f"{CALL} new task cnn_{name}", f"{CALL} run task=cnn_{name} method=topk {TRY}"
    if kind == "cluster":
        return f"{CALL} plan fig4 cluster={name}", f"{CALL} plan fig4 cluster={name} --sbatch"
    if kind == "task":
        return f"{CALL} run task={name} method=topk {TRY}", f"{CALL} run task={name} method=dense,topk"
    return (
        f"{CALL} run method={name} task=cnn_digits {TRY}",
        f"python -m pytest tests/sparsify/test_laws.py -k {name}",
    )


def check_name(kind: Kind, name: str) -> None:
    """
    Raises:
        ValueError: there can be no such name, or it is taken; what to do instead.
    """
    example = f"as {EXAMPLES[kind]}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > LONGEST:
        raise ValueError(
            f"{shown(name)!r} can't be a name: take up to {LONGEST} small letters, digits and _, a letter "
            f"first, {example}"
        )
    if keyword.iskeyword(name):
        raise ValueError(f"{name!r} can't be a name: it is a word of Python; take another one, {example}")
    if kind == "figure" and not _item(name).partition("/")[2].strip("-"):
        raise ValueError(f"{name!r} can't be a figure: it is to be called <paper>_<item>, {example}")
    if kind == "figure" and _item(name).endswith("/select"):
        raise ValueError(f"{name!r} can't be a figure: `figures select` draws the benchmark of selections")
    if kind == "task":
        _dataset_of(name)
    if _path(kind, name).exists():
        raise ValueError(f"{_path(kind, name)} is there already: take another name, or remove it")
    if name in _taken(kind):
        raise ValueError(f"{kind} {name!r} is there already, in conf/{kind}: take another name")


def _path(kind: Kind, name: str) -> Path:
    return FOLDERS[kind] / f"{name}.{'yaml' if kind == 'cluster' else 'py'}"


def _taken(kind: Kind) -> Collection[str]:
    return choices.options(kind) if kind in ("method", "cluster") else ()


def _item(name: str) -> str:
    """thesis_my_density -> thesis/my-density"""
    paper, _, short = name.partition("_")
    return f"{paper}/{short.replace('_', '-')}"


def _dataset_of(task: str) -> str:
    """The data set that a task's name ends in.

    Raises:
        ValueError: it ends in none.
    """
    known = sorted(path.stem for path in FOLDERS["dataset"].glob("[!_]*.py"))
    ending = [name for name in known if task.endswith(f"_{name}") and task != f"_{name}"]
    if not ending:
        raise ValueError(
            f"{task!r} can't be a task: it is to be called <network>_<data set>, as {EXAMPLES['task']}; data "
            f"sets are {', '.join(known)}, and `new dataset NAME` makes one"
        )
    return max(ending, key=len)


def _quoted(words: str) -> str:
    """As `ruff format` writes it: in double quotes where that needs no more backslashes."""
    return repr(words) if '"' in words and "'" not in words else json.dumps(words, ensure_ascii=False)


def _listed(runs: Sequence[Sequence[str]]) -> str:
    """The runs as `ruff format` writes such a list."""
    lines = []
    for run in runs:
        words = [_quoted(word) for word in run]
        line = f"    [{', '.join(words)}],"
        apart = ["    [", *(f"        {word}," for word in words), "    ],"]
        lines += [line] if len(line) <= WIDEST else apart
    return "\n".join(["[", *lines, "]"])


def _assigned(source: str, values: Mapping[str, str]) -> str:
    """With other values of what the file assigns at its top."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in values:
            comment = lines[node.lineno - 1].partition("  #")[2] if node.lineno == node.end_lineno else ""
            lines[node.lineno - 1 : node.end_lineno] = [
                f"{name} = {values[name]}" + (f"  #{comment}" if comment else "\n")
            ]
    return "".join(lines)


def _without(source: str, functions: Collection[str]) -> str:
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines).rstrip("\n") + "\n"


def _imports(modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"from {module} import" for module in modules)
