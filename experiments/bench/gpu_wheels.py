"""Wheels for a machine without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from experiments.config.folders import ROOT

PROJECT = "gradient-sparsification"
THERE = ("torch", "triton", "pandas", "matplotlib", "pyarrow")
CHECKS = (
    "accelerate", "import-linter", "ipykernel", "lightning", "mypy", "nbclient", "pandas-stubs",
    "playwright", "ruff", "types-greenlet", "types-psutil",
)  # fmt: skip
SOURCE_ONLY = ("antlr4-python3-runtime",)  # no wheel of it was published; it is plain Python
AHEAD = 15  # minor versions: torchvision 0.26 is for torch 2.11


def gpu_wheels(
    folder: str = "wheels",
    *,
    python: str = "",
    torch: str = "",
    there: Sequence[str] = THERE,
    list: bool = False,
) -> int:
    """The packages that a machine without a network lacks, into a folder to be carried there.

    make gpu-wheels WHEELS=wheels ARGS="--python 3.12 --torch 2.11"

    Torch itself is large and made for a driver: the machine has it, and what `--there` names besides, with
    all that these need. What runs and tests need beyond that is fetched, in the versions of constraints.txt
    and as wheels for that Python; `make gpu-first WHEELS=wheels` installs them there.

    Args:
        folder: where the wheels go.
        python: its version there; by default as here.
        torch: its version there; by default as here.
        there: packages that are there.
        list: print what would be fetched.
    """
    python = python or f"{sys.version_info.major}.{sys.version_info.minor}"
    torch = torch or ".".join(metadata.version("torch").split(".")[:2])
    needs = {each.name: each.specifier for each in map(Requirement, metadata.requires(PROJECT) or ())}
    pythons = SpecifierSet(metadata.metadata(PROJECT)["Requires-Python"])
    for name, value, taken in (("--python", python, pythons), ("--torch", torch, needs["torch"])):
        if not re.fullmatch(r"\d+\.\d+", value):
            raise ValueError(f"{name} {value}: must be two numbers, as 3.12 and 2.11 are")
        if f"{value}.0" not in taken:
            raise ValueError(f"{name} {value}: this project takes {taken}")
    wanted, path = carried(python, torch, there), Path(folder)
    if list:
        print(*wanted, sep="\n")
        return 0
    path.mkdir(parents=True, exist_ok=True)
    code = fetch(wanted, path, python)
    wheels = [*path.glob("*.whl")]
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels for Python {python} in {path}, {size / 2**20:.0f} MiB")
    return code


def needed(names: Iterable[str], python: str, without: Iterable[str] = ()) -> dict[str, None]:
    """These packages and all that they need on Linux and this Python, as far as it is installed here."""
    found, left = dict[str, None](), [Requirement(name) for name in names]
    while left:
        asked = left.pop()
        name = canonicalize_name(asked.name)
        if name in found or name in without:
            continue
        try:
            own = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found[name] = None
        for extra in asked.extras or ("",):
            surroundings = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
            wanted = (Requirement(line) for line in own)
            left += [each for each in wanted if not each.marker or each.marker.evaluate(surroundings)]
    return found


def pins(python: str) -> dict[str, str]:
    """The versions of constraints.txt that are for this Python."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned, here = [Requirement(line) for line in lines if line], {"python_version": python}
    return {
        canonicalize_name(each.name): str(each.specifier)
        for each in pinned
        if not each.marker or each.marker.evaluate(here)
    }


def carried(python: str, torch: str, there: Iterable[str]) -> list[str]:
    """Requirements to fetch, as pip takes them."""
    has = needed(there, python)
    lacking = needed([f"{PROJECT}[dev]"], python, {*has, *CHECKS})
    del lacking[PROJECT]
    minor = int(torch.partition(".")[2])
    versions = {**pins(python), "torchvision": f"==0.{minor + AHEAD}.*"}
    return sorted(name + versions.get(name, "") for name in lacking)


def fetch(wanted: Iterable[str], folder: Path, python: str) -> int:
    """pip's exit code."""
    download = ("download", "--only-binary=:all:", "--python-version", python, "--dest", str(folder))
    sources = [name for name in wanted if name.startswith(SOURCE_ONLY)]
    wheels = [name for name in wanted if name not in sources]
    for words, names in ((download, wheels), (("wheel", "--wheel-dir", str(folder)), sources)):
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
        done = subprocess.run([*pip, *words, "--no-deps", *names], check=False)
        if done.returncode:
            return done.returncode
    return 0
