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

CIFAR, MNIST, IMAGENET = (3, 32, 10), (1, 28, 10), (3, 224, 1000)
SIZES: dict[Callable[..., nn.Module], tuple[tuple[int, int, int], int, int]] = {  # parameters, and tensors
    networks.vgg16: (CIFAR, 14_728_266, 54),
    networks.slim_vgg16: (CIFAR, 924_186, 54),
    networks.resnet18: (CIFAR, 11_173_962, 62),
    networks.slim_resnet18: (CIFAR, 176_402, 62),
    networks.resnet20: (CIFAR, 269_722, 59),
    networks.fast_resnet: (CIFAR, 1_160_960, 19),
    networks.fnn3: (MNIST, 199_210, 6),
    networks.lenet5: (MNIST, 61_706, 10),
    networks.imagenet_resnet50: (IMAGENET, 25_557_032, 161),
    networks.imagenet_vgg16: (IMAGENET, 138_357_544, 32),
}


def test_image_networks_are_as_large_as_they_say() -> None:
    for network, (shape, parameters, tensors) in SIZES.items():
        channels, pixels, classes = shape
        with torch.device("meta" if shape == IMAGENET else "cpu"):
            model = network(*shape)
            assert model(torch.zeros(2, channels, pixels, pixels)).shape == (2, classes)
        sizes = [p.numel() for p in model.parameters()]
        assert (sum(sizes), len(sizes)) == (parameters, tensors)
        assert f"{parameters:,}" in (network.__doc__ or "")
        if shape == IMAGENET:
            assert not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))


def test_what_is_timed_on_synthetic_images_is_what_is_trained_on_imagenet() -> None:
    for network in ("resnet50", "vgg16", "maebase", "maelarge"):
        real, timed = (TASKS.build(f"{network}_{data}", {}) for data in ("imagenet", "images224"))
        assert replace(real, dataset="images224") == timed


def test_presets_of_transformers_are_as_large_as_they_say() -> None:
    pytest.importorskip("transformers")
    for name, pixels, classes, parameters in (  # of text: words in a sequence
        ("gpt_ptb", 35, 10_000, 1_681_280),
        ("gpt_ptbchars", 64, 51, 411_520),
        ("gpt10m_ptbchars", 64, 51, 10_691_712),
        ("maetiny_cifar10", 32, 10, 265_424),
        ("maebase_imagenet", 224, 10, 111_655_680),
        ("maelarge_imagenet", 224, 10, 329_239_296),
    ):
        with torch.device("meta"):
            model = TASKS.build(name, {}).network(3, pixels, classes)
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        assert sum(trained) == parameters
        assert f"{parameters:,}" in TASKS.docstring(name)


def test_the_large_lstm_has_66_million_parameters() -> None:
    with torch.device("meta"):
        model = LSTM(10_000, 1500, 2)
    assert sum(p.numel() for p in model.parameters()) == 66_034_000


@pytest.mark.extended
def test_bert_has_its_published_sizes_with_its_published_vocabulary() -> None:
    pytest.importorskip("transformers")
    for size, millions in (((128, 2, 2), 4.4), ((768, 12, 12), 110), ((1024, 24, 16), 335)):
        with torch.device("meta"):
            model = BERT(30_522, 512, *size)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_way_around_without_parameters_keeps_every_other_pixel() -> None:
    block = networks.ResidualBlock(2, 4, stride=2, projects=False)
    for p in block.parameters():
        nn.init.zeros_(p)
    inputs = torch.rand(1, 2, 4, 4)
    found = block(inputs)
    assert torch.equal(found[:, :2], inputs[:, :, ::2, ::2])
    assert not found[:, 2:].any()
