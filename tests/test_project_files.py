"""Files beside the code that say what it is: they agree with it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sparsify
from sparsify.core.checks import DISTRIBUTION
from tests.conftest import ROOT

LISTS = sorted(path.name for path in (ROOT / "requirements").glob("*.txt"))


def lines_of(name: str) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def test_the_citation_is_of_this_version_and_names_the_project_as_author() -> None:
    cited: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == sparsify.__version__
    assert cited["title"].startswith("sparsify: ")
    assert cited["authors"] == [{"name": "The sparsify project"}]
    assert "license" not in cited  # the owner has not chosen one


def test_the_newest_changes_are_of_this_version() -> None:
    first, *_ = re.findall(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first == sparsify.__version__


def test_the_workflow_does_what_ci_does() -> None:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    ran = [step["run"] for step in job["steps"] if "run" in step]
    assert len(ran) == 1
    assert ran[0].endswith(" .ci/run")
    assert (ROOT / ".ci/run").is_file()


def test_the_project_is_called_as_its_import_check_says() -> None:
    assert f'\nname = "{DISTRIBUTION}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", LISTS)
def test_every_requirement_is_pinned_within_its_range(name: str) -> None:
    pins = {canonicalize_name(pin.name): pin for pin in lines_of("constraints.txt")}
    for wanted in lines_of(f"requirements/{name}"):
        (exact,) = pins[canonicalize_name(wanted.name)].specifier
        assert exact.operator == "=="
        assert exact.version in wanted.specifier, wanted


def test_a_package_in_two_lists_has_one_range() -> None:
    ranges: dict[str, set[str]] = {}
    for name in LISTS:
        for wanted in lines_of(f"requirements/{name}"):
            ranges.setdefault(wanted.name, set()).add(str(wanted.specifier))
    assert all(len(found) == 1 for found in ranges.values()), ranges
