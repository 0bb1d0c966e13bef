"""A task is a model, data, loss, metric, and how it is trained; it is called <network>_<data set>.

The repository's tasks are YAML files in conf/task; a network of your own is a Python file beside this one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from msgspec import yaml

from experiments.tasks._families import FAMILIES, masked_autoencoder, vector
from sparsify.core.spec import BrokenFile, Registry
from sparsify.ranges import describe_unknown

# Percent top-1 of always guessing the most frequent class, by data set. The Penn Treebank's are the shares of
# its most frequent word in what is validated on: 4,794 of the 82,425 words of ptb.test.txt that are to be
# predicted, 685 of the 12,254 that are hidden; of its 449,920 characters 82,423 are spaces. Text of your own
# has another for each text.
CHANCE_BY_DATASET = {
    "cifar10": 10, "digits": 10.28, "digits32": 10.28, "mnist": 11.35, "imagenet": 0.1, "images224": 0.1,
    "ptb": 5.82, "ptb64": 5.59, "ptbchars": 18.32,
}  # fmt: skip


class TaskFiles(Mapping[str, "partial[Any]"]):
    """The tasks of a folder of YAML files: a function that builds each, by the file's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self.folder.glob("*.yaml"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return (self.folder / f"{name}.yaml").is_file()

    def __getitem__(self, name: str) -> "partial[Any]":
        path = self.folder / f"{name}.yaml"
        return _read_task(path, path.stat().st_mtime_ns)


@cache
def _read_task(path: Path, modified_ns: int) -> "partial[Any]":
    """Return the function of a task's family with the values of the task's file as defaults.

    Raises:
        BrokenFile: the file can't be read, names no family, or has other keys than its family takes.
    """
    text = path.read_text()
    comment = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    about, _, details = "\n".join(comment).partition("\n")
    try:
        values = dict(yaml.decode(text))
    except (TypeError, ValueError) as error:
        raise BrokenFile(f"{path} can't be read: {' '.join(str(error).split())}") from error
    name = str(values.pop("family", ""))
    if name not in FAMILIES:
        raise BrokenFile(f"{path}: {describe_unknown('family', name, [*FAMILIES])}")
    family: Callable[..., Any] = FAMILIES[name]
    signature = inspect.signature(family)
    fixed_names = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    missing = [key for key in fixed_names if key not in values]
    if missing:
        raise BrokenFile(f"{path}: family={name} needs {', '.join(missing)}")
    task = partial(family, *(values.pop(key) for key in fixed_names), **values)
    try:
        signature.bind(*task.args, **task.keywords)
    except TypeError as error:
        raise BrokenFile(f"{path}: family={name}: {error}") from error
    meanings = inspect.cleandoc(family.__doc__ or "").partition("Args:")[2]
    task.__doc__ = "\n\n".join(filter(None, (about, details, f"Args:{meanings}")))
    return task


FILES = TaskFiles(Path(__file__).parent.parent.parent / "conf" / "task")
REGISTRY = Registry("task", __name__, Path(__file__).parent, table=FILES)


def chance_top1_percent(task: str) -> float | None:
    """Return the percent top-1 of guessing on what a task is validated on; None where it is not known.

    A task of your own has the chance level of its data set, which its name ends with.
    """
    dataset = FILES[task].args[0] if task in FILES else task.rpartition("_")[2]
    return CHANCE_BY_DATASET.get(dataset) if has_accuracy(task) else None


def has_accuracy(task: str) -> bool:
    """Tell whether a task has classes to be right about; one of your own may have."""
    return task not in FILES or FILES[task].func not in (masked_autoencoder, vector)
