"""The environment that `make` makes: what was left half done is done again. Programs that stand in for Python
create nothing and install nothing; they note what they are told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

Make = Callable[..., "subprocess.CompletedProcess[str]"]
# As venv does: bin/python first, then pip, which fails where Debian's python3-venv is not installed.
VENV = """
mkdir -p venv/bin && cp python venv/bin/python && [ ! -e no-ensurepip ] && touch venv/bin/pip
"""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make TARGET` with a Python that notes its words in `calls`, and fails where there is a file
    `no-ensurepip`, or `no-network`.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
echo "$*" >> calls
case "$*" in
  "-m venv"*) {VENV.strip()} ;;
  "-m pip"*) [ ! -e no-network ] ;;
  *) exec python3 "$@" ;;
esac
"""
    )
    python.chmod(0o755)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "calls").write_text("")
        return subprocess.run(
            ["make", "PYTHON=./python", "VENV=venv", *words],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def calls(folder: Path, words: str) -> int:
    return sum(line.startswith(words) for line in (folder / "calls").read_text().splitlines())


def test_an_environment_is_made_once(make: Make, tmp_path: Path) -> None:
    assert make("venv/.train").returncode == 0
    assert (calls(tmp_path, "-m venv"), calls(tmp_path, "-m pip")) == (1, 2)
    assert make("venv/.train").returncode == 0
    assert (calls(tmp_path, "-m venv"), calls(tmp_path, "-m pip")) == (0, 0)


def test_a_creation_that_failed_is_tried_again(make: Make, tmp_path: Path) -> None:
    (tmp_path / "no-ensurepip").touch()
    assert make("venv/.figures").returncode == 2
    assert (tmp_path / "venv/bin/python").exists()
    (tmp_path / "no-ensurepip").unlink()
    assert make("venv/.figures").returncode == 0
    assert (calls(tmp_path, "-m venv"), calls(tmp_path, "-m pip")) == (1, 1)


def test_an_installation_that_failed_leaves_no_stamp_and_is_tried_again(make: Make, tmp_path: Path) -> None:
    assert make("venv/.train").returncode == 0
    (tmp_path / "no-network").touch()
    for made in (tmp_path / "venv").glob(".*"):
        os.utime(made, (0, 0))  # the project's files are newer
    assert make("venv/.train").returncode == 2
    assert not (tmp_path / "venv/.figures").exists()
    (tmp_path / "no-network").unlink()
    assert make("venv/.train").returncode == 0
    assert calls(tmp_path, "-m pip") == 2


def test_an_unsupported_python_is_refused_with_a_sentence(make: Make, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(project.read_text().replace('">=3.10,<3.14"', '">=3.98,<3.100"'))
    done = make("venv/.figures")
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("make"))
    assert "needs Python 3.98 to 3.99" in line
    assert "make PYTHON=" in line
    assert not (tmp_path / "venv").exists()


def test_carried_wheels_are_installed_beside_what_python_has_without_a_network(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    done = make("venv/.train", "WHEELS=wheels")
    assert done.returncode == 2
    assert "WHEELS=wheels: there are no wheels; make gpu-wheels" in done.stderr
    (tmp_path / "wheels" / "one.whl").touch()
    assert make("venv/.train", "WHEELS=wheels").returncode == 0
    assert calls(tmp_path, "-m venv --system-site-packages venv") == 1
    assert calls(tmp_path, "-m pip install --quiet --no-index --no-deps wheels/one.whl") == 1
    assert make("venv/.train", "WHEELS=wheels").returncode == 0
    assert calls(tmp_path, "-m") == 0
