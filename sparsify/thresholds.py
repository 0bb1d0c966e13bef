"""What selectors share that compare magnitudes with a threshold."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsify import host
from sparsify.kernels import Eager, Kernel, kernel
from sparsify.parts import Place, Selection, work_dtype


@dataclass
class Scratch:
    """Who searches, and two buffers that are made when needed; nothing is held from step to step.

    Plain operators take the magnitudes once, and compare them with one threshold after the other, as
    published code does. The others compare while they read, so nothing is taken beforehand.
    """

    kernel: Kernel = field(metadata={"saved": False})
    like: Tensor = field(metadata={"saved": False})  # (n,)
    buffers: dict[str, Tensor] = field(default_factory=dict, metadata={"saved": False})

    @classmethod
    def of(cls, like: Tensor, place: Place) -> Scratch:
        return cls(kernel(like, place.select), like)

    @property
    def magnitudes(self) -> Tensor:
        """(n,) what `take` took."""
        return self._buffer("magnitudes", work_dtype(self.like.dtype))

    @property
    def mask(self) -> Tensor:
        """(n,) bool."""
        return self._buffer("mask", torch.bool)

    def take(self, acc: Tensor) -> Tensor:
        """(n,) -> (n,): magnitudes <- |acc|."""
        return torch.abs(acc, out=self.magnitudes)

    def prepare(self, acc: Tensor) -> None:
        """For `reaching`, of this acc."""
        if isinstance(self.kernel, Eager):
            self.take(acc)

    def above(self, threshold: Tensor | float) -> Tensor:
        """(n,) bool: magnitudes > threshold."""
        return torch.gt(self.magnitudes, threshold, out=self.mask)

    def reaching(self, acc: Tensor, threshold: Tensor | float, strict: bool = False) -> Selection:
        """Where |acc| >= threshold (> if strict), ascending; after `prepare`. One host synchronisation."""
        if isinstance(self.kernel, Eager):
            compare = torch.gt if strict else torch.ge
            return Selection(host.nonzero(compare(self.magnitudes, threshold, out=self.mask)))
        found = self.kernel.beyond(acc, None, threshold, strict)
        return Selection(found.indices, values=found.values)

    def _buffer(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = torch.empty_like(self.like, dtype=dtype)
        return self.buffers[name]
