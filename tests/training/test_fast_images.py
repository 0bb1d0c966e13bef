"""Ways to learn in few steps: whitened pixels, smoothed labels, a rate that falls to nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets, networks
from experiments.training.datasets import Dataset, Split
from experiments.training.task import FastImageTask
from tests.training.tasks import CPU, model_of


@pytest.fixture
def task() -> FastImageTask:
    found: FastImageTask = TASKS.build("fastresnet_cifar10", {})
    return found


def coloured(n: int = 200) -> Dataset:
    """Smooth images of which the channels resemble each other, as photographs are."""
    digits = datasets.load("digits32", None, CPU)
    weights = torch.tensor([1.0, 0.8, 0.5])
    noise = torch.randint(60, (n, 32, 32, 3), generator=torch.Generator().manual_seed(0))
    images = (digits.train.images[:n] * weights * 0.7 + noise).to(torch.uint8)
    return replace(digits, train=Split(images, digits.train.labels[:n]))


def fitted(images: Tensor) -> tuple[networks.WhiteningConvolution, Tensor]:
    """Return a layer that was fitted to images, and its outputs for them by channel."""
    whitening = networks.WhiteningConvolution(3)
    whitening.fit(images)
    return whitening, whitening(images).transpose(0, 1).flatten(1)


def test_whitened_patches_have_unit_covariance() -> None:
    images = torch.randn(100, 3, 16, 16, generator=torch.Generator().manual_seed(0)).cumsum(3)
    whitening, outputs = fitted(images)
    half = whitening.width // 2
    assert torch.allclose(outputs[:half].cov(), torch.eye(half), atol=0.02)
    assert torch.equal(outputs[half:], -outputs[:half])


def test_what_images_hardly_have_is_not_blown_up() -> None:
    grey = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)).expand(-1, 3, -1, -1)
    whitening, outputs = fitted(grey)
    assert whitening.weight.abs().max() <= whitening.LEAST**-0.5
    assert outputs.var(1)[: whitening.width // 3].max() < 1e-3


def test_it_is_fitted_to_the_normalised_training_images_and_not_trained(task: FastImageTask) -> None:
    data = coloured()
    model = model_of(task, data)
    inputs, _ = task.evaluation_batch(data, data.train, torch.float32)
    (whitening,) = (layer for layer in model.modules() if isinstance(layer, networks.WhiteningConvolution))
    variances = whitening(inputs).transpose(0, 1).flatten(1).var(1)
    assert torch.allclose(variances, torch.ones(whitening.width), atol=0.1)
    assert not [*whitening.parameters()]
    assert "0.weight" in model.state_dict()  # a checkpoint has it, and rank 0's is everybody's


def test_labels_are_smoothed_in_training_only(task: FastImageTask) -> None:
    logits, labels = torch.tensor([[4.0, 1.0, 0.0, 0.0]]), torch.tensor([0])
    losses = logits.logsumexp(1) - logits[0]
    smooth = task.smoothing
    expected = (1 - smooth) * losses[0] + smooth * losses.mean()
    assert torch.isclose(task.loss(logits, labels), expected)
    assert task.metric_sums(logits, labels)[1] == pytest.approx(float(losses[0]), rel=1e-5)


def test_the_learning_rate_rises_and_falls_linearly_to_nothing(task: FastImageTask) -> None:
    rates = [task.learning_rate(step, 49) for step in range(138 * 49 + 1)]
    top = 10 * 49
    assert rates[top] == max(rates) == pytest.approx(0.1)
    assert rates[top // 2] == pytest.approx(0.05, rel=0.01)
    assert rates[(top + 138 * 49) // 2] == pytest.approx(0.05)
    assert rates[-2] > rates[-1] == 0 == task.learning_rate(200 * 49, 49)


def test_a_rate_that_is_nothing_before_it_has_risen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lr_zero_epoch=5 is not after lr_warmup_epochs=10.*later epoch"):
        TASKS.build("fastresnet_cifar10", {"lr_zero_epoch": 5})
