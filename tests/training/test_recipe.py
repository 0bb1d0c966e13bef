"""The recipe of Yoon and Oh 2022, number by number, as their code and logs have it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from experiments.config import compose
from experiments.tasks import REGISTRY as TASKS
from experiments.training.datasets import Dataset, Split
from experiments.training.task import Task
from sparsify.core.gradients import FlatGradients
from sparsify.methods import REGISTRY as METHODS
from sparsify.types import num_selected

CPU = torch.device("cpu")


def images(num_train: int = 50_000, num_test: int = 10) -> Dataset:
    """As many images as CIFAR-10 has, all black: enough for everything that counts."""

    def split(n: int) -> Split:
        return Split(torch.zeros(n, 32, 32, 3, dtype=torch.uint8), torch.arange(n) % 10)

    mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    return Dataset("black", "0" * 64, split(num_train), split(num_test), 10, 4, True, mean, std)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose.resolve(["recipe=yoon2022", "profile=paper", "method=topk"]).as_dict()


@pytest.fixture(scope="module")
def task(config: dict[str, Any]) -> Task:
    values = {key: value for key, value in config["task"].items() if key != "name"}
    built: Task = TASKS.build(config["task"]["name"], values)
    return built


@pytest.fixture(scope="module")
def vgg(task: Task) -> nn.Sequential:
    model = task.make_model(images(10), 0, CPU, torch.float32)
    assert isinstance(model, nn.Sequential)
    return model


def test_layers_are_those_of_the_published_model(vgg: nn.Sequential) -> None:
    """Their sizes are told by test_networks.py."""
    kinds = Counter(type(layer).__name__ for layer in vgg)
    assert kinds["Conv2d"] == kinds["BatchNorm2d"] == kinds["ReLU"] == 13
    assert (kinds["MaxPool2d"], kinds["Linear"]) == (5, 1)
    assert all(layer.bias is not None for layer in vgg if isinstance(layer, nn.Conv2d))


def test_density_schedule_selects_the_logged_numbers(config: dict[str, Any], vgg: nn.Sequential) -> None:
    """k = 230,129 in the first epoch, 58,913 in the second, 14,728 after: log of job 130672."""
    values = {key: value for key, value in config["method"].items() if key != "name"}
    method = METHODS.build("topk", values)
    n = FlatGradients(vgg.named_parameters(), "global").flat.numel()
    selected = [num_selected(n, method.density_at(epoch)) for epoch in (0, 1, 2, 137)]
    assert selected == [230_129, 58_913, 14_728, 14_728]


def test_layerwise_selection_takes_at_least_one_of_every_tensor_the_output_layer_first(
    vgg: nn.Sequential,
) -> None:
    gradients = FlatGradients(vgg.named_parameters(), "layer")
    assert sum(num_selected(bucket.flat.numel(), 0.001) for bucket in gradients.buckets) == 14_748
    assert [name.partition(".")[0] for name, _ in gradients.named_parameters][:2] == [str(len(vgg) - 1)] * 2


def test_workers_batch_and_epochs(config: dict[str, Any]) -> None:
    assert (config["workers"], config["task"]["batch_size"], config["train"]["epochs"]) == (8, 128, 138)
    assert (config["device"], config["precision"], config["data"]["fallback"]) == ("cuda", "tf32", "refuse")


def test_the_schedule_counts_49_steps_an_epoch_while_the_data_give_48(task: Task) -> None:
    data = images()
    assert task.steps_per_epoch(data, 8) == 49
    batches = task.batches(data, 0, 8, 0, torch.Generator(), torch.float32)
    orders = []
    for _ in range(2):
        labels = [next(batches)[1] for _ in range(48)]
        assert all(len(batch) == 128 for batch in labels)
        orders.append(torch.cat(labels))
    assert not torch.equal(*orders)  # the second pass is shuffled anew


def test_learning_rate_after_an_epoch_is_the_logged_one(task: Task) -> None:
    """They validate in the step after it, whose rate is already set."""
    rates = {1: 0.020327, 2: 0.040245, 4: 0.080082, 5: 0.1, 81: 0.1, 82: 0.01, 122: 0.01, 123: 0.001}
    for epoch, rate in rates.items():
        assert task.learning_rate(49 * epoch, 49) == pytest.approx(rate, abs=5e-7)


def test_weight_decay_spares_biases_and_batch_norm(task: Task, vgg: nn.Sequential) -> None:
    optimiser = task.make_optimizer(vgg)
    decayed, spared = optimiser.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (1e-4, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    for group in optimiser.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"], group["dampening"]) == (0.1, 0.9, False, 0)


def test_workers_share_out_the_images_without_overlap() -> None:
    numbered = replace(images(1000), train=Split(images(1000).train.images, torch.arange(1000)))
    task = TASKS.build("cnn_cifar10", {"batch_size": 125})
    seen = list[int]()
    for rank in range(4):
        batches = task.batches(numbered, rank, 4, 0, torch.Generator(), torch.float32)
        for _, labels in itertools.islice(batches, 2):
            seen += labels.tolist()
    assert sorted(seen) == [*range(1000)]


def test_evaluation_is_the_exact_mean_over_images() -> None:
    data = images(10, 1100)

    class Always(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tensor([3.0, 0, 0, 2.0, 1.5, 1.2, 1.1, 0, 0, 0]).expand(len(inputs), 10)

    metrics = TASKS.build("cnn_cifar10", {}).evaluate(Always(), data, torch.float32)
    assert (metrics.top1_percent, metrics.top5_percent) == (10, 50)


def test_more_workers_than_batches_are_refused() -> None:
    task = TASKS.build("cnn_cifar10", {})
    with pytest.raises(ValueError, match=r"workers=100.*1000 training images.*fewer workers"):
        task.steps_per_epoch(images(1000), 100)
