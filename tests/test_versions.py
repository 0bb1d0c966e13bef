"""Versions that are not tested are refused in a sentence before anything is computed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from experiments import versions
from tests.conftest import ROOT, Command, python, refused

NONE = ((98, 1), (99, 2))  # a range that holds no version


@pytest.mark.parametrize("version", [(3, 9), (3, 15)])
def test_a_python_that_is_too_old_or_too_new_is_refused(version: tuple[int, int]) -> None:
    done = python("-c", f"import sys; sys.version_info = {(*version, 0)}; import experiments.worker.__main__")
    refused(done, "this needs Python 3.10 to 3.14, and ", f"is 3.{version[1]}: ", "make PYTHON=python3.14 ")
    assert done.stdout == ""


def test_an_old_python_can_read_what_refuses_it() -> None:
    for name in ("__init__", "versions"):
        ast.parse((ROOT / "experiments" / f"{name}.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("name", versions.PACKAGES)
def test_a_package_that_is_too_old_or_too_new_is_refused(
    here: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(versions.PACKAGES, name, NONE)
    refused(
        here("run", "method=topk", "task=cnn_digits", "profile=smoke"),
        f"experiments: this is tested with {name} 98.1 to 99.2, and ",
        "make .venv/.train",
        "widen the range in experiments/versions.py",
    )
    assert not (tmp_path / "results").exists()


def test_a_package_that_is_missing_is_left_to_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PACKAGES", {"no-such-package": NONE})
    versions.check_packages()
