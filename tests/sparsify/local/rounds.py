"""Strategies of local steps, and some rounds of each, for whatever workers there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sparsify
from sparsify.comm import Comm
from sparsify.local.strategy import Local, Nesterov
from tests.sparsify.local.test_local import INNER, anchor, fill, flat, model_of, wrapped

EVERY, STEPS = 4, 14
STRATEGIES: dict[str, Local] = {
    name: sparsify.build(name, every=EVERY)
    for name in ("localsgd", "diloco", "muloco", "desloc", "noloco", "sparseloco")
} | {
    "streaming": sparsify.streaming_diloco(every=EVERY, fragments=2, delay=2),
    "late Top-k": Local(EVERY, sparsify.topk(density=0.1), Nesterov(), delay=3),
}


def lived(strategy: Local, comm: Comm | None, **options: Any) -> Tensor:
    """(2, n): parameters and anchor at the end, in mid-round."""
    model = model_of()
    optimiser = wrapped(INNER.adamw, model, strategy, comm, **options)
    for step in range(STEPS):
        optimiser.zero_grad()
        fill(model, optimiser.comm.rank, step)
        optimiser.step()
    return torch.stack([flat(model), anchor(optimiser, model)])
