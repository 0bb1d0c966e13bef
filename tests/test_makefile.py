"""The environment that `make` makes: what was left half done is done again. Programs that stand in for Python
create nothing and install nothing; they note what they are told.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, process, there

Make = Callable[..., "subprocess.CompletedProcess[str]"]
# As venv does: bin/python first, then pip, which fails where Debian's python3-venv is not installed.
VENV = """
mkdir -p venv/bin && cp python venv/bin/python && [ ! -e no-ensurepip ] && touch venv/bin/pip
"""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make TARGET` with a Python that notes its words in `calls`, and fails where there is a file
    `no-ensurepip`, or `no-network`, or is asked for a CPU's build and there is no `cpu-build`.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
echo "$*" >> calls
case "$*" in
  "-m venv"*) {VENV.strip()} ;;
  "-m pip"*+cpu*) [ -e cpu-build ] ;;
  "-m pip"*) [ ! -e no-network ] ;;
  *) exec python3 "$@" ;;
esac
"""
    )
    python.chmod(0o755)

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "calls").write_text("")
        command = ("make", "PYTHON=./python", "VENV=venv", "TORCH=cuda", *words)
        return process(*command, cwd=tmp_path, env={**os.environ, **variables})

    return run


def calls(folder: Path, words: str) -> int:
    return sum(line.startswith(words) for line in (folder / "calls").read_text().splitlines())


@pytest.mark.parametrize("figure", ["fig99", "level", "yoon2022/fig4", "Fig4"])
def test_a_figure_that_there_is_not_is_refused_before_anything_is_installed(
    make: Make, tmp_path: Path, figure: str
) -> None:
    (items := tmp_path / "experiments" / "figures").mkdir(parents=True)
    for name in ("__init__.py", "_runs.py", "yoon2022_fig4.py", "yoon2022_fig3_level.py"):
        (items / name).touch()
    done = make(f"reproduce-{figure}")
    assert done.returncode == 2
    assert f"reproduce-{figure}: there is no such figure; there are: fig3-level fig4" in done.stderr
    assert calls(tmp_path, "-m") == 0
    make("reproduce-fig3-level")
    assert calls(tmp_path, "-m pip") == 2


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


# Which build of torch.


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for $PATH: of programs those that make needs, no GPU's and no cluster's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(Path(sys.executable).resolve())
    for name in ("make", "sh", "sed", "rm", "mkdir", "cp", "touch"):
        found = there(shutil.which(name))
        (folder / name).symlink_to(found)
    return folder


def pretend(program: Path) -> None:
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


def builds(folder: Path) -> int:
    """How often torch's build for CPUs was asked for, in the versions of constraints.txt."""
    pinned = dict(re.findall(r"^(torch|torchvision)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    asked = f"torch=={pinned['torch']}+cpu torchvision=={pinned['torchvision']}+cpu"
    return sum(asked in line for line in (folder / "calls").read_text().splitlines())


def test_a_machine_without_gpu_takes_the_build_for_cpus(make: Make, tmp_path: Path, bare: Path) -> None:
    (tmp_path / "cpu-build").touch()
    done = make("venv/.train", "TORCH=auto", PATH=str(bare))
    assert (done.returncode, builds(tmp_path)) == (0, 1)
    assert "index" not in done.stdout + done.stderr


def test_where_the_index_has_none_it_says_so_and_takes_the_other(
    make: Make, tmp_path: Path, bare: Path
) -> None:
    done = make("venv/.train", "TORCH=auto", PATH=str(bare))
    assert (done.returncode, builds(tmp_path)) == (0, 1)
    (told,) = (line for line in done.stdout.splitlines() if "the index has no" in line)
    assert "CPU build of torch" in told
    assert (tmp_path / "venv/.train").exists()


@pytest.mark.parametrize("program", ["nvidia-smi", "sbatch"])
def test_where_a_gpu_is_or_may_be_the_other_is_taken(
    make: Make, tmp_path: Path, bare: Path, program: str
) -> None:
    """A login node has none, and its environment is the jobs'."""
    pretend(bare / program)
    assert make("venv/.train", "TORCH=auto", PATH=str(bare)).returncode == 0
    assert builds(tmp_path) == 0


def test_who_names_a_build_gets_it(make: Make, tmp_path: Path, bare: Path) -> None:
    (tmp_path / "cpu-build").touch()
    pretend(bare / "nvidia-smi")
    assert make("venv/.train", "TORCH=cpu", PATH=str(bare)).returncode == 0
    assert builds(tmp_path) == 1
    done = make("venv/.train", "TORCH=rocm")
    assert done.returncode == 2
    assert "TORCH=rocm: must be auto, cpu or cuda" in done.stderr


def test_figures_need_no_torch(make: Make, tmp_path: Path) -> None:
    assert make("venv/.figures").returncode == 0
    assert calls(tmp_path, "-m pip") == 1
    words = (tmp_path / "calls").read_text()
    assert "-r requirements/figures.txt\n" in words
    assert "-e" not in words.split()
    listed = (ROOT / "requirements" / "figures.txt").read_text().splitlines()
    assert not any(line.startswith("torch") for line in listed)
