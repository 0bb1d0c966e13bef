"""Packages of others that only the benchmark of peers needs, in a folder of their own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from importlib.metadata import distributions, version
from pathlib import Path
from typing import NamedTuple

import sparsify
from experiments.config.folders import ROOT
from slurm import environment

REQUIREMENTS = ROOT / "requirements" / "peers.txt"
CONSTRAINTS = ROOT / "constraints.txt"
TORCHFT = "torchft"


class PeerPackages(NamedTuple):
    """The folder of the packages, and the version of each package; `why` where torchft is not there."""

    folder: str
    version_by_package: dict[str, str]
    why: str = ""


def ensure_peer_packages() -> PeerPackages:
    """Install what `requirements/peers.txt` lists into a folder of the user's cache, once.

    The environment of this process stays as it is. Workers that need the folder append it to their path, so
    that their own environment comes first.
    """
    folder = peer_packages_folder()
    why = "" if folder.is_dir() else try_install(folder)
    why = why or explain_failed_import(folder)
    if why:
        return PeerPackages(str(folder), installed_versions(), f"could not run: {why}")
    (peer,) = distributions(name=TORCHFT, path=[str(folder)])
    return PeerPackages(str(folder), installed_versions() | {TORCHFT: peer.version})


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages in this process's own environment."""
    return {"torch": version("torch"), "sparsify": sparsify.__version__}


def peer_packages_folder() -> Path:
    """Return the folder of the packages, which is another one for other versions of them or of Python."""
    content = REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes()
    name = f"{sys.implementation.cache_tag}-{hashlib.sha256(content).hexdigest()[:12]}"
    return environment.cache_folder() / "sparsify" / "peers" / name


def try_install(folder: Path) -> str:
    """Install the packages into a new folder, all or none, and return why that failed; else nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"installing {REQUIREMENTS.name} into {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        target = Path(part) / "packages"
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        why = run_python(*words, "--target", target, "-c", CONSTRAINTS, "-r", REQUIREMENTS)
        if not why:
            target.rename(folder)
    return why and f"pip could not install it ({why})"


def explain_failed_import(folder: Path) -> str:
    """Return why the installed torchft can't be imported beside this torch; else nothing."""
    why = run_python("-c", f"import sys; sys.path.append({str(folder)!r}); import {TORCHFT}")
    return why and f"it can't be imported ({why.replace(str(folder), TORCHFT)})"


def run_python(*words: str | Path) -> str:
    """Run Python with these words, and return the last line of its errors if it fails; else nothing."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
