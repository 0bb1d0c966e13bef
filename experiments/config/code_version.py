"""Which code this is: its commit, what differs from that, a digest of its files, and copies of them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from analysis.records.files import (
    PART_SUFFIX,
    remove_path,
    try_read_json_object,
    walk_entries,
    write_atomic,
    write_json,
)
from experiments.config.folders import ROOT

FOLDERS = ("analysis", "conf", "experiments", "slurm", "sparsify")
# What decides a result: a changed README or a new figure makes no measurement doubtful.
CODE = (*FOLDERS, "constraints.txt", "pyproject.toml", "requirements")
# What the numbers of a run rest on: of LISTS, what the run has chosen by name.
MEASURING_FOLDERS = (
    "sparsify",
    "conf/task",
    "experiments/tasks",
    "experiments/training",
    "experiments/worker",
)
REGISTRY_FOLDERS = ("sparsify/methods", "conf/task", "experiments/tasks", "experiments/training/datasets")
NOTE_FILE = (
    "code.json"  # in a copy of the code: its `git_state`, for there is no git, and the digests of its files
)
# A line of jobs' scripts: bytecode beside the code would be one more thing that Python runs from there.
WITHOUT_BYTECODE = "export PYTHONDONTWRITEBYTECODE=1"
MAX_NAMED_FILES = 3  # of the files that are missing or changed


def list_code_files(root: Path) -> list[Path]:
    """Return the code's files, relative to the checkout.

    These are all files of its folders, of any kind, without what Python and editors leave there.
    """
    paths = (path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file())
    return sorted(path for path in (path.relative_to(root) for path in paths) if not _is_leftover(path))


def _is_leftover(path: Path) -> bool:
    # What conf/local holds is in the configuration of each run that was made of it.
    is_hidden = any(part == "__pycache__" or part[0] == "." for part in path.parts)
    return is_hidden or path.name.endswith("~") or path.is_relative_to("conf/local")


def _digest_by_path(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return 12 digits of a hash of each file, by its path in the checkout."""
    return {str(path): _digest_bytes((root / path).read_bytes()) for path in paths}


def _digest_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _digest_json(digests: object) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]


@cache
def code_digest() -> str:
    """Return 12 digits of a hash over the code's files, names and contents."""
    return _digest_json(_digest_by_path(ROOT, list_code_files(ROOT)))


@cache
def digest_by_measuring_file() -> dict[str, str]:
    """Return the digest of each file that a run's numbers may rest on."""
    paths = list_code_files(ROOT)
    return _digest_by_path(
        ROOT, (path for path in paths if any(path.is_relative_to(room) for room in MEASURING_FOLDERS))
    )


def changed_measuring_files(
    recorded_digest_by_path: Mapping[str, str], chosen_names: Collection[str]
) -> list[str]:
    """Return the recorded source files that have changed since.

    Args:
        chosen_names: of the run's method, task and data set: it does not rest on the files of others, unless
            theirs import them.
    """
    current = digest_by_measuring_file()
    chosen_names = add_imported_names(chosen_names)
    return [
        path
        for path, digest in recorded_digest_by_path.items()
        if current.get(path) != digest and _affects(Path(path), chosen_names)
    ]


def add_imported_names(chosen_names: Collection[str]) -> set[str]:
    """Return these choices and those whose files theirs import, and so on."""
    found, todo = set[str](), [*chosen_names]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [other for folder in REGISTRY_FOLDERS for other in _imported_beside(ROOT / folder, name)]
    return found


@cache
def _imported_beside(folder: Path, name: str) -> set[str]:
    """Return the names of the files in a folder that one of them imports."""
    path = folder / f"{name}.py"
    if not path.is_file():
        return set()
    modules = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(folder.relative_to(ROOT).parts) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            modules += [f"{module}.{alias.name}" for alias in node.names]
    beside = ".".join(folder.relative_to(ROOT).parts) + "."
    return {module.removeprefix(beside).split(".")[0] for module in modules if module.startswith(beside)}


def _affects(path: Path, chosen_names: Collection[str]) -> bool:
    is_choice = str(path.parent) in REGISTRY_FOLDERS and not path.stem.startswith("_")
    return not is_choice or path.stem in chosen_names


@cache
def git_state() -> dict[str, str | None]:
    """Return the commit, and 12 digits of a hash over the differences from it, or None for either."""
    noted = try_read_json_object(ROOT / NOTE_FILE)
    if noted is not None:
        return {"commit": noted.get("commit"), "dirty": noted.get("dirty")}
    changed = _git("status", "--porcelain", "--", *CODE)
    difference = (_git("diff", "HEAD", "--", *CODE) or "") if changed else ""
    dirty = hashlib.sha256((changed + difference).encode()).hexdigest()[:12] if changed else None
    return {"commit": _git("rev-parse", "HEAD"), "dirty": dirty}


def _git(*words: str) -> str | None:
    """Return the text that git prints, or None without git or a repository."""
    try:
        process = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


def ensure_code_copy(copies_folder: Path) -> Path:
    """Return a copy of the code in a folder named by its digest, so that later edits change no submitted job.

    Copies are shared by all that submit the same code, and lie in a results folder, which may come from
    anybody: each file gets the content that it has here, and what else is there is removed. Jobs keep no
    bytecode in it, see WITHOUT_BYTECODE.

    Raises:
        ValueError: the code is being edited.
    """
    copy = copies_folder / code_digest()
    content_by_name = {str(path): (ROOT / path).read_bytes() for path in list_code_files(ROOT)}
    if copy.is_symlink() or not copy.is_dir():
        remove_path(copy)
    remove_extra_files(copy, content_by_name)
    for name, content in content_by_name.items():
        path = copy / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content, durable=False)
    note = {
        **git_state(),
        "files": {name: _digest_bytes(content) for name, content in content_by_name.items()},
    }
    if try_read_json_object(copy / NOTE_FILE) != note:
        write_json(copy / NOTE_FILE, note)
    damage = describe_copy_damage(copy)
    if damage:
        raise ValueError(f"the code was edited while it was being copied: submit again ({damage})")
    return copy


def remove_extra_files(copy: Path, expected: Collection[str] | None = None) -> list[str]:
    """Remove what lies in a copy of the code and is no part of it; returns the names.

    Args:
        expected: the copy's files; None: those of its note, and nothing is removed where that was changed.
    """
    names = (_read_noted_digests(copy) or {}) if expected is None else expected
    extra_files = [*_find_extra_files(copy, names)] if names else []
    for path in extra_files:
        with contextlib.suppress(FileNotFoundError):  # another job of this code has removed it
            remove_path(path)
    return [str(path.relative_to(copy)) for path in extra_files]


def _read_noted_digests(copy: Path) -> dict[str, str] | None:
    """Return the digests of a copy's files from its note, or None if the note is not the copy's own."""
    files_then: Any = (try_read_json_object(copy / NOTE_FILE) or {}).get("files")
    is_own = not copy.is_symlink() and _digest_json(files_then) == copy.name
    return files_then if is_own else None


def describe_copy_damage(copy: Path) -> str:
    """Return a sentence on what is wrong with a copy of the code; empty where it is as it was submitted."""
    noted = _read_noted_digests(copy)
    if noted is None:
        return f"{copy} is no whole copy of the code, its {NOTE_FILE} is missing or changed: submit again"
    try:
        fault_by_name = {name: _describe_fault(copy / name, digest) for name, digest in noted.items()}
    except OSError as error:
        return f"{error.filename} can't be read ({error.strerror}): make it readable, and submit again"
    faults = [f"{name} {fault}" for name, fault in fault_by_name.items() if fault]
    faults += sorted(f"{path.relative_to(copy)} was added" for path in _find_extra_files(copy, noted))
    if not faults:
        return ""
    shown_faults = ", ".join(faults[:MAX_NAMED_FILES]) + f" and {len(faults) - MAX_NAMED_FILES} more" * (
        len(faults) > MAX_NAMED_FILES
    )
    return (
        f"the code in {copy} is not what was submitted ({shown_faults}): submit again, which copies it anew"
    )


def _describe_fault(path: Path, digest: str) -> str:
    """Return what is wrong with a file of a copy; empty where nothing is."""
    if not os.path.lexists(path):
        return "is missing"
    is_same = path.is_file() and _digest_bytes(path.read_bytes()) == digest
    return "" if is_same else "was changed"


def _find_extra_files(copy: Path, expected: Collection[str]) -> Iterator[Path]:
    """Yield what lies in a copy of the code and is no part of it.

    Python would take a module, or bytecode, from wherever it is. Links are no part of any copy.
    """
    folders = {str(parent) for name in expected for parent in Path(name).parents}
    for path in walk_entries(copy):
        names = folders if path.is_dir() else (*expected, NOTE_FILE)
        is_part = str(path.relative_to(copy)) in names and not path.is_symlink()
        if not is_part and not _is_temporary(path):
            yield path


def _is_temporary(path: Path) -> bool:
    """Tell whether it is a file that another process replaces by a whole one, or that NFS keeps a while."""
    is_hidden_file = path.is_file() and not path.is_symlink()
    return (
        is_hidden_file
        and path.name.startswith(".")
        and (path.suffix == PART_SUFFIX or path.name[:4] == ".nfs")
    )
