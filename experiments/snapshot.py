"""Which code is this? Its commit, its digest, and a copy of it that a queued job can count on."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from analysis.records import read_json, write_json

ROOT = Path(__file__).parent.parent
FOLDERS = ("analysis", "conf", "experiments", "slurm", "sparsify")
KINDS = (".py", ".yaml")
# What decides a result; a changed README or a new figure does not make a measurement doubtful.
CODE = (*FOLDERS, "constraints.txt", "pyproject.toml")
NOTE = "code.json"  # in a copy, where git can't be asked any more


def files() -> list[Path]:
    """The code's files, relative to the checkout."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS)
    return sorted(path.relative_to(ROOT) for path in found)


@cache
def digest() -> str:
    """12 digits of a hash over the code's files, names and contents."""
    sha = hashlib.sha256()
    for path in files():
        content = (ROOT / path).read_bytes()
        sha.update(f"{path}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:12]


def take(into: Path) -> Path:
    """A copy of the code below `into`, named by its digest: what is edited after submission changes no job.

    Copies are shared by all that submit the same code.
    """
    place = into / digest()
    if not (place / NOTE).is_file():
        into.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{digest()}-", dir=into))
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


@cache
def origin() -> dict[str, str | None]:
    """The commit, and what differs from it: 12 digits of a hash; None where nothing does."""
    if (noted := read_json(ROOT / NOTE)) is not None:
        return noted
    changed = _git("status", "--porcelain", "--", *CODE)
    difference = (_git("diff", "HEAD", "--", *CODE) or "") if changed else ""
    dirty = hashlib.sha256((changed + difference).encode()).hexdigest()[:12] if changed else None
    return {"commit": _git("rev-parse", "HEAD"), "dirty": dirty}


def _git(*words: str) -> str | None:
    """What git prints, or None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
