"""A folder that is a list goes on working when one of its files is broken, and the file is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments import figures
from experiments.config import compose, data_root
from experiments.training.networks import small_cnn
from experiments.training.task import Task
from sparsify.methods import REGISTRY as METHODS
from tests.conftest import ROOT, Command, fine, refused

RUN = ("profile=smoke", "task=cnn_digits", "cluster=generic_slurm")


def test_a_broken_method_is_named_and_the_others_plan(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("topk", "dense"):
        shutil.copy(METHODS.folder / f"{name}.py", tmp_path)
    (tmp_path / "comb.py").write_text("def comb(density: float = 0.1\n")
    monkeypatch.setitem(vars(METHODS), "folder", tmp_path)
    compose._composed.cache_clear()
    compose._hydras.cache_clear()
    try:
        assert here("plan", "method=topk", *RUN).returncode == 0
        refused(here("plan", "method=comb", *RUN), f"{tmp_path}/comb.py, line 1: ")
        helped = here("run", "--help")
    finally:
        compose._composed.cache_clear()
        compose._hydras.cache_clear()
    assert helped.returncode == 0, helped.stderr
    listed = " ".join(helped.stdout.split())
    assert f"comb can't be read: {tmp_path}/comb.py, line 1: " in listed
    assert "topk Top-k SGD" in listed


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import nothing +\n", "line 1: invalid syntax"),
        ("1 / 0\n", "line 1: ZeroDivisionError"),
        ("", "no TITLE"),
    ],
)
def test_a_broken_figure_is_named_and_the_others_are_drawn(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    shutil.copy(ROOT / "experiments" / "figures" / "yoon2022_fig1.py", tmp_path)
    (tmp_path / "mine_broken.py").write_text(source)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    done = fine(here("figures"))
    assert f"{tmp_path}/mine_broken.py" in done.stderr
    assert why in done.stderr
    assert "fig1-laptop.png" in done.stdout
    refused(here("reproduce", "broken", "profile=smoke"), f"{tmp_path}/mine_broken.py", why)
    (tmp_path / "other_broken.py").write_text("")
    refused(here("figures", "broken"), f"{tmp_path}/mine_broken.py and {tmp_path}/other_broken.py")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("FILES = {'title': 1 +}\n", "line 1: invalid syntax"),
        ("FILES = {'title': 'A', 'place': 'b'}\n", "broken.py: FILES must be a dict with title, folder"),
        ("\nFILES = dict(title=name)\n", "line 2: NameError: name 'name' is not defined"),
    ],
)
def test_a_broken_data_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.setattr(data_root, "DATASETS", tmp_path)
    data_root.files_of.cache_clear()
    with pytest.raises(ValueError, match=why) as refusal:
        data_root.files_of("broken")
    assert f"{tmp_path}/broken.py" in str(refusal.value)


def test_an_unknown_data_set_is_refused_with_the_list() -> None:
    known = "there are: cifar10, digits, digits32"
    with pytest.raises(ValueError, match=f"no data set 'svhn'; {known}"):
        Task("svhn", small_cnn, 16, 0.1, 0.9, 0.0, 1, (), False)
    with pytest.raises(ValueError, match=f"no data set 'svhn'; {known}(, \\w+)*; task 'mlp_svhn' is named"):
        data_root.dataset_of("mlp_svhn")
