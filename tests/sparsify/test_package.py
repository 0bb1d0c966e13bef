"""The package as others get it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparsify
from sparsify.checks import needs_torch
from tests.conftest import ROOT

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from sparsify.method import Method

    assert_type(sparsify.build("topk", density=0.01), Method)

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import sparsify
print(sparsify.names()[0], sparsify.defaults("topk")["density"])
for ask in (
    lambda: sparsify.build("topk"), lambda: sparsify.distribute, lambda: sparsify.register,
    lambda: sparsify.redistribute,
):
    try:
        ask()
    except ImportError as error:
        print(error)
"""


def test_it_lists_what_it_has() -> None:
    assert set(dir(sparsify)) >= {*sparsify.__all__, "__version__"}
    for name in sparsify.__all__:
        assert callable(getattr(sparsify, name))
    with pytest.raises(AttributeError, match="'sparsify' has no attribute 'compress'"):
        sparsify.compress  # type: ignore[attr-defined]  # noqa: B018


def test_without_torch_it_lists_methods_and_says_what_needs_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, *told = done.stdout.splitlines()
    assert first == "adacomp 0.001"
    assert told == [
        f"sparsify.{name} needs PyTorch, which is not installed here: pip install torch"
        for name in ("build", "distribute", "register", "redistribute")
    ]


def test_what_else_is_missing_is_not_taken_for_torch() -> None:
    with pytest.raises(ModuleNotFoundError, match="named 'triton'"), needs_torch("sparsify.build"):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="what builds wheels is missing")
def test_a_wheel_holds_all_of_the_package_and_its_version(tmp_path: Path) -> None:
    """C++ and the mark that types are inside, too."""
    tracked = subprocess.run(
        ["git", "ls-files", "sparsify"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    requirements = [str(path.relative_to(ROOT)) for path in (ROOT / "requirements").iterdir()]
    for name in [*tracked, *requirements, "pyproject.toml", "README.md"]:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(tmp_path / "source")], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"gradient_sparsification-{sparsify.__version__}-")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == set(tracked)
    assert held >= {"sparsify/py.typed", "sparsify/kernels/native.cpp"}
    (about,) = metadata.distributions(path=[str(wheel)])
    needed = [line for line in about.requires or () if "extra" not in line]
    assert {re.split(r"\W", line)[0] for line in needed} == {"msgspec", "numpy", "torch"}
    assert about.metadata.get_all("Provides-Extra") == ["figures", "train", "dev"]
    assert [(each.name, each.value) for each in about.entry_points] == [
        ("sparsify", "sparsify.__main__:main")
    ]
