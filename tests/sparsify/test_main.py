"""The command `sparsify`, and what an import of the wrong project says."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import sparsify
from sparsify.core.checks import DISTRIBUTION
from tests.conftest import ROOT, process, python

Run = Callable[..., "CompletedProcess[str]"]
WITHOUT_TORCH = """
import sys, importlib.util as u
find = u.find_spec
u.find_spec = lambda name: None if name == "torch" else find(name)
sys.modules["torch"] = None
from sparsify.__main__ import main
sys.exit(main())
"""
WITHOUT_OTHERS = """
import sys
others = "hydra omegaconf pandas matplotlib pyarrow scipy msgspec rich griffe torch numpy"
sys.modules.update(dict.fromkeys(others.split()))
import sparsify
print(sparsify.names(), sparsify.defaults("dgc"))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of packages, with ours."""
    shutil.copytree(ROOT / "sparsify", tmp_path / "sparsify", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / f"{DISTRIBUTION.replace('-', '_')}-{sparsify.__version__}.dist-info").mkdir()
    return tmp_path


@pytest.fixture
def run(site: Path) -> Run:
    """Return a function that runs Python with this folder as the first of its path."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return lambda *words: python("-W", "error", *words, cwd=site, env=environment)


def read(done: CompletedProcess[str]) -> str:
    """Return what a command printed that ended well."""
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_tells_version_kernels_and_methods_and_names_a_broken_file(run: Run, site: Path) -> None:
    path = site / "sparsify" / "methods" / "mine.py"
    path.write_text("def mine(:\n")
    about, methods = read(run("-m", "sparsify")).split("\n\n")
    first, torch, on_cpu, *_ = about.splitlines()
    assert first == f"{DISTRIBUTION} {sparsify.__version__}"
    assert torch.startswith("PyTorch 2.")
    assert on_cpu.startswith(("on the CPU selects C++ (", "on the CPU selects torch.topk, slower than C++: "))
    assert [line.split()[0] for line in methods.splitlines()] == sorted([*sparsify.names(), "mine"])
    assert "\ntopk          Top-k SGD: each worker sends its k largest, keeps the rest\n" in methods
    assert f"\nmine          {path}, line 1: " in methods


def test_one_method_is_explained_and_none_is_refused(run: Run) -> None:
    told = read(run("-m", "sparsify", "dgc"))
    assert "Lin et al." in told
    assert "\nmomentum=0.9  [" in told
    assert read(run("-m", "sparsify", "--version")) == f"{DISTRIBUTION} {sparsify.__version__}\n"
    wrong = run("-m", "sparsify", "topj")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no method 'topj' (did you mean 'topk'?)" in wrong.stderr


def test_importing_takes_nothing_but_the_standard_library_and_without_torch_it_tells_what_it_can(
    run: Run,
) -> None:
    read(run("-c", WITHOUT_OTHERS))
    told = read(run("-c", WITHOUT_TORCH))
    assert "PyTorch is not installed here" in told
    assert "\ntopk " in told


def test_the_other_project_s_files_beside_ours_are_refused_in_a_sentence(run: Run, site: Path) -> None:
    (site / "sparsify_beside-1.0.dist-info").mkdir()  # neither of both
    read(run("-c", "import sparsify"))
    (site / "sparsify-1.7.0.dist-info").mkdir()
    done = run("-c", "import sparsify")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: two projects have installed their files into {site / 'sparsify'}: {DISTRIBUTION}, "
        f"which this is, and another one, sparsify; `pip uninstall sparsify {DISTRIBUTION}`, then install "
        "the one that you want, or each into an environment of its own"
    )


def test_where_theirs_has_replaced_ours_the_command_says_so(run: Run, site: Path) -> None:
    init = site / "sparsify" / "__init__.py"
    init.write_text("__version__ = '1.7.0'\n")
    theirs = run("-m", "sparsify")
    init.unlink()
    for done in (theirs, run("-m", "sparsify")):
        assert (done.returncode, done.stdout) == (2, "")
        assert f"`import sparsify` does not find {DISTRIBUTION}" in done.stderr
        assert f"pip uninstall sparsify {DISTRIBUTION}" in done.stderr


@pytest.mark.parametrize("words", ["", "topk"])
def test_a_reader_that_ends_early_sees_no_traceback(words: str) -> None:
    """`| true` reads nothing; bash tells how both ended."""
    command = f'"{sys.executable}" -m sparsify {words} | true; echo ${{PIPESTATUS[0]}}'
    done = process("bash", "-c", command)
    assert done.stdout.strip() in ("0", "141")  # 0 where the pipe was still open when all was written
    assert done.stderr == ""
