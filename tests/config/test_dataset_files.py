"""Data sets are found, downloaded or replaced, and what was done is said; without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.config import compose, dataset_files
from experiments.config.config import Config, MethodOrTaskConfig
from experiments.config.dataset_files import DatasetFiles
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets

FOLDER = "cifar-10-batches-py"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_files, "is_reachable", lambda host: False)


def config(*words: str) -> Config:
    return compose.resolve(["task=cnn_cifar10", *words])


def test_files_that_are_there_are_found_and_a_data_set_without_files_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    given = config(f"data.root={tmp_path}")
    assert dataset_files.ensure_dataset(given, pytest.fail) == (given, tmp_path)
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    digits = compose.resolve(["task=cnn_digits"])
    for found, root in ((config(), tmp_path), (digits, None)):
        assert dataset_files.ensure_dataset(found, pytest.fail) == (found, root)


def test_the_digits_stand_in_where_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    said = list[str]()
    found = dataset_files.ensure_dataset(config("task.lr=0.3"), said.append)
    assert found == (compose.resolve(["task=cnn_digits", "task.lr=0.3"]), None)
    assert said == [
        "CIFAR-10 was not found (see DATA_ROOT): using scikit-learn's digits instead, task cnn_digits"
    ]
    resnet = replace(
        config(), task=MethodOrTaskConfig("resnet_cifar10", config().task.arguments)
    )  # none is on digits
    for given in (config("data.fallback=refuse"), resnet):
        with pytest.raises(ValueError, match=r"CIFAR-10 is not in .* and could not be downloaded"):
            dataset_files.ensure_dataset(given, print)


def test_a_folder_that_was_named_must_hold_the_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"data.root={tmp_path} has no {FOLDER}; point it at the folder"):
        dataset_files.ensure_dataset(config(f"data.root={tmp_path}"), print)


DOWNLOADABLE = """
FILES = {"title": "Nothing", "folder": "nothing", "host": "localhost", "size": "0 MiB"}


def download(root):
    (root / "nothing").mkdir()
    (root / "nothing" / "file").write_text("nothing")
"""


def test_a_data_set_downloads_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file alone says how; what is half done is not left behind."""
    package = tmp_path / "experiments" / "training" / "datasets"
    package.mkdir(parents=True)
    (package / "nothing.py").write_text(DOWNLOADABLE)
    (package / "nowhere.py").write_text(DOWNLOADABLE.replace('"nothing").mkdir', '"nothing"/"x").mkdir'))
    monkeypatch.setattr(dataset_files, "ROOT", tmp_path)
    monkeypatch.setattr(dataset_files, "DATASETS", package)
    monkeypatch.setattr(dataset_files, "is_reachable", lambda host: True)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # its process finds the package here
    dataset_files.required_files.cache_clear()
    files, said, root = dataset_files.required_files("nothing"), list[str](), tmp_path / "data"
    assert files == DatasetFiles("Nothing", "nothing", "localhost", "0 MiB")
    assert not dataset_files.try_download("nowhere", files, root, said.append)
    assert list(root.iterdir()) == []
    assert dataset_files.try_download("nothing", files, root, said.append)
    assert [path.name for path in root.rglob("*")] == ["nothing", "file"]
    assert said == [f"downloading Nothing (0 MiB) to {root}"] * 2
    assert not dataset_files.try_download("nothing", DatasetFiles("Nothing", "nothing"), root, said.append)


def test_every_task_whose_data_set_has_files_is_named_after_it() -> None:
    """So the data set is found without importing the task."""
    for name in TASKS.names():
        dataset = TASKS.build(name, {}).dataset
        assert dataset in datasets.REGISTRY.names()
        assert dataset_files.required_files(
            dataset_files.dataset_of_task(name)
        ) == dataset_files.required_files(dataset), name


def test_a_task_is_named_after_a_data_set_that_there_is() -> None:
    with pytest.raises(ValueError, match=r"no data set 'svhn'.*task 'cnn_svhn' is named"):
        dataset_files.dataset_of_task("cnn_svhn")
