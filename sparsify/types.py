"""Types that the parts of a method pass to each other, and the base classes of these parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify import cost, ranges

# Laws that a method may declare that it breaks. The test suite checks that it does break them.
NOTHING_IS_LOST = "nothing is lost"
DENSE_AT_DENSITY_1 = "dense at density 1"
# Of a method of local steps alone, whose anchors it also averages: see `sparsify.local.strategy.LocalSteps`.
ANCHORS_AGREE = "anchors agree"


class PredictedBytes(NamedTuple):
    """The range of bytes that a worker will send.

    `least` and `most` differ where the bytes depend on more than `BucketStep` holds.
    """

    least: int
    most: int

    def __add__(self, other: Any) -> PredictedBytes:
        return PredictedBytes(self.least + other.least, self.most + other.most)


def exact_bytes(*collectives: cost.CollectiveCost) -> PredictedBytes:
    """Return the bytes that a worker sends in these collectives together."""
    return bytes_between(collectives, collectives)


def bytes_between(
    least: Sequence[cost.CollectiveCost], most: Sequence[cost.CollectiveCost]
) -> PredictedBytes:
    """Return the range from the bytes of some collectives to the bytes of others."""
    return PredictedBytes(
        sum(collective.sent_bytes for collective in least), sum(collective.sent_bytes for collective in most)
    )


class CollectiveCall(NamedTuple):
    """A collective to which all workers bring the same number of bytes."""

    kind: str  # as in `sparsify.cost.TEXTBOOK`
    nbytes: int
    route: Sequence[tuple[int, int]] | None = None  # (source, destination) pairs of permute

    def cost(self, world_size: int) -> cost.CollectiveCost:
        """Return the cost for each worker, as the communicator counts it."""
        size = world_size if self.route is None else len(self.route)
        return cost.TEXTBOOK[self.kind](self.nbytes, size)


def uneven_gather_calls(longest_nbytes: int) -> list[CollectiveCall]:
    """Return the collectives of `sparsify.comm.gather_uneven`: lengths, then padded tensors, if any."""
    padded = [CollectiveCall("all_gather", longest_nbytes)] if longest_nbytes else []
    return [CollectiveCall("all_gather", cost.LENGTH_BYTES), *padded]


class BucketStep(NamedTuple):
    """The sizes of one bucket in one step, from which `predict_bytes` computes the bytes that it sends."""

    shapes: tuple[tuple[int, ...], ...]  # of the bucket's tensors
    k: int
    dtype: torch.dtype  # of the gradient
    world_size: int
    step: int
    sent_counts: list[int]  # number of elements that each worker sent
    max_chosen: int | None = None  # the largest number of elements that any worker chose itself, where known

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each tensor."""
        return tensor_sizes(self.shapes)

    @property
    def n(self) -> int:
        """The number of elements of the bucket."""
        return sum(self.sizes)

    @property
    def value_dtype(self) -> torch.dtype:
        """The type that values are sent in."""
        return accumulation_dtype(self.dtype)

    @property
    def index_nbytes(self) -> int:
        """The number of bytes of an index."""
        return index_dtype(self.n).itemsize


class MethodPart:
    """Base of selectors, feedbacks, exchanges and quantisers, of which methods are composed."""

    always_broken_laws: ClassVar[dict[str, str]] = {}  # the reason why a law can't hold, by law

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def broken_laws(self) -> dict[str, str]:
        """Return the reason why a law can't hold, by law; override it where hyperparameters matter."""
        return self.always_broken_laws

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        """Return the collectives of this part in a step, in order.

        Override it where numbers of elements determine them; otherwise override `predict_bytes`. A part that
        overrides neither sends nothing.
        """
        return []

    @property
    def is_communication_free(self) -> bool:
        """True if this part never sends anything."""
        cls = type(self)
        return cls.collective_calls is MethodPart.collective_calls and (
            cls.predict_bytes is MethodPart.predict_bytes
        )

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        """Return the bytes that this part sends of a bucket in a step, by closed forms.

        The bytes that the communicator counts must lie in this range.
        """
        return exact_bytes(
            *(call.cost(bucket_step.world_size) for call in self.collective_calls(bucket_step))
        )


class SparseVector(NamedTuple):
    """Some elements of a bucket, as indices and values."""

    indices: Tensor  # (k,) distinct; int64 or int32
    values: Tensor  # (k,)

    def add_to(self, buffer: Tensor, alpha: float = 1) -> None:
        """Add alpha times these values to buffer (n,). Distinct indices make it deterministic."""
        buffer.index_add_(0, self.indices, self.values.to(buffer.dtype), alpha=alpha)


def drop_nans(vector: SparseVector) -> SparseVector:
    """Return the elements that are not NaN."""
    is_number = vector.values == vector.values
    return vector if is_number.all() else SparseVector(vector.indices[is_number], vector.values[is_number])


class DenseSlice(NamedTuple):
    """Consecutive elements of a bucket, as start and values."""

    start: int
    values: Tensor  # (m,)

    def add_to(self, buffer: Tensor, alpha: float = 1) -> None:
        """Add alpha times these values to buffer (n,)."""
        buffer[self.start : self.start + self.values.numel()].add_(self.values.to(buffer.dtype), alpha=alpha)


class Selection(NamedTuple):
    """Elements that a selector chose: indices, and values where it has read them anyway."""

    indices: Tensor  # (k',) distinct
    values: Tensor | None = None  # (k',)

    def gather_from(self, acc: Tensor) -> SparseVector:
        """Return the chosen elements of acc (n,)."""
        return SparseVector(self.indices, acc[self.indices] if self.values is None else self.values)


class GroupSelection(NamedTuple):
    """The elements chosen from a group of buckets, which follow each other as one bucket."""

    selection: SparseVector
    counts: list[int]  # how many are of each bucket


SelectionHook = Callable[[Tensor, SparseVector], None]


class StepSettings(NamedTuple):
    """Settings that change from step to step and are equal on all workers."""

    step_density: float  # k/n to send in this step
    lr: float = 1.0  # of the optimizer
    selection_hook: SelectionHook | None = (
        None  # a sparsifier calls it with (n,) that it selects from, and its selection
    )


class Delivery(NamedTuple):
    """The result of an exchange: the sum over the workers, and this worker's contribution to it."""

    # Parts of the sum over the workers, which are added in this order. A `Sparsifier` divides the sum by the
    # number of workers.
    sum_parts: list[SparseVector | DenseSlice]
    # This worker's own elements that are in the sum, which its residual loses; none where nothing is.
    own_parts: list[SparseVector | DenseSlice]


class BucketContext(NamedTuple):
    """The bucket and the worker that a state is made for."""

    seed: int
    rank: int
    bucket: int  # its number
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the bucket, in order
    select: str = "auto"  # which kernel searches the bucket, see `sparsify.kernels.make_kernel`

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each tensor in the bucket."""
        return tensor_sizes(self.shapes)

    @property
    def without_rank(self) -> BucketContext:
        """The context without its rank: random numbers drawn from it are equal on all workers."""
        return self._replace(rank=-1)

    def random_key_for_rank(self, step: int = 0) -> int:
        """Return a 63-bit number that differs for every (seed, rank, bucket, step)."""
        mixed = self.seed
        for number in (self.rank, self.bucket, step):
            mixed = hash_64_bits(mixed * 0x9E3779B97F4A7C15 + number + 1)
        return mixed >> 1

    def make_generator_for_rank(self, device: torch.device) -> Generator:
        """Return a new random generator, seeded with `random_key_for_rank`.

        The global one belongs to the user's model and data.
        """
        return Generator(device=device).manual_seed(self.random_key_for_rank())


def tensor_sizes(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of elements of tensors of these shapes."""
    return [math.prod(shape) for shape in shapes]


def num_selected(n: int, density: float) -> int:
    """Return k: the whole part of density times n, at least 1 of a bucket that is not empty.

    As in the code of Shi et al.
    """
    return min(n, max(1, int(density * n)))


def index_dtype(n: int) -> torch.dtype:
    """Return the narrowest type that holds the indices of n elements, 0 to n - 1."""
    return torch.int32 if n <= 2**31 else torch.int64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of residuals and selections: float32 for bfloat16 and float16, which would round."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def isin_sorted(indices: Tensor, sorted_indices: Tensor) -> Tensor:
    """Return (k,) bool: which indices occur in `sorted_indices` (m,), ascending.

    Takes O(k log m), without a host synchronisation.
    """
    if not sorted_indices.numel():
        return torch.zeros_like(indices, dtype=torch.bool)
    positions = torch.searchsorted(sorted_indices, indices).clamp_(max=sorted_indices.numel() - 1)
    return sorted_indices[positions] == indices


def hash_64_bits(number: int) -> int:
    """Return a 64-bit hash of a 64-bit number, by the bijection that ends splitmix64 (Steele et al. 2014)."""
    number &= 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


@dataclass
class SearchStats:
    """Counts over all calls of a kernel's `topk`."""

    steps: int = 0  # calls
    fallbacks: int = 0  # calls that found that their guessed bound was wrong
    candidates: int = 0  # elements that reached a guessed bound
    selected: int = 0  # elements that were selected

    def __add__(self, other: SearchStats) -> SearchStats:
        return SearchStats(*map(add, astuple(self), astuple(other)))


class SelectionKernel(ABC):
    """Base of kernels that accumulate one bucket and select from it, in buffers that are made once for it."""

    name: str  # as records have it

    def __init__(self) -> None:
        self.search_stats = SearchStats()

    @abstractmethod
    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> SparseVector:
        """Add grad (n,) to acc (n,), and return the k elements of largest magnitude.

        NaN counts as larger than Inf. There is no host synchronisation. The caller owns the result.
        """

    @abstractmethod
    def above_threshold(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> SparseVector:
        """Add grad (n,) to acc (n,), and return all elements with |acc| >= threshold (> if strict).

        Indices ascend. NaN is never above a threshold. One host synchronisation, for the number of elements.
        """

    def stats(self) -> SearchStats:
        """Return the counts over all calls of `topk`. On a GPU this is one host synchronisation."""
        return self.search_stats
