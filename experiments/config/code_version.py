"""Which code this is: its commit, what differs from that, a digest of its files, and copies of them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from analysis.records.files import read_json, write_json
from experiments.config.folders import ROOT

FOLDERS = ("analysis", "conf", "experiments", "slurm", "sparsify")
# What decides a result: a changed README or a new figure makes no measurement doubtful.
CODE = (*FOLDERS, "constraints.txt", "pyproject.toml", "requirements")
# What the numbers of a run rest on: of LISTS, what the run has chosen by name.
MEASURING = ("sparsify", "experiments/tasks", "experiments/training", "experiments/worker")
LISTS = ("sparsify/methods", "experiments/tasks", "experiments/training/datasets")
NOTE = "code.json"  # what `origin` was, in a copy of the code, which has no git repository


def files() -> list[Path]:
    """The code's files, relative to the checkout: all that its folders hold, whatever its kind, without what
    Python and editors leave there.
    """
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(path for path in (path.relative_to(ROOT) for path in found) if not _is_left(path))


def _is_left(path: Path) -> bool:
    # What conf/local holds is in the configuration of each run that was made of it.
    is_hidden = any(part == "__pycache__" or part[0] == "." for part in path.parts)
    return is_hidden or path.name.endswith("~") or path.is_relative_to("conf/local")


@cache
def digest() -> str:
    """12 digits of a hash over the code's files, names and contents."""
    sha = hashlib.sha256()
    for path in files():
        content = (ROOT / path).read_bytes()
        sha.update(f"{path}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:12]


@cache
def sources() -> dict[str, str]:
    """12 digits of a hash of each file that a run's numbers may rest on, by its path in the checkout."""
    paths = [path for path in files() if any(path.is_relative_to(folder) for folder in MEASURING)]
    return {str(path): hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:12] for path in paths}


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
        return noted
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

    Copies are shared by all that submit the same code.
    """
    place = folder / digest()
    if not (place / NOTE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{digest()}-", dir=folder))
        for path in files():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, part / path)
        write_json(part / NOTE, origin())
        part.chmod(0o755)
        try:
            part.rename(place)
        except OSError:  # somebody else was faster
            shutil.rmtree(part)
    return place
