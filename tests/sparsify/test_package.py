"""The package as others get it."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparsify
from sparsify.core.checks import explain_missing_torch
from sparsify.methods import REGISTRY as METHODS
from tests.analysis.tracked_files import tracked_modules
from tests.conftest import ROOT, fine, python

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from sparsify.local.strategy import LocalSteps
    from sparsify.method import Sparsifier

    assert_type(sparsify.topk(density=0.01, index="delta16"), Sparsifier)
    assert_type(sparsify.diloco(every=5), LocalSteps)
    sparsify.topk(density="x")  # type: ignore[arg-type]  # mypy tells where this is no error any more
    sparsify.topk(densty=0.01)  # type: ignore[call-arg]  # the same

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import sparsify
print(sparsify.names()[0], sparsify.defaults("topk")["density"])
for ask in (
    lambda: sparsify.build("topk"), lambda: sparsify.distribute, lambda: sparsify.register,
    lambda: sparsify.redistribute, lambda: sparsify.topk,
):
    try:
        ask()
    except ImportError as error:
        print(error)
"""

BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_it_lists_what_it_has() -> None:
    assert set(dir(sparsify)) >= {*sparsify.__all__, "__version__"}
    for name in sparsify.__all__:
        assert callable(getattr(sparsify, name))
    with pytest.raises(AttributeError, match="'sparsify' has no attribute 'compress'"):
        sparsify.compress  # type: ignore[attr-defined]  # noqa: B018


def test_every_method_is_a_typed_function() -> None:
    """At runtime without being listed; for editors the list must be whole."""
    source = Path(sparsify.__file__).read_text()
    typed = [
        line.split()[-1] for line in source.splitlines() if line.startswith("    from sparsify.methods.")
    ]
    assert typed == sorted(tracked_modules(METHODS.folder))
    for name in sparsify.names():
        assert getattr(sparsify, name)() == sparsify.build(name)
        assert getattr(sparsify, name).__doc__


def test_typed_functions_check_what_they_are_given() -> None:
    assert sparsify.topk(0.01, "layer") == sparsify.build("topk", density=0.01, scope="layer")
    with pytest.raises(ValueError, match="has no 'densty'"):
        sparsify.topk(densty=0.1)  # type: ignore[call-arg]  # a typing error is what is tried
    with pytest.raises(TypeError, match="control takes"):
        sparsify.control(*range(20))


def test_without_torch_it_lists_methods_and_says_what_needs_torch() -> None:
    done = python("-c", WITHOUT_TORCH)
    first, *told = done.stdout.splitlines()
    assert first == "adacomp 0.001"
    assert told == [
        f"sparsify.{name} needs PyTorch, which is not installed here: pip install torch"
        for name in ("build", "distribute", "register", "redistribute", "topk")
    ]


def test_what_else_is_missing_is_not_taken_for_torch() -> None:
    with pytest.raises(ModuleNotFoundError, match="named 'triton'"), explain_missing_torch("sparsify.build"):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")


def test_both_archives_hold_the_library_whole_and_nothing_else(tmp_path: Path) -> None:
    """The wheel is built from the source archive, as `python -m build` does it."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "sparsify", source / "sparsify", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", source / "requirements")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    release = f"gradient_sparsification-{sparsify.__version__}"
    fine(python("-c", BUILD, str(tmp_path), cwd=source))
    pip = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path))
    fine(python(*pip, str(tmp_path / f"{release}.tar.gz")))
    with zipfile.ZipFile(tmp_path / f"{release}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {"sparsify", f"{release}.dist-info"}
    ours = {str(path.relative_to(source)) for path in source.glob("sparsify/**/*") if path.is_file()}
    assert {name for name in names if name.startswith("sparsify/")} == ours
