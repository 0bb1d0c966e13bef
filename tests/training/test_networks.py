"""Networks of the papers have as many parameters as the papers, or the codes behind them, say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.tasks import REGISTRY as TASKS
from experiments.training import networks
from experiments.training.language.networks import BERT, LSTM

CIFAR, MNIST = (3, 32, 10), (1, 28, 10)


@pytest.mark.parametrize(
    ("network", "shape", "parameters", "tensors"),
    [
        (networks.vgg16, CIFAR, 14_728_266, 54),
        (networks.resnet18, CIFAR, 11_173_962, 62),
        (networks.slim_resnet18, CIFAR, 176_402, 62),
        (networks.resnet20, CIFAR, 269_722, 59),
        (networks.fast_resnet, CIFAR, 1_160_960, 19),
        (networks.fnn3, MNIST, 199_210, 6),
        (networks.lenet5, MNIST, 61_706, 10),
    ],
)
def test_image_networks_are_as_large_as_they_say(
    network: Callable[[int, int, int], nn.Module], shape: tuple[int, int, int], parameters: int, tensors: int
) -> None:
    model = network(*shape)
    sizes = [p.numel() for p in model.parameters()]
    assert (sum(sizes), len(sizes)) == (parameters, tensors)
    assert f"{parameters:,}" in (network.__doc__ or "")
    channels, pixels, classes = shape
    assert model(torch.zeros(2, channels, pixels, pixels)).shape == (2, classes)


@pytest.mark.parametrize(
    ("network", "parameters", "tensors"),
    [(networks.imagenet_resnet50, 25_557_032, 161), (networks.imagenet_vgg16, 138_357_544, 32)],
)
def test_networks_for_imagenet_are_as_large_as_they_say(
    network: Callable[[int, int, int], nn.Module], parameters: int, tensors: int
) -> None:
    with torch.device("meta"):
        model = network(3, 224, 1000)
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    sizes = [p.numel() for p in model.parameters()]
    assert (sum(sizes), len(sizes)) == (parameters, tensors)
    assert f"{parameters:,}" in (network.__doc__ or "")
    assert not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))


@pytest.mark.parametrize("network", ["resnet50", "vgg16", "maebase", "maelarge"])
def test_what_is_timed_on_synthetic_images_is_what_is_trained_on_imagenet(network: str) -> None:
    real, timed = (TASKS.build(f"{network}_{data}", {}) for data in ("imagenet", "images224"))
    assert replace(real, dataset="images224") == timed


def test_the_large_lstm_has_66_million_parameters() -> None:
    with torch.device("meta"):
        model = LSTM(10_000, 1500, 2)
    assert sum(p.numel() for p in model.parameters()) == 66_034_000


@pytest.mark.parametrize(
    ("width", "layers", "heads", "millions"), [(128, 2, 2, 4.4), (768, 12, 12, 110), (1024, 24, 16, 335)]
)
def test_bert_has_its_published_sizes_with_its_published_vocabulary(
    width: int, layers: int, heads: int, millions: float
) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = BERT(30_522, 512, width, layers, heads)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_way_around_without_parameters_keeps_every_other_pixel() -> None:
    block = networks.Residual(2, 4, stride=2, projects=False)
    for p in block.parameters():
        nn.init.zeros_(p)
    inputs = torch.rand(1, 2, 4, 4)
    found = block(inputs)
    assert torch.equal(found[:, :2], inputs[:, :, ::2, ::2])
    assert not found[:, 2:].any()
