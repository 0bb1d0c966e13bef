"""The tasks of conf/task, and Python files that stand in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.tasks import FILES, TaskFiles, chance_top1_percent
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
    assert "torch" not in loaded_by(
        "from experiments.tasks import chance_top1_percent; chance_top1_percent('cnn_cifar10')"
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "image_classifier",
            "image_clasifier",
            "no family 'image_clasifier' .did you mean 'image_classifier'",
        ),
        ("network: vgg16\n", "", "family=image_classifier needs network"),
        ("lr: 0.1\n", "", "missing a required argument: 'lr'"),
        ("lr: 0.1\n", "rate: 0.1\n", "unexpected keyword argument 'rate'|required argument: 'lr'"),
        ("lr: 0.1\n", "lr: [\n", "can't be read: "),
    ],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "mine_cifar10.yaml"
    path.write_text((FILES.folder / "vgg16_cifar10.yaml").read_text().replace(old, new))
    tasks = Registry("task", "nowhere", tmp_path, table=TaskFiles(tmp_path))
    with pytest.raises(ValueError, match=reason) as refusal:
        tasks.parameters("mine_cifar10")
    assert str(path) in str(refusal.value)


def test_an_unknown_network_is_refused_with_the_list(tmp_path: Path) -> None:
    text = (FILES.folder / "vgg16_cifar10.yaml").read_text()
    (tmp_path / "mine_cifar10.yaml").write_text(text.replace("network: vgg16", "network: vg16"))
    tasks = Registry("task", "nowhere", tmp_path, table=TaskFiles(tmp_path))
    with pytest.raises(ValueError, match=r"no network 'vg16' .did you mean 'vgg16'.*; there are: vgg16, "):
        tasks.build("mine_cifar10", tasks.defaults("mine_cifar10"))
