"""Strategies of local steps, and some rounds of each, for whatever workers there are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, CountingComm
from sparsify.local.strategy import Local, Nesterov
from tests.sparsify.local.test_local import INNER, anchor, fill, flat, model_of, wrapped

EVERY, STEPS = 4, 14
SENT = 8  # column of an interface
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


def sent_in_two_rounds(strategy: Local, comm: Comm, interface: str) -> Tensor:
    """(2 EVERY, 2): bytes that left this worker by its network interface in each step, and those counted."""
    counting, model = CountingComm(comm), nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512))
    optimiser = wrapped(INNER.adamw, model, strategy, counting)
    sent = [(left_by(interface), counting.sent_bytes)]
    for _ in range(2 * EVERY):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimiser.step()
        sent.append((left_by(interface), counting.sent_bytes))
    return torch.tensor(sent).diff(dim=0)


def left_by(interface: str) -> int:
    """Bytes that have left by this interface, once no more do."""
    before, now = -1, 0
    while now != before:
        time.sleep(0.05)
        before, now = now, int(Path("/proc/net/dev").read_text().partition(f"{interface}:")[2].split()[SENT])
    return now
