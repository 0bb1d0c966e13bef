"""The command `sparsify`, and what an import of the wrong project says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sparsify
from sparsify.core.checks import DISTRIBUTION
from tests import conftest
from tests.conftest import ROOT


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages, with ours."""
    shutil.copytree(ROOT / "sparsify", tmp_path / "sparsify", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / f"{DISTRIBUTION.replace('-', '_')}-{sparsify.__version__}.dist-info").mkdir()
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return conftest.python("-W", "error", *words, cwd=folder, env=environment)


def test_it_tells_version_kernels_and_methods(site: Path) -> None:
    done = python(site, "-m", "sparsify")
    assert (done.returncode, done.stderr) == (0, "")
    about, methods = done.stdout.split("\n\n")
    first, torch, on_cpu, *_ = about.splitlines()
    assert first == f"{DISTRIBUTION} {sparsify.__version__}"
    assert torch.startswith("PyTorch 2.")
    assert on_cpu.startswith(("on the CPU selects C++ (", "on the CPU selects numpy, slower than C++: "))
    assert [line.split()[0] for line in methods.splitlines()] == sparsify.names()
    assert "topk          Top-k SGD: each worker sends its k largest, keeps the rest\n" in methods


def test_a_broken_file_is_named_and_spoils_no_other(site: Path) -> None:
    (site / "sparsify" / "methods" / "mine.py").write_text("def mine(:\n")
    done = python(site, "-m", "sparsify")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\nmine          {site / 'sparsify/methods/mine.py'}, line 1: " in done.stdout
    assert "\ntopk          Top-k SGD" in done.stdout


def test_without_torch_it_tells_what_it_can(site: Path) -> None:
    program = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'torch' else find(name); sys.modules['torch'] = None\n"
        "from sparsify.__main__ import main; sys.exit(main())"
    )
    done = python(site, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PyTorch is not installed here" in done.stdout
    assert "\ntopk " in done.stdout


def test_the_other_project_s_files_beside_ours_are_refused_in_a_sentence(site: Path) -> None:
    (site / "sparsify_beside-1.0.dist-info").mkdir()  # neither of both
    assert python(site, "-c", "import sparsify").returncode == 0
    (site / "sparsify-1.7.0.dist-info").mkdir()
    done = python(site, "-c", "import sparsify")
    assert done.returncode == 1
    *_, said = done.stderr.splitlines()
    assert said == (
        f"ImportError: two projects have installed their files into {site / 'sparsify'}: {DISTRIBUTION}, "
        f"which this is, and another one, sparsify; `pip uninstall sparsify {DISTRIBUTION}`, then install "
        "the one that you want, or each into an environment of its own"
    )


@pytest.mark.parametrize("left", ["theirs", "nothing"])
def test_where_theirs_has_replaced_ours_the_command_says_so(site: Path, left: str) -> None:
    (site / "sparsify" / "__init__.py").unlink()
    if left == "theirs":
        (site / "sparsify" / "__init__.py").write_text("__version__ = '1.7.0'\n")
    done = python(site, "-m", "sparsify")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"`import sparsify` does not find {DISTRIBUTION}" in done.stderr
    assert f"pip uninstall sparsify {DISTRIBUTION}" in done.stderr


def test_importing_takes_nothing_but_the_standard_library(site: Path) -> None:
    others = "hydra omegaconf pandas matplotlib pyarrow scipy msgspec rich griffe torch numpy"
    program = f"import sys; sys.modules.update(dict.fromkeys('{others}'.split())); import sparsify"
    done = python(site, "-c", f"{program}; sparsify.names(); sparsify.defaults('dgc')")
    assert (done.returncode, done.stderr) == (0, "")


def test_one_method_is_explained_and_none_is_refused(site: Path) -> None:
    told = python(site, "-m", "sparsify", "dgc")
    assert (told.returncode, told.stderr) == (0, "")
    assert "Lin et al." in told.stdout
    assert "\nmomentum=0.9  [" in told.stdout
    wrong = python(site, "-m", "sparsify", "topj")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no method 'topj' (did you mean 'topk'?)" in wrong.stderr
    assert python(site, "-m", "sparsify", "--version").stdout == f"{DISTRIBUTION} {sparsify.__version__}\n"


@pytest.mark.parametrize("words", ["", "topk"])
def test_a_reader_that_ends_early_sees_no_traceback(words: str) -> None:
    """`| true` reads nothing; bash tells how both ended."""
    command = f'"{sys.executable}" -m sparsify {words} | true; echo ${{PIPESTATUS[0]}}'
    done = conftest.process("bash", "-c", command)
    assert done.stdout.strip() in ("0", "141")  # 0 where the pipe was still open when all was written
    assert done.stderr == ""
