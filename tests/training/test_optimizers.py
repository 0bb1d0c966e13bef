"""Preparations of a process before it makes an optimizer."""

from __future__ import annotations

import torch
from torch import nn

from experiments.training.replicas.shared import set_learning_rate
from tests.conftest import fine, python

LEAN = """
import sys
from experiments.training.task import patch_optimizers_to_skip_compiler
from tests.training import test_optimizers
patch_optimizers_to_skip_compiler()
print(*test_optimizers.trained(), "torch._dynamo" in sys.modules)
"""


def trained() -> list[float]:
    """Where each optimiser of the tasks comes to, and has been loaded anew in between."""
    ends = []
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon):
        matrix = nn.Parameter(torch.arange(6.0).reshape(2, 3).cos())
        optimiser = kind([matrix], lr=0.1)
        for step in range(3):
            optimiser.zero_grad()
            matrix.square().sum().backward()
            set_learning_rate(optimiser, 0.1 / (1 + step))
            optimiser.step()
            optimiser.load_state_dict(optimiser.state_dict())
        assert matrix.grad_fn is None
        ends.append(float(matrix.detach().double().sum()))
    return ends


def test_optimizers_step_without_torch_s_compiler_to_the_same_bits() -> None:
    *ends, is_loaded = fine(python("-c", LEAN)).stdout.split()
    assert [*map(float, ends)] == trained()
    assert is_loaded == "False"
