"""The site of the documentation: its reference has every public name, with examples that run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import sparsify
from sparsify.methods import REGISTRY as METHODS
from tests.analysis.tracked_files import tracked_modules
from tests.conftest import ROOT, fine, python

SITE = ROOT / "docs" / "site"


def load_stage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stage", SITE / "stage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = (SITE / "api.md").read_text() + load_stage().methods_reference()
NAMES = re.findall(r"(?m)^::: (\S+)$", PAGE)
EXAMPLES = re.findall(r"(?s)```python\n(.*?)```", PAGE)


def documented(name: str) -> object:
    """Return the object that the page documents under a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_is_in_the_reference_with_a_docstring_and_an_example() -> None:
    public = {f"sparsify.{name}" for name in (*sparsify.__all__, *tracked_modules(METHODS.folder))}
    assert public - {*NAMES} == set()
    assert len({*NAMES}) == len(NAMES)
    for name in NAMES:
        assert (documented(name).__doc__ or "").strip(), name
        assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", example) for example in EXAMPLES), name


def test_what_pages_import_from_the_library_is_in_the_reference() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for module, names in re.findall(r"from (sparsify\.[\w.]+) import ([\w, ]+)", pages):
        for name in names.replace(" ", "").split(","):
            is_class = isinstance(documented(f"{module}.{name}"), type)
            assert not is_class or f"{module}.{name}" in NAMES, (module, name)
    modules = {name.rpartition(".")[0] for name in NAMES}
    for module in pkgutil.walk_packages(sparsify.__path__, "sparsify."):
        assert f"`{module.name}`" not in pages or module.name in modules, module.name


def run_examples() -> int:
    """Run the examples of the page, which continue each other, and return how many fail."""
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(verbose=False)
    for number, example in enumerate(EXAMPLES):
        test = doctest.DocTestParser().get_doctest(example, names, f"example {number}", None, 0)
        test.globs = names  # not a copy
        runner.run(test, clear_globs=False)
    dist.destroy_process_group()
    return runner.failures


def test_the_examples_of_the_reference_run_one_after_the_other() -> None:
    done = python("-m", "tests.test_site")  # a process of its own, for a process group
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.extended
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="what `make docs` installs is missing"
)
def test_the_site_is_built_without_a_warning_and_its_search_finds_the_names(tmp_path: Path) -> None:
    fine(python(str(SITE / "stage.py")))
    words = ("-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(tmp_path))
    said = fine(python(*words, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}))
    assert "WARNING" not in said.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    locations = {entry["location"].partition("#")[2] for entry in index["docs"]}
    assert {*NAMES} <= locations
    assert re.search(index["config"]["separator"], ".")  # a name is found by its last word


if __name__ == "__main__":
    sys.exit(run_examples())
