from __future__ import annotations

import dataclasses
import json
import keyword
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2

from experiments import figures
from experiments.config import choices, data_root
from experiments.config.folders import ROOT
from experiments.config.machines import SlurmCluster
from experiments.training.settings import field_types, setting_meaning
from sparsify import ranges
from sparsify.ranges import format_value

GROUP = "here"
NewFile = Literal["figure", "method", "task", "dataset", "cluster"]
FOLDER = Path(__file__).parent / "_new"  # of templates; a cluster's is a file of conf/
FOLDERS: dict[str, Path] = {
    "figure": figures.FOLDER,
    "method": ROOT / "sparsify" / "methods",
    "task": ROOT / "experiments" / "tasks",
    "dataset": ROOT / "experiments" / "training" / "datasets",
    "cluster": ROOT / "conf" / "local" / "cluster",
}
TABLES = {"dataset": "experiments/training/datasets/_presets.py"}
CLUSTER = ROOT / "conf" / "cluster" / "generic_slurm.yaml"
WIDEST = 110  # characters of a line, as pyproject.toml has it
LONGEST = 40  # characters of a name: longer ones would break the lines of the file
EXAMPLES = {
    "figure": "thesis_density", "method": "comb", "task": "mlp_digits", "dataset": "patterns",
    "cluster": "mine",
}  # fmt: skip
CALL = "python -m experiments"
TRY = "profile=smoke cluster=virtual"


def new(kind: NewFile, name: str) -> int:
    """A file of your own that works and says what to change in it: new figure thesis_density

    Args:
        kind: what the file is to be.
        name: what it is to be called; a figure <paper>_<item>, a task <network>_<data set>.
    """
    path = write(kind, name, text(kind, name))
    print(f"{path} is yours now. Next:")
    for command in next_commands(kind, name):
        print(f"  {command}")
    return 0


def text(kind: NewFile, name: str, **given: Any) -> str:
    """The file's text.

    Args:
        given: what the template leaves open.

    Raises:
        ValueError: there can be no file of this name.
    """
    check_name(kind, name)
    if kind == "cluster":
        header = f"# The cluster {name}: change what differs, and take cluster={name}.\n"
        return header + CLUSTER.read_text().partition("\n")[2] + "".join(_fields_of_slurm())
    template = jinja2.Template(
        (FOLDER / f"{kind}.py.jinja").read_text(),
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    own = {"name": name, "title": _item(name) if kind == "figure" else name, "runs": ()}
    own["dataset"] = _dataset_of(name) if kind == "task" else ""
    return str(template.render(own | given))


def _fields_of_slurm() -> Iterator[str]:
    """A line for each field of a SLURM cluster: its default, and what it means."""
    allowed = field_types(SlurmCluster)
    for each in dataclasses.fields(SlurmCluster):
        if each.default is not dataclasses.MISSING:
            yield f"{each.name}: {ranges.format_argument(each.default)} # {setting_meaning(allowed[each.name])}\n"


def figure(name: str, title: str, runs: Sequence[Sequence[str]], axes: Mapping[str, str]) -> str:
    """The text of a figure's file with these runs.

    Args:
        runs: the settings of each, as one would type them behind `run`.
        axes: x, y, by and ref of its `analysis.comparison.Comparison`.
    """
    given = ", ".join(f"{axis}={_quoted(value)}" for axis, value in axes.items())
    return text("figure", name, heading=_quoted(title), axes=given, runs=[*map(_listed, runs)])


def write(kind: NewFile, name: str, content: str) -> Path:
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


def next_commands(kind: NewFile, name: str) -> tuple[str, str]:
    """Commands to type next: one tries it out, one goes on."""
    if kind == "figure":
        item = next(item for item, path in figures.files_by_item().items() if path.stem == name)
        return f"{CALL} reproduce {item} profile=smoke", f"{CALL} reproduce {item}"
    if kind == "dataset":
        return f"{CALL} new task cnn_{name}", f"{CALL} run task=cnn_{name} method=topk {TRY}"
    if kind == "cluster":
        return f"{CALL} plan fig4 cluster={name}", f"{CALL} plan fig4 cluster={name} --sbatch"
    if kind == "task":
        return f"{CALL} run task={name} method=topk {TRY}", f"{CALL} run task={name} method=dense,topk"
    laws = f"python -m pytest tests/sparsify/test_laws.py -k {name}"
    return f"{CALL} run method={name} task=cnn_digits {TRY}", laws


def check_name(kind: NewFile, name: str) -> None:
    """
    Raises:
        ValueError: there can be no such name, or it is taken; what to do instead.
    """
    example = f"as {EXAMPLES[kind]}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > LONGEST:
        raise ValueError(
            f"{format_value(name)!r} can't be a name: take up to {LONGEST} small letters, digits and _, a "
            f"letter first, {example}"
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
        where = TABLES.get(kind, f"conf/{kind}")
        raise ValueError(f"{kind} {name!r} is there already, in {where}: take another name")


def _path(kind: NewFile, name: str) -> Path:
    return FOLDERS[kind] / f"{name}.{'yaml' if kind == 'cluster' else 'py'}"


def _taken(kind: NewFile) -> Collection[str]:
    if kind == "dataset":
        return data_root.dataset_names(FOLDERS[kind])
    return choices.options(kind) if kind in ("method", "cluster", "task") else ()


def _item(name: str) -> str:
    """thesis_my_density -> thesis/my-density"""
    paper, _, short = name.partition("_")
    return f"{paper}/{short.replace('_', '-')}"


def _dataset_of(task: str) -> str:
    """The data set that a task's name ends in; a name without one is refused."""
    known = data_root.dataset_names(FOLDERS["dataset"])
    ending = [name for name in known if task.endswith(f"_{name}") and task != f"_{name}"]
    if not ending:
        raise ValueError(
            f"{task!r} can't be a task: it is to be called <network>_<data set>, as {EXAMPLES['task']}; data "
            f"sets are {', '.join(known)}, and `new dataset NAME` makes one"
        )
    return max(ending, key=len)


def _quoted(words: str) -> str:
    """Text as `ruff format` writes it: in double quotes where that needs no more backslashes."""
    return repr(words) if '"' in words and "'" not in words else json.dumps(words, ensure_ascii=False)


def _listed(run: Sequence[str]) -> str:
    """A run as `ruff format` writes it in a list."""
    words = [*map(_quoted, run)]
    line = f"    [{', '.join(words)}],"
    fits = len(line) <= WIDEST
    return line if fits else "\n".join(["    [", *(f"        {word}," for word in words), "    ],"])
