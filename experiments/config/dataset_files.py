"""Where data sets come from: found, downloaded, or replaced by one that needs no files. Without torch."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiments.config.config import Config, MethodOrTaskConfig
from experiments.config.folders import ROOT
from experiments.tasks import REGISTRY as TASKS
from slurm import environment
from sparsify.core.spec import BrokenFile, read_constant
from sparsify.ranges import describe_unknown

DATASETS = ROOT / "experiments" / "training" / "datasets"
PRESETS_FILE = DATASETS / "_presets.py"  # of those that have no file of their own
DOWNLOAD_TIMEOUT_S = 20  # of silence on the line, not of the whole download

# A data set's own function downloads it; run apart, it keeps torch out of this process.
DOWNLOAD_SCRIPT = """
import importlib, pathlib, socket, sys
socket.setdefaulttimeout(float(sys.argv[3]))
importlib.import_module(f"experiments.training.datasets.{sys.argv[1]}").download(pathlib.Path(sys.argv[2]))
"""


@dataclass(frozen=True)
class DatasetFiles:
    """The files of a data set, as the literal FILES in its own file, or in that of small ones, has them."""

    title: str  # the data set as a sentence names it
    folder: str  # what the folder of all data sets must contain
    host: str | None = None  # its function `try_download` needs this host; None: it has no such function
    size: str = ""  # of the download
    instead: str = ""  # a data set without files, on which the same networks can be timed


@cache
def required_files(dataset: str) -> DatasetFiles | None:
    """Return the files that a data set needs; None where it needs none.

    Its file is executed lightly (see `sparsify.core.spec`): importing a data set would import torch.

    Raises:
        BrokenFile: its file can't be read.
    """
    source = DATASETS / f"{dataset}.py"
    described = (
        read_constant(source, "FILES")
        if source.exists()
        else read_constant(PRESETS_FILE, "FILES").get(dataset)
    )
    try:
        return None if described is None else DatasetFiles(**described)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(DatasetFiles))
        raise BrokenFile(f"{source}: FILES must be a dict with {fields} ({error})") from error


def dataset_of_task(task: str) -> str:
    """Return the data set that a task is named after: <network>_<data set>.

    Raises:
        ValueError: there is none of that name.
    """
    dataset = task.rpartition("_")[2]
    names = dataset_names(DATASETS)
    if dataset not in names:
        raise ValueError(
            f"{describe_unknown('data set', dataset, names)}; task {task!r} is named <network>_<data set>"
        )
    return dataset


@cache
def dataset_names(folder: Path) -> list[str]:
    """All data sets: the files of this folder, and those of the repository that have none."""
    return sorted({*(path.stem for path in folder.glob("[!_]*.py")), *_read_preset_names()})


def _read_preset_names() -> Iterator[str]:
    """Yield the keys of the table `PRESETS`, which is not executed: its values need torch."""
    for statement in ast.parse(PRESETS_FILE.read_bytes()).body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
            continue
        if ast.unparse(statement.target) == "PRESETS":
            yield from (ast.literal_eval(key) for key in statement.value.keys if key is not None)


def resolve_data_root(setting: str | None) -> Path:
    """Return the folder of all data sets: data.root, else $DATA_ROOT, else data/ of the checkout."""
    folder = Path(setting or environment.folder_from_variable("DATA_ROOT") or ROOT / "data")
    return environment.require_utf8(folder.expanduser().resolve(), "the folder of data (DATA_ROOT)")


def has_files(root: Path, dataset: str) -> bool:
    """Tell whether the files of this data set are there; True where it needs none."""
    files = required_files(dataset)
    return files is None or (root / files.folder).is_dir()


def ensure_dataset(config: Config, say: Callable[[str], None]) -> tuple[Config, Path | None]:
    """Find or download the data set of a configuration, or replace it by one that needs no files.

    Returns the configuration, and the folder of all data sets; None where the data set needs no files.

    Where the files are neither found nor downloadable, a config that allows it is changed to a data set that
    needs none, which `say` tells in one line.

    Raises:
        ValueError: no data, and no substitute allowed.
    """
    dataset = dataset_of_task(config.task.name)
    files = required_files(dataset)
    if files is None:
        return config, None
    root = resolve_data_root(config.data.root)
    if has_files(root, dataset):
        return config, root
    if config.data.root is not None:
        raise ValueError(
            f"data.root={root} has no {files.folder}; point it at the folder that holds {files.folder}"
            f"{_suggest_timing_task(config, files)}"
        )
    if try_download(dataset, files, root, say):
        return config, root
    fallback = config.data.fallback
    changed = None if fallback == "refuse" else replace_dataset(config, fallback)
    if changed is None:
        raise ValueError(
            f"{files.title} is not in {root} and could not be downloaded: put {files.folder} there, or say "
            f"where it is with data.root=FOLDER or $DATA_ROOT{_suggest_timing_task(config, files)}"
        )
    name = changed.task.name
    say(f"{files.title} was not found (see DATA_ROOT): using scikit-learn's digits instead, task {name}")
    return changed, None


def replace_dataset(config: Config, dataset: str) -> Config | None:
    """Return the configuration on another data set; None where its network has no task on that."""
    task = config.task
    name = task.name.removesuffix(dataset_of_task(task.name)) + dataset
    if name not in TASKS.names():
        return None
    defaults = TASKS.defaults(name)
    arguments = {key: value for key, value in task.arguments.items() if key in defaults}
    return replace(config, task=MethodOrTaskConfig(name, arguments))


def _suggest_timing_task(config: Config, files: DatasetFiles) -> str:
    """Return the end of a sentence that names a task without files; empty where there is none."""
    changed = replace_dataset(config, files.instead) if files.instead else None
    return f"; task={changed.task.name}, which is for timing only, needs none" if changed else ""


def try_download(dataset: str, files: DatasetFiles, root: Path, say: Callable[[str], None]) -> bool:
    """Let the data set download itself to `root`; False where that fails."""
    if files.host is None or not is_reachable(files.host):
        return False
    say(f"downloading {files.title} ({files.size}) to {root}")
    part = root / "download.part"
    words = [sys.executable, "-c", DOWNLOAD_SCRIPT, dataset, str(part), str(DOWNLOAD_TIMEOUT_S)]
    try:
        part.mkdir(parents=True, exist_ok=True)
        process = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
        if process.returncode == 0:
            (part / files.folder).replace(root / files.folder)
        return process.returncode == 0
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_reachable(host: str) -> bool:
    """Tell whether anybody answers there: torch is not started only to learn that there is no network."""
    try:
        socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        return False
    return True
