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
from experiments.commands._arguments import PROGRAM
from experiments.config import choices, dataset_files
from experiments.config.folders import ROOT
from experiments.config.machines import SlurmCluster
from experiments.training.settings import setting_meaning, type_by_field
from sparsify import ranges
from sparsify.ranges import format_value

GROUP = "here"
NewFile = Literal["figure", "method", "task", "dataset", "cluster"]
TEMPLATES = Path(__file__).parent / "_new"  # a cluster's template is a file of conf/
FOLDERS: dict[str, Path] = {
    "figure": figures.FOLDER,
    "method": ROOT / "sparsify" / "methods",
    "task": ROOT / "experiments" / "tasks",
    "dataset": ROOT / "experiments" / "training" / "datasets",
    "cluster": ROOT / "conf" / "local" / "cluster",
}
TABLES = {"dataset": "experiments/training/datasets/_presets.py"}
CLUSTER = ROOT / "conf" / "cluster" / "generic_slurm.yaml"
MAX_LINE = 110  # characters, as pyproject.toml has it
MAX_NAME = 40  # characters: longer names would break the lines of the file
EXAMPLES = {
    "figure": "thesis_density",
    "method": "comb",
    "task": "mlp_digits",
    "dataset": "patterns",
    "cluster": "mine",
}
NEXT_COMMANDS = {  # the first tries the new file out, the second goes on
    "figure": ("{program} reproduce {item} profile=smoke", "{program} reproduce {item}"),
    "dataset": ("{program} new task cnn_{name}", "{program} run task=cnn_{name} method=topk {smoke}"),
    "cluster": ("{program} plan fig4 cluster={name}", "{program} plan fig4 cluster={name} --sbatch"),
    "task": (
        "{program} run task={name} method=topk {smoke}",
        "{program} run task={name} method=dense,topk",
    ),
    "method": (
        "{program} run method={name} task=cnn_digits {smoke}",
        "python -m pytest tests/sparsify/test_laws.py -k {name}",
    ),
}


def new(kind: NewFile, name: str) -> int:
    """Write a file of your own that works and says what to change in it: `new figure thesis_density`.

    Args:
        kind: the kind of file.
        name: the name of the new figure, method, task, data set or cluster; that of a figure is
            <paper>_<item>, that of a task <network>_<data set>.
    """
    path = write_new_file(kind, name, render_new_file(kind, name))
    print(f"{path} is yours now. Next:")
    for command in next_commands(kind, name):
        print(f"  {command}")
    return 0


def render_new_file(kind: NewFile, name: str, **template_values: Any) -> str:
    """Return the text of a new file.

    Args:
        template_values: values that the template leaves open.

    Raises:
        ValueError: there can be no file of this name.
    """
    check_new_name(kind, name)
    if kind == "cluster":
        header = f"# The cluster {name}: change what differs, and take cluster={name}.\n"
        return header + CLUSTER.read_text().partition("\n")[2] + "".join(_list_slurm_fields())
    template = jinja2.Template(
        (TEMPLATES / f"{kind}.py.jinja").read_text(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    values: dict[str, Any] = {
        "name": name,
        "title": _item_name(name) if kind == "figure" else name,
        "runs": (),
        "dataset": _find_dataset(name) if kind == "task" else "",
    }
    return str(template.render(values | template_values))


def _list_slurm_fields() -> Iterator[str]:
    """Yield a line for each field of a SLURM cluster: its default, and what it means."""
    types = type_by_field(SlurmCluster)
    for field in dataclasses.fields(SlurmCluster):
        if field.default is not dataclasses.MISSING:
            meaning = setting_meaning(types[field.name])
            yield f"{field.name}: {ranges.format_argument(field.default)} # {meaning}\n"


def render_comparison_figure(
    name: str, title: str, runs: Sequence[Sequence[str]], axes: Mapping[str, str]
) -> str:
    """Return the text of a file for a figure that compares these runs.

    Args:
        runs: the settings of each run, as somebody would type them behind `run`.
        axes: x, y, by and ref of the figure's `analysis.comparison.Comparison`.
    """
    arguments = ", ".join(f"{axis}={_quote(value)}" for axis, value in axes.items())
    return render_new_file(
        "figure", name, heading=_quote(title), axes=arguments, runs=[*map(_format_run, runs)]
    )


def write_new_file(kind: NewFile, name: str, content: str) -> Path:
    """Write a new file and return its path; a file that is there already is never overwritten.

    Raises:
        ValueError: there is one.
    """
    path = _path_of_file(kind, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(content)
    except FileExistsError:
        raise ValueError(f"{path} is there already: take another name, or remove it") from None
    return path


def next_commands(kind: NewFile, name: str) -> list[str]:
    """Return two commands to type next: the first tries the new file out, the second goes on."""
    item = name
    if kind == "figure":
        item = next(item for item, path in figures.files_by_item().items() if path.stem == name)
    values = {"program": PROGRAM, "smoke": "profile=smoke cluster=virtual", "name": name, "item": item}
    return [command.format(**values) for command in NEXT_COMMANDS[kind]]


def check_new_name(kind: NewFile, name: str) -> None:
    """Refuse a name that can't be, or that is taken, and say what to do instead."""
    example = f"as {EXAMPLES[kind]}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > MAX_NAME:
        raise ValueError(
            f"{format_value(name)!r} can't be a name: take up to {MAX_NAME} small letters, digits and _, a "
            f"letter first, {example}"
        )
    if keyword.iskeyword(name):
        raise ValueError(f"{name!r} can't be a name: it is a word of Python; take another one, {example}")
    if kind == "figure" and not _item_name(name).partition("/")[2].strip("-"):
        raise ValueError(f"{name!r} can't be a figure: it is to be called <paper>_<item>, {example}")
    if kind == "figure" and _item_name(name).endswith("/select"):
        raise ValueError(f"{name!r} can't be a figure: `figures select` draws the benchmark of selections")
    if kind == "task":
        _find_dataset(name)
    path = _path_of_file(kind, name)
    if path.exists():
        raise ValueError(f"{path} is there already: take another name, or remove it")
    if name in _taken_names(kind):
        where = TABLES.get(kind, f"conf/{kind}")
        raise ValueError(f"{kind} {name!r} is there already, in {where}: take another name")


def _path_of_file(kind: NewFile, name: str) -> Path:
    return FOLDERS[kind] / f"{name}.{'yaml' if kind == 'cluster' else 'py'}"


def _taken_names(kind: NewFile) -> Collection[str]:
    if kind == "dataset":
        return dataset_files.dataset_names(FOLDERS[kind])
    return choices.option_names(kind) if kind in ("method", "cluster", "task") else ()


def _item_name(name: str) -> str:
    """Return the item of a figure's file: thesis/my-density of thesis_my_density."""
    paper, _, short = name.partition("_")
    return f"{paper}/{short.replace('_', '-')}"


def _find_dataset(task: str) -> str:
    """Return the data set in which a task's name ends; refuse a name without one."""
    datasets = dataset_files.dataset_names(FOLDERS["dataset"])
    matching = [name for name in datasets if task.endswith(f"_{name}") and task != f"_{name}"]
    if not matching:
        raise ValueError(
            f"{task!r} can't be a task: it is to be called <network>_<data set>, as {EXAMPLES['task']}; data "
            f"sets are {', '.join(datasets)}, and `new dataset NAME` makes one"
        )
    return max(matching, key=len)


def _quote(text: str) -> str:
    """Return a text as `ruff format` writes it: in double quotes where that needs no more backslashes."""
    return repr(text) if '"' in text and "'" not in text else json.dumps(text, ensure_ascii=False)


def _format_run(words: Sequence[str]) -> str:
    """Return a run as `ruff format` writes it in a list."""
    quoted = [*map(_quote, words)]
    line = f"    [{', '.join(quoted)}],"
    if len(line) <= MAX_LINE:
        return line
    return "\n".join(["    [", *(f"        {word}," for word in quoted), "    ],"])
