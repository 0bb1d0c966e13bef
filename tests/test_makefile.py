"""The environment that `make` makes: what was left half done is done again.

Programs that stand in for Python create nothing and install nothing; they note what they are told.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, fine, process, there

# As venv does: bin/python first, then pip, which fails where Debian's python3-venv is not installed.
PYTHON = r"""#!/bin/sh
echo "$*" >> calls
case "$*" in
  "-m venv"*) mkdir -p venv/bin && cp python venv/bin/python && [ ! -e no-ensurepip ] && touch venv/bin/pip ;;
  "-m pip"*+cpu*) [ -e cpu-build ] ;;
  "-m pip"*) printf 'Collecting\n  Downloading torch.whl.metadata (9 kB)\n  Downloading torch.whl (190 MB)\n'
    [ ! -e no-network ] ;;
  *) exec python3 "$@" ;;
esac
"""


class Checkout:
    """Folder in which `make` finds a Python that notes its words in `calls`.

    It fails where there is a file `no-ensurepip`, or `no-network`, or is asked for a CPU's build and there is
    no `cpu-build`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        (folder / "experiments").mkdir()
        shutil.copy(ROOT / "experiments" / "versions.py", folder / "experiments")
        write_program(folder / "python", PYTHON)

    def fail(self, *words: str, **variables: str) -> str:
        """Call `make` with these words, which fails; return what it says."""
        done = self._call(*words, **variables)
        assert done.returncode == 2, done
        return done.stderr

    def make(self, *words: str, **variables: str) -> str:
        """Call `make` with these words; return what it says."""
        return fine(self._call(*words, **variables)).stdout

    def _call(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "calls").write_text("")
        command = ("make", "PYTHON=./python", "VENV=venv", "TORCH=cuda", *words)
        return process(*command, cwd=self.folder, env={**os.environ, **variables})

    def calls(self, words: str) -> int:
        """Return how often Python was called with these words since the last `make`."""
        lines = (self.folder / "calls").read_text().splitlines()
        return sum(line.startswith(words) for line in lines)


def write_program(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_figure_that_there_is_not_is_refused_before_anything_is_installed(checkout: Checkout) -> None:
    items = checkout.folder / "experiments" / "figures"
    items.mkdir(parents=True)
    for name in ("__init__.py", "_runs.py", "yoon2022_fig4.py", "yoon2022_fig3_level.py"):
        (items / name).touch()
    for figure in ("fig99", "level", "yoon2022/fig4", "Fig4"):
        said = checkout.fail(f"reproduce-{figure}")
        assert f"reproduce-{figure}: there is no such figure; there are: fig3-level fig4" in said
        assert checkout.calls("-m") == 0


def test_an_environment_is_made_once_and_what_failed_is_tried_again(checkout: Checkout) -> None:
    (checkout.folder / "no-ensurepip").touch()
    checkout.fail("venv/.train")
    assert (checkout.folder / "venv/bin/python").exists()
    (checkout.folder / "no-ensurepip").unlink()
    said = checkout.make("venv/.train")
    assert (checkout.calls("-m venv"), checkout.calls("-m pip")) == (1, 1)  # one call for all layers
    assert "  Downloading torch.whl (190 MB)" in said.splitlines()
    assert "metadata" not in said  # nor other words of pip's that tell a user nothing
    checkout.make("venv/.train")
    assert checkout.calls("-m") == 0
    (checkout.folder / "no-network").touch()
    for stamp in (checkout.folder / "venv").glob(".*"):
        os.utime(stamp, (0, 0))  # the project's files are newer
    checkout.fail("venv/.train")
    assert not (checkout.folder / "venv/.train").exists()
    (checkout.folder / "no-network").unlink()
    checkout.make("venv/.dev")
    assert checkout.calls("-m pip") == 1
    for layer in (".figures", ".train"):
        checkout.make(f"venv/{layer}")
        assert checkout.calls("-m") == 0


def test_figures_need_no_torch(checkout: Checkout) -> None:
    checkout.make("venv/.figures")
    words = (checkout.folder / "calls").read_text()
    assert "-r requirements/figures.txt\n" in words
    assert "-e" not in words.split()
    assert not re.search("(?m)^torch", (ROOT / "requirements" / "figures.txt").read_text())


def test_an_unsupported_python_is_refused_with_a_sentence(checkout: Checkout) -> None:
    versions = checkout.folder / "experiments" / "versions.py"
    versions.write_text(versions.read_text().replace("((3, 10), (3, 14))", "((3, 98), (3, 99))"))
    said = checkout.fail("venv/.figures")
    (line,) = (line for line in said.splitlines() if not line.startswith("make"))
    assert "needs Python 3.98 to 3.99" in line
    assert "make PYTHON=python3.99" in line
    assert not (checkout.folder / "venv").exists()


def test_carried_wheels_are_installed_beside_what_python_has_without_a_network(checkout: Checkout) -> None:
    wheels = checkout.folder / "wheels"
    wheels.mkdir()
    said = checkout.fail("venv/.train", "WHEELS=wheels")
    assert "WHEELS=wheels: there are no wheels; docs/measuring.md says" in said
    (wheels / "one.whl").touch()
    checkout.make("venv/.train", "WHEELS=wheels")
    assert checkout.calls("-m venv --system-site-packages venv") == 1
    assert checkout.calls("-m pip install --quiet --no-index --no-deps wheels/one.whl") == 1
    checkout.make("venv/.train", "WHEELS=wheels")
    assert checkout.calls("-m") == 0


# Which build of torch.


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Provide a folder for $PATH: of programs those that make needs, no GPU's and no cluster's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(Path(sys.executable).resolve())
    for name in ("make", "sh", "sed", "rm", "mkdir", "cp", "touch"):
        (folder / name).symlink_to(there(shutil.which(name)))
    return folder


def cpu_builds(checkout: Checkout) -> int:
    """Return how often torch's build for CPUs was asked for, in the versions of constraints.txt."""
    pins = re.findall(r"(?m)^(torch(?:vision)?==\S+)$", (ROOT / "constraints.txt").read_text())
    assert len(pins) == 2
    return (checkout.folder / "calls").read_text().count(" ".join(f"{pin}+cpu" for pin in pins))


def test_the_build_for_cpus_is_taken_where_no_gpu_is_or_may_be_or_where_it_is_named(
    checkout: Checkout, bare: Path
) -> None:
    """A login node has no GPU, and its environment is the jobs'."""
    for named, program, index_has_it, builds in (
        ("auto", "no-such", True, 1),
        ("auto", "no-such", False, 1),
        ("auto", "nvidia-smi", True, 0),
        ("auto", "sbatch", True, 0),
        ("cpu", "nvidia-smi", True, 1),
    ):
        shutil.rmtree(checkout.folder / "venv", ignore_errors=True)
        (checkout.folder / "cpu-build").unlink(missing_ok=True)
        if index_has_it:
            (checkout.folder / "cpu-build").touch()
        write_program(bare / program)
        said = checkout.make("venv/.train", f"TORCH={named}", PATH=str(bare))
        assert cpu_builds(checkout) == builds, (named, program)
        assert ("the index has no CPU build of torch" in said) != index_has_it
        (bare / program).unlink()
    said = checkout.fail("venv/.train", "TORCH=rocm")
    assert "TORCH=rocm: must be auto, cpu or cuda" in said
