"""What a state needs and no checkpoint saves: the kernel that searches a bucket, and work buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsify import huge_pages
from sparsify.kernels import Kernel, kernel_for
from sparsify.types import BucketContext, work_dtype


@dataclass
class Workspace:
    """A bucket's kernel, if it is searched, and its buffers, which hold nothing from step to step."""

    like: Tensor = field(metadata={"saved": False})  # (n,) the bucket
    searcher: Kernel | None = field(default=None, metadata={"saved": False})
    buffers: dict[str, Tensor] = field(default_factory=dict, metadata={"saved": False})

    @classmethod
    def searching(cls, like: Tensor, context: BucketContext) -> Workspace:
        """With the kernel that the user has chosen.

        Raises:
            ValueError: that kernel does not work here.
        """
        return cls(like, kernel_for(like, context.select))

    @property
    def kernel(self) -> Kernel:
        assert self.searcher is not None, "made by Workspace(...), not by Workspace.searching(...)"
        return self.searcher

    def buffer(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """(n,), allocated at its first use; by default of the type that selections are computed in."""
        if name not in self.buffers:
            dtype = work_dtype(self.like.dtype) if dtype is None else dtype
            self.buffers[name] = huge_pages.advise(torch.empty_like(self.like, dtype=dtype))
        return self.buffers[name]
