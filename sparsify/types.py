"""What is passed between the parts of a method: selections, deliveries, and the context of a state."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify.seeds import scrambled

# Laws that a method may be excused from, by name; `exceptions` says why. The test suite checks that what is
# excused does fail.
NOTHING_IS_LOST = "nothing is lost"
DENSE_AT_DENSITY_1 = "dense at density 1"


class Part:
    """A selector, a feedback, an exchange or a quantiser."""

    exceptions: ClassVar[dict[str, str]] = {}  # law -> why it can't hold

    def broken_laws(self) -> dict[str, str]:
        """`exceptions`, unless they depend on hyperparameters."""
        return self.exceptions


class Sparse(NamedTuple):
    """Some elements of a bucket."""

    indices: Tensor  # (k,) distinct; int64 or int32
    values: Tensor  # (k,)

    def add_to(self, buffer: Tensor, alpha: float = 1) -> None:
        """buffer (n,) += alpha x these. Indices are distinct, so the order of additions is fixed."""
        buffer.index_add_(0, self.indices, self.values.to(buffer.dtype), alpha=alpha)


def without_nan(part: Sparse) -> Sparse:
    """The part but for its NaNs, which no comparison with a number holds for."""
    numbers = part.values == part.values
    return part if numbers.all() else Sparse(part.indices[numbers], part.values[numbers])


class Slice(NamedTuple):
    """Consecutive elements of a bucket."""

    start: int
    values: Tensor  # (m,)

    def add_to(self, buffer: Tensor, alpha: float = 1) -> None:
        buffer[self.start : self.start + self.values.numel()].add_(self.values.to(buffer.dtype), alpha=alpha)


class Selection(NamedTuple):
    """What a selector chose."""

    indices: Tensor  # (k',) distinct
    values: Tensor | None = None  # (k',) of these elements, where the selector has read them anyway

    def of(self, acc: Tensor) -> Sparse:
        """With the values that acc (n,) has there."""
        return Sparse(self.indices, acc[self.indices] if self.values is None else self.values)


class Delivery(NamedTuple):
    """The result of an exchange."""

    total: list[Sparse | Slice]  # their sum, taken in this order, is the workers' total
    delivered: list[Sparse | Slice]  # which part of this worker's selection is in it


class BucketContext(NamedTuple):
    """Which bucket of which worker a state belongs to, and what lies in it."""

    seed: int
    rank: int
    bucket: int
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the bucket, in order
    select: str = "auto"  # which kernel searches the bucket, see `sparsify.kernels.kernel_for`

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor in the bucket."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def shared(self) -> BucketContext:
        """The same for all workers: what they draw from it, they draw alike."""
        return self._replace(rank=-1)

    def key(self, step: int = 0) -> int:
        """A 63-bit number, another one for every (seed, rank, bucket, step)."""
        mixed = self.seed
        for number in (self.rank, self.bucket, step):
            mixed = scrambled(mixed * 0x9E3779B97F4A7C15 + number + 1)
        return mixed >> 1

    def generator(self, device: torch.device) -> Generator:
        """A new generator; the global one belongs to the user's model and data."""
        own = Generator(device=device)
        own.manual_seed(self.key())
        return own


def index_dtype(n: int) -> torch.dtype:
    """The narrowest type that holds the indices of n elements, 0 to n - 1."""
    return torch.int32 if n <= 2**31 else torch.int64


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of residuals and selections: float32 for bfloat16 and float16, which would tie and round."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def members(indices: Tensor, of: Tensor) -> Tensor:
    """(k,) bool: which indices occur in `of` (m,), sorted ascending? O(k log m), no host synchronisation."""
    if not of.numel():
        return torch.zeros_like(indices, dtype=torch.bool)
    found = torch.searchsorted(of, indices).clamp_(max=of.numel() - 1)
    return of[found] == indices
