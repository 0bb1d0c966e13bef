"""Entries, one a file: what a signature says, and what becomes of a file that can't be read."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from experiments.tasks import REGISTRY as TASKS
from sparsify import ranges
from sparsify.core.spec import BrokenFile, Registry
from sparsify.methods import REGISTRY as METHODS

SOUND = """
import math
from collections.abc import Sequence
import a_module_that_is_not_there
from sparsify.ranges import PositiveFraction

DECAY = 1 / 8


def sound(
    rate: PositiveFraction = 1 / 1000,
    decay: float = 2 * DECAY,
    turn=math.pi,
    warm: Sequence[PositiveFraction] = (),
    *,
    need: int,
):
    "What it does."
"""


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "sound.py").write_text(SOUND)
    return Registry("method", "nowhere", tmp_path)


def test_defaults_may_be_expressions_and_annotations_are_ranges(registry: Registry) -> None:
    assert registry.defaults("sound") == {
        "rate": 0.001, "decay": 0.25, "turn": 3.141592653589793, "warm": (), "need": "???",
    }  # fmt: skip
    allowed = {key: parameter.allowed for key, parameter in registry.parameters("sound").items()}
    assert allowed["rate"] == ranges.PositiveFraction
    assert allowed["warm"] == Sequence[ranges.PositiveFraction]
    registry.check_hyperparameters("sound", {"rate": 1, "turn": "anything", "need": 3})
    with pytest.raises(ValueError, match=r"method\.rate=2 is out of range: it must be a number in \(0, 1\]"):
        registry.check_hyperparameters("sound", {"rate": 2}, prefix="method.")
    with pytest.raises(ValueError, match="'sound' needs need, which has no default"):
        registry.check_hyperparameters("sound", registry.defaults("sound"))
    (registry.folder / "sound.py").write_text(
        "def sound(a: int = 5):\n    pass\n"
    )  # what is mended is read again
    assert registry.defaults("sound") == {"a": 5}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def broken(a: int = 1:\n    pass\n", "broken.py, line 1: "),
        ("\n\ndef another():\n    pass\n", "broken.py has no function broken"),
        ("\ndef broken(a: int = 1 / 0):\n    pass\n", "broken.py, line 2: ZeroDivisionError"),
        ("def broken(a: Nothing = 1):\n    pass\n", "NameError: name 'Nothing'"),
        ("def broken(\n    a: int = here(),\n):\n    pass\n", "broken.py, line 2: NameError: name 'here'"),
        ("A = A\ndef broken(a: int = A):\n    pass\n", "broken.py, line 1: NameError: name 'A'"),
        ("def broken():\n    '\0'\n", "broken.py"),
    ],
)
def test_a_broken_file_is_named_and_leaves_the_others_alone(
    registry: Registry, source: str, why: str
) -> None:
    (registry.folder / "broken.py").write_text(source)
    assert registry.names() == ["broken", "sound"]
    assert registry.loadable_names() == ["sound"]
    with pytest.raises(BrokenFile) as refusal:
        registry.defaults("broken")
    assert str(registry.folder) in str(refusal.value)
    assert why in str(refusal.value)
    assert registry.reason_unreadable("broken") == str(refusal.value)
    assert registry.summary("sound") == "What it does."


def test_every_hyperparameter_has_a_type_which_its_default_has() -> None:
    for registry in (METHODS, TASKS):
        for name in registry.names():
            for key, parameter in registry.parameters(name).items():
                assert parameter.allowed not in (float, int, str), f"{name}: {key} has no range"
                ranges.check_value(key, parameter.default, parameter.allowed)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the package `a_package`."""
    package = types.ModuleType("a_package")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "a_package", package)
    yield tmp_path
    sys.modules.pop("a_package.entry", None)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def entry(:\n", ", line 1: "),
        ("\nnothing + 1\n", ", line 2: NameError: name 'nothing' is not defined"),
        ("from sparsify.ranges import Nothing\n", ", line 1: ImportError: cannot import name 'Nothing'"),
        ("import sparsify.nothing\n", ", line 1: ModuleNotFoundError: No module named 'sparsify.nothing'"),
        ("def other():\n    pass\n", " has no function entry"),
    ],
)
def test_an_entry_that_cannot_be_imported_is_named(package: Path, source: str, why: str) -> None:
    (package / "entry.py").write_text(source)
    with pytest.raises(BrokenFile, match=re.escape(f"entry.py{why}")):
        Registry("entry", "a_package", package).import_function("entry")


def test_a_package_that_is_not_installed_is_no_broken_file(package: Path) -> None:
    (package / "entry.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError):
        Registry("entry", "a_package", package).import_function("entry")
