"""The package as others get it."""

from __future__ import annotations

import subprocess
import sys
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
