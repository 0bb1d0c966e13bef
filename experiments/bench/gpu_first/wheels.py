"""The packages that a machine without a network lacks, into a folder to be carried there.

make gpu-wheels WHEELS=wheels ARGS="--python 3.12 --torch 2.11"

Torch itself is large and made for a driver: the machine has it, and what `--there` names besides, with all
that these need. What runs and tests need beyond that is fetched, in the versions of constraints.txt and as
wheels for that Python; `make gpu-first WHEELS=wheels` installs them there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from experiments.config.folders import ROOT

PROJECT = "gradient-sparsification"
THERE = ("torch", "triton", "pandas", "matplotlib", "pyarrow")
CHECKS = (
    "import-linter", "ipykernel", "jupytext", "mypy", "nbclient", "pandas-stubs", "playwright", "ruff",
    "types-greenlet", "types-psutil",
)  # fmt: skip
SOURCE_ONLY = ("antlr4-python3-runtime",)  # no wheel of it was published; it is plain Python
AHEAD = 15  # minor versions: torchvision 0.26 is for torch 2.11


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
    pinned = [Requirement(line) for line in lines if line]
    applying = (
        each for each in pinned if not each.marker or each.marker.evaluate({"python_version": python})
    )
    return {canonicalize_name(each.name): str(each.specifier) for each in applying}


def carried(python: str, torch: str, there: Iterable[str]) -> list[str]:
    """What to fetch, as pip takes it."""
    has = needed(there, python)
    lacking = needed([f"{PROJECT}[dev]"], python, {*has, *CHECKS})
    del lacking[PROJECT]
    minor = int(torch.partition(".")[2])
    versions = {**pins(python), "torchvision": f"==0.{minor + AHEAD}.*"}
    return sorted(name + versions.get(name, "") for name in lacking)


def taken_by(project: str = PROJECT) -> tuple[SpecifierSet, SpecifierSet]:
    """The versions of Python and of torch that it works with."""
    needs = {each.name: each.specifier for each in map(Requirement, metadata.requires(project) or ())}
    return SpecifierSet(metadata.metadata(project)["Requires-Python"]), needs["torch"]


def main() -> int:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch = ".".join(metadata.version("torch").split(".")[:2])
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("wheels"))
    parser.add_argument("--python", default=here, help="its version there")
    parser.add_argument("--torch", default=torch, help="its version there")
    parser.add_argument("--there", nargs="+", default=THERE, help="packages that are there")
    parser.add_argument("--list", action="store_true", help="what would be fetched")
    asked = parser.parse_args()
    pythons, torches = taken_by()
    for name, value, taken in (("--python", asked.python, pythons), ("--torch", asked.torch, torches)):
        if not re.fullmatch(r"\d+\.\d+", value):
            parser.error(f"{name} {value}: must be two numbers, as 3.12 and 2.11 are")
        if f"{value}.0" not in taken:
            parser.error(f"{name} {value}: this project takes {taken}")
    wanted = carried(asked.python, asked.torch, asked.there)
    if asked.list:
        print(*wanted, sep="\n")
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    code = fetch(wanted, asked.folder, asked.python)
    wheels = list(asked.folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in wheels)
    print(f"{len(wheels)} wheels for Python {asked.python} in {asked.folder}, {size / 2**20:.0f} MiB")
    return code


def fetch(wanted: Iterable[str], folder: Path, python: str) -> int:
    """pip's exit code."""
    is_source = {name: name.startswith(SOURCE_ONLY) for name in wanted}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    download = (
        "download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", str(folder),
    )  # fmt: skip
    build = ("wheel", "--no-deps", "--wheel-dir", str(folder))
    for words, sources in ((download, False), (build, True)):
        names = [name for name, source in is_source.items() if source == sources]
        done = subprocess.run([*pip, *words, *names], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
