"""The recipe of Yoon and Oh 2022, number by number, as their code and logs have it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import config as configs
from experiments import data as datasets
from experiments.data import Dataset, Split
from experiments.task import Task
from experiments.tasks import REGISTRY as TASKS
from sparsify.aggregate import num_selected
from sparsify.bucket import Gradients
from sparsify.methods import REGISTRY as METHODS
from sparsify.parts import Place

CPU = torch.device("cpu")


def images(num_train: int = 50_000, num_test: int = 10) -> Dataset:
    """As many images as CIFAR-10 has, all black: enough for everything that counts."""

    def split(n: int) -> Split:
        return Split(torch.zeros(n, 32, 32, 3, dtype=torch.uint8), torch.arange(n) % 10)

    mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    return Dataset("black", "0" * 64, split(num_train), split(num_test), 10, 4, True, mean, std)


@pytest.fixture(scope="module")
def config() -> dict:
    return configs.resolve(["recipe=yoon2022", "profile=paper", "method=topk"])


@pytest.fixture(scope="module")
def task(config: dict) -> Task:
    values = {key: value for key, value in config["task"].items() if key != "name"}
    return TASKS.build(config["task"]["name"], values)


@pytest.fixture(scope="module")
def vgg(task: Task) -> nn.Module:
    return task.model(images(10), 0, CPU, torch.float32)


def test_vgg16_has_14_728_266_parameters_in_54_tensors(vgg: nn.Module) -> None:
    sizes = [p.numel() for p in vgg.parameters()]
    assert sum(sizes) == 14_728_266
    assert len(sizes) == 54
    small = [size for size in sizes if size < 1000]
    assert (len(small), sum(small)) == (40, 12_682)


def test_layers_are_those_of_the_published_model(vgg: nn.Module) -> None:
    kinds = [type(layer).__name__ for layer in vgg]
    assert kinds.count("Conv2d") == kinds.count("BatchNorm2d") == kinds.count("ReLU") == 13
    assert kinds.count("MaxPool2d") == 5
    assert kinds.count("Linear") == 1
    assert all(layer.bias is not None for layer in vgg if isinstance(layer, nn.Conv2d))


def test_density_schedule_selects_the_logged_numbers(config: dict, vgg: nn.Module) -> None:
    """k = 230,129 in the first epoch, 58,913 in the second, 14,728 after: log of job 130672."""
    values = {key: value for key, value in config["method"].items() if key != "name"}
    method = METHODS.build("topk", values)
    n = Gradients(vgg.named_parameters(), "global").flat.numel()
    assert [num_selected(n, method.density_at(epoch)) for epoch in (0, 1, 2, 137)] == [
        230_129,
        58_913,
        14_728,
        14_728,
    ]


def test_layerwise_selection_takes_at_least_one_of_every_tensor(vgg: nn.Module) -> None:
    buckets = Gradients(vgg.named_parameters(), "layer").buckets
    assert sum(num_selected(bucket.flat.numel(), 0.001) for bucket in buckets) == 14_748


def test_the_flat_gradient_begins_with_the_output_layer(vgg: nn.Module) -> None:
    gradients = Gradients(vgg.named_parameters(), "global")
    assert [name.partition(".")[0] for name, _ in gradients.parameters][:2] == [str(len(vgg) - 1)] * 2


def test_workers_batch_and_epochs(config: dict) -> None:
    assert (config["workers"], config["task"]["batch_size"], config["train"]["epochs"]) == (8, 128, 138)
    assert (config["device"], config["precision"], config["data"]["fallback"]) == ("cuda", "fp32", "refuse")


def test_the_schedule_counts_49_steps_an_epoch_while_the_data_give_48(task: Task) -> None:
    data = images()
    assert task.steps_per_epoch(data, 8) == 49
    batches = task.batches(data, 0, 8, 0, Place(0, 0, -1).generator(CPU), torch.float32)
    orders = []
    for _ in range(2):
        labels = [next(batches)[1] for _ in range(48)]
        assert all(len(one) == 128 for one in labels)
        orders.append(torch.cat(labels))
    assert not torch.equal(*orders)  # the second pass is shuffled anew


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [(1, 0.020327), (2, 0.040245), (4, 0.080082), (5, 0.1), (81, 0.1), (82, 0.01), (122, 0.01), (123, 0.001)],
)
def test_learning_rate_at_the_end_of_an_epoch_is_the_logged_one(task: Task, epoch: int, rate: float) -> None:
    assert task.learning_rate(49 * epoch - 1, 49) == pytest.approx(rate, abs=5e-7)


def test_weight_decay_spares_biases_and_batch_norm(task: Task, vgg: nn.Module) -> None:
    optimiser = task.optimiser(vgg)
    decayed, spared = optimiser.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (1e-4, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in spared["params"]} == {1}
    for group in optimiser.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"], group["dampening"]) == (0.1, 0.9, False, 0)


def test_workers_share_out_the_images_without_overlap() -> None:
    data = images(1000)
    task = TASKS.build("cnn_cifar10", {"batch_size": 125})
    seen: list[torch.Tensor] = []
    for rank in range(4):
        original, captured = data.augmented, []
        object.__setattr__(
            data, "augmented", lambda chosen, g, o=original, c=captured: c.append(chosen) or o(chosen, g)
        )
        batches = task.batches(data, rank, 4, 0, Place(0, rank, -1).generator(CPU), torch.float32)
        next(batches), next(batches)
        object.__setattr__(data, "augmented", original)
        seen += captured
    assert sorted(torch.cat(seen).tolist()) == list(range(1000))


def test_augmentation_is_a_padded_crop_and_a_flip() -> None:
    data = images(2)
    pixels = torch.arange(32 * 32 * 3).view(32, 32, 3) % 251 + 1
    data.train.images[0] = pixels.to(torch.uint8)
    padded = torch.zeros(40, 40, 3, dtype=torch.uint8)
    padded[4:36, 4:36] = data.train.images[0]
    crops = {
        side: [padded[i : i + 32, j : j + 32] if side == "as is" else padded[i : i + 32, j : j + 32].flip(1)
               for i in range(9) for j in range(9)]
        for side in ("as is", "mirrored")
    }  # fmt: skip
    own, found = Place(0, 0, -1).generator(CPU), {"as is": 0, "mirrored": 0}
    for image in data.augmented(torch.zeros(200, dtype=torch.int64), own):
        for side, candidates in crops.items():
            found[side] += any(torch.equal(image, candidate) for candidate in candidates)
    assert sum(found.values()) == 200
    assert min(found.values()) > 60  # fair coin: 100 +- 7


def test_normalisation_is_the_published_one() -> None:
    data = images(1, 1)
    values = torch.full((1, 32, 32, 3), 255.0, dtype=torch.float64)
    expected = (1 - torch.tensor([0.491, 0.482, 0.447])) / torch.tensor([0.247, 0.243, 0.262])
    torch.testing.assert_close(data.normalised(values)[0, 5, 7], expected.double(), rtol=1e-6, atol=1e-6)


def test_evaluation_is_the_exact_mean_over_images() -> None:
    data = images(10, 1100)

    class Always(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tensor([3.0, 0, 0, 2.0, 1.5, 1.2, 1.1, 0, 0, 0]).expand(len(inputs), 10)

    metrics = TASKS.build("cnn_cifar10", {}).evaluate(Always(), data, torch.float32)
    assert metrics.top1 == 10.0
    assert metrics.top5 == 50.0


def test_real_cifar10_is_read_as_it_is(cifar10_root: Path) -> None:
    data = datasets.load("cifar10", cifar10_root, CPU)
    assert data.train.images.shape == (50_000, 32, 32, 3)
    assert data.test.images.shape == (10_000, 32, 32, 3)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    pixels = data.train.images.double().mean(dim=(0, 1, 2)) / 255
    torch.testing.assert_close(pixels, torch.tensor([0.491, 0.482, 0.447]).double(), rtol=0, atol=1e-3)
