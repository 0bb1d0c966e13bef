"""Choices on the command line, group=option: files of conf/, methods and tasks.

Hydra, which takes its time to import, is not imported, so that completion can ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.config import conf_files
from experiments.config.folders import ROOT
from experiments.tasks import REGISTRY as TASKS
from slurm import environment
from sparsify.core.spec import BrokenFile, Registry
from sparsify.methods import REGISTRY as METHODS

CONF = ROOT / "conf"
GROUPS = ("method", "task", "cluster", "link", "inside", "container", "profile", "recipe")
FOLDER_BY_GROUP = {"inside": "link"}  # of a group's files, where they are another group's
COMMON_ENTRY_BY_NOUN = {
    "method": "topk",
    "task": "cnn_cifar10",
}  # whose docstring explains what others have, too
REGISTRIES: dict[str, Registry] = {registry.noun: registry for registry in (METHODS, TASKS)}
# Set by choosing a group's option, not by hand.
KEYS_SET_BY_CHOICE = (
    "method.name", "task.name", "cluster.name", "cluster.where", "cluster.link.name", "cluster.inside",
    "cluster.inside.name", "container.name",
)  # fmt: skip


def drop_unsettable_keys(type_by_key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of the keys that a word can set; groups are chosen, not set."""
    return {key: allowed for key, allowed in type_by_key.items() if key not in (*KEYS_SET_BY_CHOICE, *GROUPS)}


def conf_folders() -> list[Path]:
    """Return the folders of configurations: conf/, conf/local/ where it exists, and those of $SPARSIFY_CONF.

    Raises:
        ValueError: $SPARSIFY_CONF names a folder that is not there.
    """
    extra_folders = [folder.expanduser().absolute() for folder in environment.conf_folders()]
    for folder in extra_folders:
        if not folder.is_dir():
            raise ValueError(f"SPARSIFY_CONF names {folder}, and there is no such folder")
    return [CONF, *(folder for folder in [CONF / "local", *extra_folders] if folder.is_dir())]


def files_by_option(group: str) -> dict[str, Path]:
    """Return the files of a group, by the names of their options.

    Raises:
        ValueError: two files for one option.
    """
    path_by_option: dict[str, Path] = {}
    for folder in conf_folders():
        for path in sorted((folder / FOLDER_BY_GROUP.get(group, group)).glob("*.yaml")):
            first_path = path_by_option.setdefault(path.stem, path) if path.is_file() else path
            if first_path is not path:
                raise ValueError(f"{group}={path.stem} is in two files, {first_path} and {path}; rename one")
    return path_by_option


def is_task_file(path: Path) -> bool:
    """Tell whether a file defines a task, instead of giving some of a task's settings other values."""
    return path.parent == CONF / "task"


def values_in_cluster_files(field: str) -> set[str]:
    """Return the values that the files of conf/cluster give to a field, as text."""
    values = set[str]()
    for path in files_by_option("cluster").values():
        # A file that can't be read can't be chosen either, and names nothing.
        with contextlib.suppress(yaml.YAMLError, OSError, AttributeError, ValueError):
            value = yaml.safe_load(conf_files.read_small_yaml_text(path)).get(field)
            if value:
                values.add(str(value))
    return values


def option_names(group: str) -> list[str]:
    """Return the options that can follow `group=`: files of conf/<group>/ and registered methods or tasks."""
    registered = REGISTRIES[group].names() if group in REGISTRIES else []
    return sorted({*registered, *files_by_option(group)})


def describe_option(group: str, option: str) -> str:
    """Return the docstring of an option's function, or the comment at the beginning of its file."""
    if group in REGISTRIES and option in REGISTRIES[group].names():
        try:
            return REGISTRIES[group].docstring(option).partition("\nArgs:")[0].strip()
        except BrokenFile as broken:
            return f"can't be read: {broken}"
    lines = []
    for line in files_by_option(group)[option].read_text(errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def meaning_by_parameter(registry: Registry, name: str) -> dict[str, str]:
    """Return the meaning of each parameter of an entry.

    A meaning is from the entry's docstring, or else from that of the entry in `COMMON_ENTRY_BY_NOUN`, which
    describes what several entries have in common. `a, b: ...` in a docstring describes both.

    Raises:
        BrokenFile: the entry's file can't be read.
    """
    parameters = registry.parameters(name)
    common = COMMON_ENTRY_BY_NOUN.get(registry.noun, "")
    shared = _documented_parameters(registry, common) if common in registry.names() else {}
    return {key: meaning for key, meaning in shared.items() if key in parameters} | _documented_parameters(
        registry, name
    )


def _documented_parameters(registry: Registry, name: str) -> dict[str, str]:
    """Return the meanings in an entry's own docstring."""
    import griffe  # a tenth of a second, which only help takes

    meaning_by_parameter: dict[str, str] = {}
    for section in griffe.Docstring(registry.docstring(name)).parse("google", warnings=False):
        if isinstance(section, griffe.DocstringSectionParameters):
            for parameter in section.value:
                meaning = " ".join(parameter.description.split())
                meaning_by_parameter |= {key.strip(): meaning for key in parameter.name.split(",")}
    return meaning_by_parameter
