"""Named sweeps: `sweep=thesis` among the words of a command, and which runs it has asked for.

The name is no part of a run's configuration, so that a run may belong to several sweeps, and one that was
measured before to a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from filelock import FileLock

from analysis.files import read_as, write_json
from analysis.records import run_id
from analysis.schemas import Index
from experiments.config.folders import Folders
from sparsify.ranges import quoted

KEY = "sweep="
NAME = re.compile(r"[A-Za-z0-9][\w-]{0,39}")


def named(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The sweep that the words name, and the other words.

    Raises:
        ValueError: the name is none, or there are several.
    """
    names = list(dict.fromkeys(word.removeprefix(KEY) for word in words if word.startswith(KEY)))
    rest = [word for word in words if not word.startswith(KEY)]
    if not names:
        return None, rest
    if len(names) > 1 or not NAME.fullmatch(names[0]):
        given = ", ".join(map(quoted, names))
        raise ValueError(
            f"sweep={given}: a sweep has one name of at most 40 letters, digits, - and _, as sweep=thesis"
        )
    return names[0], rest


def note(folders: Folders, name: str | None, configs: Iterable[Mapping[str, Any]]) -> None:
    """Add these runs to the sweep; without a name nothing happens."""
    if name is None:
        return
    folders.sweep_index.mkdir(parents=True, exist_ok=True)
    path = folders.sweep_index / f"{name}.json"
    folders.scratch.mkdir(parents=True, exist_ok=True)
    with FileLock(folders.scratch / "sweep-index.lock"):
        before = read_as(path, Index)
        runs = [*(before.runs if before else []), *map(run_id, configs)]
        write_json(path, {"runs": list(dict.fromkeys(runs))})
