"""Build the library's wheel and source archive, check both, and say what a release still lacks.

    python -m tests.dist FOLDER

`make dist` calls it with build/dist. Files that git does not know are left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path, PurePath

from sparsify.core.checks import OTHER_DISTRIBUTION

ROOT = Path(__file__).parent.parent
SOURCES = ("sparsify", "requirements", "pyproject.toml", "README.md", "LICENSE*")
NEEDED = ("sparsify/py.typed", "sparsify/kernels/native.cpp")
MAX_BYTES = 10**6
IMPORT = "import sparsify; assert 'topk' in sparsify.names()"


def main(folder: Path) -> int:
    """Write the archives into the folder, and return 1 if a check fails."""
    shutil.rmtree(folder, ignore_errors=True)
    wheel, source = archives = build_archives(folder)
    faults = [*find_faults(wheel), *find_faults(source), *try_index(archives), *try_alone(wheel)]
    for archive in archives:
        print(f"{archive}: {archive.stat().st_size / 1e6:.2f} MB")
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    if not faults:
        print(f"checked: each is below {MAX_BYTES / 1e6:g} MB, has types and C++ source, and no tests;")
        print("checked: twine takes both, and the wheel works where nothing else is installed")
    for decision in list_open_decisions(wheel):
        print(f"missing for a release, for the owner to decide: {decision}")
    return 1 if faults else 0


def build_archives(folder: Path) -> tuple[Path, Path]:
    """Build the source archive from the files that git knows, and the wheel from that archive."""
    names = subprocess.check_output(["git", "ls-files", *SOURCES], cwd=ROOT, text=True).splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            (Path(scratch) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(scratch) / name)
        words = ["-m", "build", "--no-isolation", "--outdir", str(folder.absolute()), scratch]
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    return wheel, source


def find_faults(archive: Path) -> list[str]:
    """Return sentences on an archive that is too large, lacks a file, or has tests."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened_wheel:
            names = opened_wheel.namelist()
    else:
        with tarfile.open(archive) as opened_source:
            names = [name.partition("/")[2] for name in opened_source.getnames()]
    faults = [f"{archive.name} lacks {name}" for name in NEEDED if name not in names]
    tests = [name for name in names if {"tests", "test"} & set(PurePath(name).parts)]
    if tests:
        faults.append(f"{archive.name} has tests: {tests[0]}")
    size = archive.stat().st_size
    if size >= MAX_BYTES:
        faults.append(f"{archive.name} has {size / 1e6:.2f} MB; {MAX_BYTES / 1e6:g} MB is the limit")
    return faults


def try_index(archives: tuple[Path, Path]) -> list[str]:
    """Return what twine finds that a package index would refuse, or could not show."""
    words = ["-m", "twine", "--no-color", "check", "--strict", *map(str, archives)]
    return _run_and_explain([sys.executable, *words], archives[0].parent)


def try_alone(wheel: Path) -> list[str]:
    """Return what fails when the wheel is installed into an empty environment, imported and called."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=False)
        programs = Path(scratch) / "bin"
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(programs / "python")]
        commands: list[list[str]] = [
            [*pip, "install", "--no-deps", "--no-index", str(wheel.absolute())],
            [str(programs / "python"), "-I", "-c", IMPORT],
            [str(programs / "sparsify"), "--version"],
        ]
        for command in commands:
            faults = _run_and_explain(command, programs)
            if faults:
                return faults
        return []


def _run_and_explain(command: list[str], folder: Path) -> list[str]:
    """Return a sentence if a command, run in a folder, fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return [f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"]


def list_open_decisions(wheel: Path) -> list[str]:
    """Return what only the owner can decide before a release: a licence, and an import name of its own."""
    (about,) = metadata.distributions(path=[str(wheel)])
    decisions = []
    if "License-Expression" not in about.metadata:
        decisions.append(
            "a licence, without which nobody may copy or change the code: its text as LICENSE, its name as "
            "`license` in pyproject.toml"
        )
    if OTHER_DISTRIBUTION in (about.read_text("top_level.txt") or "").split():
        decisions.append(
            f"a name: the package is {about.name}, but its `import {OTHER_DISTRIBUTION}` is "
            f"also another project's on the index, {OTHER_DISTRIBUTION}"
        )
    return decisions


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
