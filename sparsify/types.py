"""What is passed between the parts of a method: selections, deliveries, and the context of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify import cost, ranges

# Laws that a method may be excused from, by name; `exceptions` says why. The test suite checks that what is
# excused does fail.
NOTHING_IS_LOST = "nothing is lost"
DENSE_AT_DENSITY_1 = "dense at density 1"


class PromisedBytes(NamedTuple):
    """Bytes that a worker will send. `least` and `most` differ where more matters than `SeenStep` has."""

    least: int
    most: int

    def __add__(self, other: Any) -> PromisedBytes:
        return PromisedBytes(self.least + other.least, self.most + other.most)


def exactly(*collectives: cost.Cost) -> PromisedBytes:
    """The bytes of these collectives together."""
    return between(collectives, collectives)


def between(least: Sequence[cost.Cost], most: Sequence[cost.Cost]) -> PromisedBytes:
    """Bytes from those of some collectives to those of others."""
    return PromisedBytes(*(sum(one.sent_bytes for one in collectives) for collectives in (least, most)))


class Call(NamedTuple):
    """A collective to which all workers bring as many bytes."""

    kind: str  # as in `sparsify.cost.TEXTBOOK`
    nbytes: int
    route: Sequence[tuple[int, int]] = ()  # of permute

    def cost(self, size: int) -> cost.Cost:
        """Cost for each worker, as the communicator counts it."""
        return cost.TEXTBOOK[self.kind](self.nbytes, len(self.route) or size)


def uneven_gather(longest_nbytes: int) -> list[Call]:
    """Collectives of `sparsify.comm.gather_uneven`: lengths, then tensors padded to the longest, if any."""
    padded = [Call("all_gather", longest_nbytes)] if longest_nbytes else []
    return [Call("all_gather", cost.LENGTH), *padded]


class SeenStep(NamedTuple):
    """One bucket in one step, as it looks from outside: what `promised` is told."""

    shapes: tuple[tuple[int, ...], ...]  # of its tensors
    k: int
    dtype: torch.dtype
    size: int  # workers
    step: int
    selected: list[int]  # elements that each worker sent
    longest: int | None = None  # the largest number of elements that any worker chose itself, where known

    @property
    def sizes(self) -> list[int]:
        """Elements of each of its tensors."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def n(self) -> int:
        """Elements of the bucket."""
        return sum(self.sizes)

    @property
    def work(self) -> torch.dtype:
        """The type that values are sent as."""
        return work_dtype(self.dtype)

    @property
    def index_nbytes(self) -> int:
        """Bytes of an index."""
        return index_dtype(self.n).itemsize


class Part:
    """A selector, a feedback, an exchange or a quantiser."""

    exceptions: ClassVar[dict[str, str]] = {}  # law -> why it can't hold

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def broken_laws(self) -> dict[str, str]:
        """`exceptions`, unless they depend on hyperparameters."""
        return self.exceptions

    def calls(self, seen: SeenStep) -> list[Call]:
        """Collectives of this part for a bucket in a step, in order, where numbers of elements tell them; a
        part without `calls` of its own sends nothing, or says in `promised` what it sends.
        """
        return []

    @property
    def is_silent(self) -> bool:
        """True if it never sends anything."""
        own = type(self)
        return own.calls is Part.calls and own.promised is Part.promised

    def promised(self, seen: SeenStep) -> PromisedBytes:
        """Closed form of the bytes that this part sends of a bucket in a step, from numbers of elements.
        What is counted must be equal, or lie between.
        """
        return exactly(*(call.cost(seen.size) for call in self.calls(seen)))


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
        """buffer (n,) += alpha x these."""
        buffer[self.start : self.start + self.values.numel()].add_(self.values.to(buffer.dtype), alpha=alpha)


class Selection(NamedTuple):
    """Elements that a selector chose."""

    indices: Tensor  # (k',) distinct
    values: Tensor | None = None  # (k',) of these elements, where the selector has read them anyway

    def of(self, acc: Tensor) -> Sparse:
        """The elements with the values that acc (n,) has there."""
        return Sparse(self.indices, acc[self.indices] if self.values is None else self.values)


Watch = Callable[[Tensor, Sparse], None]


class Step(NamedTuple):
    """Values that change from step to step, and are the same for all workers."""

    step_density: float  # k/n to send in this step
    lr: float = 1.0  # of the optimizer
    watch: Watch | None = None  # a sparsifier calls it with (n,) that it selects from, and its selection


class Delivery(NamedTuple):
    """The result of an exchange."""

    total: list[Sparse | Slice]  # their sum, taken in this order, is the workers' total
    delivered: list[Sparse | Slice]  # which part of this worker's selection is in it


class BucketContext(NamedTuple):
    """The bucket and the worker that a state belongs to, and the shapes in it."""

    seed: int
    rank: int
    bucket: int
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the bucket, in order
    select: str = "auto"  # which kernel searches the bucket, see `sparsify.kernels.make_kernel`

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


def num_selected(n: int, density: float) -> int:
    """Return k: the whole part of density times n, at least 1 of a bucket that is not empty.

    As in the code of Shi et al.
    """
    return min(n, max(1, int(density * n)))


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


def scrambled(number: int) -> int:
    """A bijection of 64 bits, each of which moves half of them: splitmix64's end, Steele et al. 2014."""
    number &= 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


@dataclass
class SearchStats:
    """Counts of what a kernel's `topk` did so far."""

    steps: int = 0  # calls
    fallbacks: int = 0  # of these, how many found that their guessed bound was wrong
    candidates: int = 0  # elements that reached a guessed bound, all calls together
    selected: int = 0  # elements that were selected, all calls together

    def __add__(self, other: SearchStats) -> SearchStats:
        return SearchStats(*map(add, astuple(self), astuple(other)))


class Kernel(ABC):
    """A search of one bucket: buffers are made for it once, so use it for that bucket, or for parts of it."""

    name: str  # as records have it

    def __init__(self) -> None:
        self.done = SearchStats()

    @abstractmethod
    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        """acc (n,) += grad (n,); the k elements of largest magnitude, (k,). NaN counts as larger than Inf. No
        host synchronisation. What is returned is the caller's; acc is otherwise as it was.
        """

    @abstractmethod
    def above(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        """acc (n,) += grad (n,); all elements with |acc| >= threshold (> if strict), indices ascending; NaN
        is above nothing. One host synchronisation, for their number.
        """

    def stats(self) -> SearchStats:
        """Statistics of all calls of `topk`; on a GPU one host synchronisation."""
        return self.done
