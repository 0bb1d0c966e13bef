"""Files beside the code that say what it is: they agree with it."""

from __future__ import annotations

import re

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import sparsify
from experiments import versions
from sparsify.core.checks import DISTRIBUTION
from sparsify.wrappers.sharded import units
from tests.conftest import ROOT


def lines_of(name: str) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def test_versions_and_names_agree() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == sparsify.__version__
    newest, *_ = re.findall(r"(?m)^## (\S+),", (ROOT / "CHANGELOG.md").read_text())
    assert newest == sparsify.__version__
    assert f'\nname = "{DISTRIBUTION}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_changes_are_read_in_a_minute() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = text[text.index("\n## ") :].split("\n## ")[1]
    assert len(newest.splitlines()) <= 40
    assert len(text.splitlines()) <= 60


def test_every_requirement_has_one_range_and_is_pinned_within_it() -> None:
    pins = {canonicalize_name(pin.name): pin for pin in lines_of("constraints.txt")}
    ranges: dict[str, set[str]] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for wanted in lines_of(f"requirements/{path.name}"):
            (exact,) = pins[canonicalize_name(wanted.name)].specifier
            assert exact.operator == "=="
            assert exact.version in wanted.specifier, wanted
            ranges.setdefault(wanted.name, set()).add(str(wanted.specifier))
    assert all(len(found) == 1 for found in ranges.values()), ranges


def test_versions_that_are_refused_are_those_that_pip_would_not_install() -> None:
    python = re.findall('requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text())
    wanted = {
        each.name: each for name in ("library", "figures") for each in lines_of(f"requirements/{name}.txt")
    }
    specifiers = {name: wanted[name].specifier for name in versions.PACKAGES}
    specifiers["python"] = SpecifierSet(python[0])
    for name, (oldest, newest) in {**versions.PACKAGES, "python": versions.PYTHON}.items():
        major, minor = oldest
        accepted = [f"{major}.{other}" for other in range(50) if f"{major}.{other}.9" in specifiers[name]]
        assert accepted == [f"{major}.{other}" for other in range(minor, newest[1] + 1)]
    assert versions.PACKAGES["torch"] == (units.OLDEST_TORCH, units.NEWEST_TORCH)
