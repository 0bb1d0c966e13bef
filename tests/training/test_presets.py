"""The tasks of conf/task, and Python files that stand in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.tasks import FILES, chance_top1_percent
from experiments.training.datasets import load
from sparsify.core.spec import Registry
from tests.conftest import loaded_by


def test_a_python_file_stands_in_for_the_task_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "lenet5_mnist.py").write_text('def lenet5_mnist(lr: float = 2.0):\n    "Mine."\n')
    tasks = Registry("task", "nowhere", tmp_path, table=FILES)
    assert tasks.names() == sorted(FILES)
    assert tasks.defaults("lenet5_mnist") == {"lr": 2.0}
    assert tasks.summary("lenet5_mnist") == "Mine."
    with pytest.raises(ValueError, match="'fnn3_mnist' has no 'width'"):
        tasks.build("fnn3_mnist", {"width": 3})


def test_chance_is_the_share_of_the_most_frequent_class() -> None:
    labels = load("digits", None, torch.device("cpu")).test.labels
    share = 100 * float(labels.bincount().max()) / len(labels)
    assert (
        chance_top1_percent("cnn_digits")
        == chance_top1_percent("own_digits")
        == pytest.approx(share, abs=0.01)
    )
    assert chance_top1_percent("cnn_cifar10") == 10
    assert [chance_top1_percent(name) for name in ("maetiny_cifar10", "vector", "own_seashells")] == [
        None
    ] * 3


def test_chance_is_known_without_torch() -> None:
    assert "torch" not in loaded_by("from experiments.tasks import chance_top1_percent; chance_top1_percent('cnn_cifar10')")
