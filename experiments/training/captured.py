"""How much of the gradient, by its energy, is in what a worker sends."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.types import Sparse


class CapturedEnergy:
    """||TopK(u)||^2 / ||u||^2 over all buckets of one step, u being what is selected from, that is, gradient
    plus residual; for other selections than Top-k what these took. Shi et al. 2019, section 3, bound what is
    missing from 1.

    Tell it of each bucket: `Step.watch`.
    """

    def __init__(self) -> None:
        self.norms: list[Tensor] = []  # (2,) each: what is sent, and what there was

    def __call__(self, acc: Tensor, sent: Sparse) -> None:
        self.norms.append(
            torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in (sent.values, acc)])
        )

    def share(self) -> float | None:
        """In [0, 1]; None where nobody told, as of methods that select nothing, and of zeros. One host
        synchronisation.
        """
        if not self.norms:
            return None
        sent, there = torch.stack(self.norms).square().sum(dim=0).tolist()
        return sent / there if there else None
