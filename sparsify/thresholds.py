"""What selectors share that compare magnitudes with a threshold."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsify.parts import work_dtype


@dataclass
class Scratch:
    """Two buffers, allocated once, that hold nothing from step to step: magnitudes, and where they are large.

    With a mask of its own the magnitudes outlive a comparison, so a second threshold costs no second |acc|.
    """

    magnitudes: Tensor = field(metadata={"saved": False})  # (n,)
    mask: Tensor = field(metadata={"saved": False})  # (n,) bool

    @classmethod
    def like(cls, like: Tensor) -> Scratch:
        magnitudes = torch.empty_like(like, dtype=work_dtype(like.dtype))
        return cls(magnitudes, torch.empty_like(like, dtype=torch.bool))

    def take(self, acc: Tensor) -> Tensor:
        """(n,) -> (n,): magnitudes <- |acc|."""
        return torch.abs(acc, out=self.magnitudes)

    def above(self, threshold: Tensor | float) -> Tensor:
        """(n,) bool: magnitudes > threshold."""
        return torch.gt(self.magnitudes, threshold, out=self.mask)

    def at_least(self, threshold: Tensor | float) -> Tensor:
        """(n,) bool: magnitudes >= threshold."""
        return torch.ge(self.magnitudes, threshold, out=self.mask)
