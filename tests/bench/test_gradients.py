"""Gradients that selections are benchmarked on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.bench import _gradients as gradients
from experiments.training.networks import small_cnn

CPU = torch.device("cpu")


def test_real_gradients_come_from_training_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in small_cnn(3, 32, 10).parameters())
    monkeypatch.setitem(gradients.NETWORKS, "small", (small_cnn, size))
    monkeypatch.setitem(gradients.STEPS, "cpu", 6)
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))  # no CIFAR-10 there
    made = gradients.real("small", tmp_path, CPU)
    assert made.gradients.shape == (gradients.KEPT, size)
    assert made.residual.count_nonzero() > 0.5 * size
    assert (made.residual == 0).sum() >= int(gradients.DENSITY * size)  # what was sent in the step before
    assert not torch.equal(made.gradients[0], made.gradients[1])
    assert made.source.startswith("small on digits 32 x 32, steps 2 to 6")
    monkeypatch.setattr(gradients, "trained", None)
    again = gradients.real("small", tmp_path, CPU)
    assert torch.equal(again.gradients, made.gradients)
    assert again.source == made.source


def test_resnet18_has_the_size_that_it_is_listed_with() -> None:
    for network, size in gradients.NETWORKS.values():
        assert sum(p.numel() for p in network(3, 32, 10).parameters()) == size
