"""Which code this is: its commit, what differs from that, a digest of its files, and copies of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from analysis.records.files import read_json, write_atomic, write_json
from experiments.config.folders import ROOT

FOLDERS = ("analysis", "conf", "experiments", "slurm", "sparsify")
# What decides a result: a changed README or a new figure makes no measurement doubtful.
CODE = (*FOLDERS, "constraints.txt", "pyproject.toml", "requirements")
# What the numbers of a run rest on: of LISTS, what the run has chosen by name.
MEASURING = ("sparsify", "experiments/tasks", "experiments/training", "experiments/worker")
LISTS = ("sparsify/methods", "experiments/tasks", "experiments/training/datasets")
NOTE = "code.json"  # in a copy of the code: its `origin`, for there is no git, and the digests of its files
NAMED = 3  # of the files that are missing or changed


def files(root: Path) -> list[Path]:
    """The code's files, relative to the checkout: all that its folders hold, whatever its kind, without what
    Python and editors leave there.
    """
    found = (path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file())
    return sorted(path for path in (path.relative_to(root) for path in found) if not _is_left(path))


def _is_left(path: Path) -> bool:
    # What conf/local holds is in the configuration of each run that was made of it.
    is_hidden = any(part == "__pycache__" or part[0] == "." for part in path.parts)
    return is_hidden or path.name.endswith("~") or path.is_relative_to("conf/local")


def _digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """12 digits of a hash of each file, by its path in the checkout."""
    return {str(path): hashlib.sha256((root / path).read_bytes()).hexdigest()[:12] for path in paths}


def _digest_of(digests: object) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]


@cache
def digest() -> str:
    """12 digits of a hash over the code's files, names and contents."""
    return _digest_of(_digests(ROOT, files(ROOT)))


@cache
def sources() -> dict[str, str]:
    """The digest of each file that a run's numbers may rest on."""
    paths = files(ROOT)
    return _digests(ROOT, (path for path in paths if any(path.is_relative_to(room) for room in MEASURING)))


def changed(then: Mapping[str, str], chosen: Collection[str]) -> list[str]:
    """The files of `then`, which were `sources`, that are not what they were.

    Args:
        chosen: names of the run's method, task and data set: it does not rest on the files of others.
    """
    now = sources()
    return [path for path, sha in then.items() if now.get(path) != sha and _concerns(Path(path), chosen)]


def _concerns(path: Path, chosen: Collection[str]) -> bool:
    is_choice = str(path.parent) in LISTS and not path.stem.startswith("_")
    return not is_choice or path.stem in chosen


@cache
def origin() -> dict[str, str | None]:
    """The commit, and 12 digits of a hash over the differences from it; None where there are none."""
    if (noted := read_json(ROOT / NOTE)) is not None:
        return {"commit": noted.get("commit"), "dirty": noted.get("dirty")}
    changed = _git("status", "--porcelain", "--", *CODE)
    difference = (_git("diff", "HEAD", "--", *CODE) or "") if changed else ""
    dirty = hashlib.sha256((changed + difference).encode()).hexdigest()[:12] if changed else None
    return {"commit": _git("rev-parse", "HEAD"), "dirty": dirty}


def _git(*words: str) -> str | None:
    """The text that git prints, or None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def copy_into(folder: Path) -> Path:
    """A copy of the code, named by its digest: what is edited after submission changes no job.

    Copies are shared by all that submit the same code. One of which files were removed or changed is mended:
    each file gets the content that it must have for the jobs that run there.

    Raises:
        ValueError: the code is being edited.
    """
    copy = folder / digest()
    if not damage(copy):
        return copy
    wanted = _digests(ROOT, files(ROOT))
    copied = _digests(copy, files(copy))
    for path in copied.keys() - wanted.keys():
        (copy / path).unlink(missing_ok=True)
    for path in (path for path, sha in wanted.items() if copied.get(path) != sha):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(copy / path, (ROOT / path).read_bytes(), durable=False)
    write_json(copy / NOTE, {**origin(), "files": wanted})
    if why := damage(copy):
        raise ValueError(f"the code was edited while it was being copied: submit again ({why})")
    return copy


def damage(copy: Path) -> str:
    """What a copy of the code lacks, in a sentence; empty where it is as it was submitted."""
    then: Any = (read_json(copy / NOTE) or {}).get("files")
    if _digest_of(then) != copy.name:
        return f"{copy} is no whole copy of the code, its {NOTE} is missing or changed: submit again"
    try:
        now = _digests(copy, files(copy))
    except OSError as error:
        return f"{error.filename} can't be read ({error.strerror}): make it readable, and submit again"
    faults = [f"{path} is missing" for path in then if path not in now]
    for path in sorted(path for path, sha in now.items() if then.get(path) != sha):
        faults.append(f"{path} was {'changed' if path in then else 'added'}")
    if not faults:
        return ""
    listed = ", ".join(faults[:NAMED]) + f" and {len(faults) - NAMED} more" * (len(faults) > NAMED)
    return f"the code in {copy} is not what was submitted ({listed}): submit again, which copies it anew"
