"""The plain path: torch's own operators, one by one. Published baseline, and oracle of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify import host_sync, huge_pages
from sparsify.checks import check_k
from sparsify.kernels.search_stats import SearchStats
from sparsify.types import Sparse, work_dtype


class Eager:
    """add, abs, torch.topk, gather: about 48 bytes of memory traffic per element, in float32."""

    name = "torch"

    def __init__(self, like: Tensor) -> None:
        self.magnitudes = huge_pages.advise(torch.empty_like(like, dtype=work_dtype(like.dtype)))
        self.mask: Tensor | None = None  # (n,) bool, made when first needed
        self.done = SearchStats()

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        """See `Kernel.topk`; ties as torch.topk takes them."""
        check_k(k, acc.numel())
        if grad is not None:
            acc.add_(grad)
        indices = self._take(acc).topk(k, sorted=False).indices
        self.done.steps += 1
        return Sparse(indices, acc[indices])

    def above(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        """See `Kernel.above`."""
        if grad is not None:
            acc.add_(grad)
        if self.mask is None:
            self.mask = torch.empty_like(self.magnitudes, dtype=torch.bool)
        compare = torch.gt if strict else torch.ge
        indices = host_sync.nonzero(compare(self._take(acc), threshold, out=self.mask[: acc.numel()]))
        return Sparse(indices, acc[indices])

    def stats(self) -> SearchStats:
        """See `Kernel.stats`."""
        return self.done

    def _take(self, acc: Tensor) -> Tensor:
        return torch.abs(acc, out=self.magnitudes[: acc.numel()])
