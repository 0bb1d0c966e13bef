"""A folder that is a list goes on working when one of its files is broken, and the file is named."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import figures
from experiments.config import compose, dataset_files
from experiments.training.networks import small_cnn
from experiments.training.task import Task
from sparsify.methods import REGISTRY as METHODS
from tests.conftest import ROOT, Command, fine, refused

RUN = ("profile=smoke", "task=cnn_digits", "cluster=generic_slurm")


@pytest.fixture
def methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a folder of three methods, one of which is broken."""
    for name in ("topk", "dense"):
        shutil.copy(METHODS.folder / f"{name}.py", tmp_path)
    (tmp_path / "comb.py").write_text("def comb(density: float = 0.1\n")
    monkeypatch.setitem(vars(METHODS), "folder", tmp_path)
    cached = (compose._compose_choices, compose._compose_with_hydra)
    for function in cached:
        function.cache_clear()
    yield tmp_path
    for function in cached:
        function.cache_clear()


def test_a_broken_method_is_named_and_the_others_plan(here: Command, methods: Path) -> None:
    fine(here("plan", "method=topk", *RUN))
    refused(here("plan", "method=comb", *RUN), f"{methods}/comb.py, line 1: ")
    listed = " ".join(fine(here("run", "--help")).stdout.split())
    assert f"comb can't be read: {methods}/comb.py, line 1: " in listed
    assert "topk Top-k SGD" in listed


def test_broken_figures_are_named_and_the_others_are_drawn(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "experiments" / "figures" / "yoon2022_fig1.py", tmp_path)
    broken = {
        "import nothing +\n": "line 1: invalid syntax",
        "1 / 0\n": "line 1: ZeroDivisionError",
        "": "no TITLE",
    }
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    for number, source in enumerate(broken):
        (tmp_path / f"mine_broken{number}.py").write_text(source)
    done = fine(here("figures"))
    assert "fig1-laptop.png" in done.stdout
    for number, why in enumerate(broken.values()):
        path = f"{tmp_path}/mine_broken{number}.py"
        assert path in done.stderr
        refused(here("reproduce", f"broken{number}", "profile=smoke"), path, why)
    (tmp_path / "other_broken0.py").write_text("")
    refused(here("figures", "broken0"), f"{tmp_path}/mine_broken0.py and {tmp_path}/other_broken0.py")


def test_a_broken_data_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_files, "DATASETS", tmp_path)
    path = tmp_path / "broken.py"
    for source, why in {
        "FILES = {'title': 1 +}\n": "line 1: invalid syntax",
        "FILES = {'title': 'A', 'place': 'b'}\n": "FILES must be a dict with title, folder",
        "\nFILES = dict(title=name)\n": "line 2: NameError: name 'name' is not defined",
    }.items():
        path.write_text(source)
        dataset_files.required_files.cache_clear()
        with pytest.raises(ValueError, match=why) as refusal:
            dataset_files.required_files("broken")
        assert str(path) in str(refusal.value)


def test_an_unknown_data_set_is_refused_with_the_list() -> None:
    known = "no data set 'svhn'; there are: cifar10, digits, digits32"
    with pytest.raises(ValueError, match=known):
        Task("svhn", small_cnn, 16, 0.1, 0.9, 0.0, 1, (), False)
    with pytest.raises(ValueError, match=rf"{known}(, \w+)*; task 'mlp_svhn' is named"):
        dataset_files.dataset_of_task("mlp_svhn")
