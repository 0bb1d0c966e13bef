"""`new` makes files that work as they are, and refuses names that could not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import get_args

import pytest

from experiments import figures
from experiments.commands import new
from tests import conftest
from tests.conftest import ROOT, Command, environment_for, fine, refused

COPIED = ("analysis", "conf", "experiments", "slurm", "sparsify", "pyproject.toml")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide empty folders for what `new` writes."""
    for kind in new.FOLDERS:
        monkeypatch.setitem(new.FOLDERS, kind, tmp_path / kind)
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figure")
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "digits.py").touch()
    return tmp_path


@pytest.mark.extended
def test_what_is_made_runs_and_is_clean(tmp_path: Path) -> None:
    """In a copy of the checkout: a method, a task, a data set, a cluster and a figure of one's own."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)

    def call(*words: str) -> str:
        around = environment_for(tmp_path / "results", PYTHONPATH=str(tmp_path))
        return fine(conftest.python("-m", *words, cwd=tmp_path, env=around)).stdout

    made = {"method": "mine", "dataset": "patterns", "task": "cnn_patterns", "figure": "thesis_density",
            "cluster": "tried"}  # fmt: skip
    files = [call("experiments", "new", kind, name).split()[0] for kind, name in made.items()]
    python = [file for file in files if file.endswith(".py")]
    assert len(python) == 4
    call("ruff", "check", *python)
    call("ruff", "format", "--check", *python)
    own = ("method=mine", "method.density=0.1", "task=cnn_patterns", "profile=smoke", "cluster=virtual")
    assert "mine-cnn_patterns" in call("experiments", "run", *own)
    assert "density-paper on tried: 12 runs" in call("experiments", "plan", "density", "cluster=tried")
    told = call("experiments", "reproduce", "density", "profile=smoke")
    assert "Top-k ends above Random-k" in told
    assert (tmp_path / "results" / "figures" / "density-smoke.png").is_file()


KINDS = get_args(new.NewFile)


def test_a_file_that_is_there_is_never_overwritten(elsewhere: Path, here: Command) -> None:
    for kind in KINDS:
        name = f"x{new.EXAMPLES[kind]}"
        fine(here("new", kind, name))
        (path,) = (path for path in (elsewhere / kind).iterdir() if path.stem == name)
        path.write_text("mine")
        refused(here("new", kind, name), str(path), "is there already")
        with pytest.raises(ValueError, match="is there already"):
            new.write_new_file(kind, name, "other")
        assert path.read_text() == "mine"


REFUSED = {
    "method Mine": "small letters", "method a-b": "small letters", "method ../a": "small letters",
    "method _a": "a letter first", "method ": "small letters", f"method {'a' * 41}": "up to 40",
    "method class": "a word of Python", "method topk": "is there already",
    "method randomk_feedback": "conf/method", "cluster local": "conf/cluster",
    "figure density": "<paper>_<item>, as thesis_density", "figure thesis_": "<paper>_<item>",
    "figure thesis_select": "figures select", "task mlp": "<network>_<data set>",
    "task mlp_digit": "data sets are", "dataset digits": "is there already", "métier a": "no kind",
}  # fmt: skip


def test_a_name_that_cannot_be_is_refused_with_what_can(here: Command) -> None:
    before = {path for folder in new.FOLDERS.values() for path in folder.glob("*")}
    for words, why in REFUSED.items():
        refused(here("new", *words.split(" ")), "" if words.startswith("mé") else why)
    assert {path for folder in new.FOLDERS.values() for path in folder.glob("*")} == before


def test_nothing_of_the_example_s_name_is_left() -> None:
    for kind in KINDS:
        made = new.render_new_file(kind, f"x{new.EXAMPLES[kind]}" + "_digits" * (kind == "task"))
        assert not re.search("(?<!for )example(?!s)", made.lower()), kind
    assert 'DATASET = "digits32"  #' in new.render_new_file("task", "mlp_digits32")
