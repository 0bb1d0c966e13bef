"""Selectors: rules that choose k of the n elements of an accumulated gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify import cost
from sparsify.comm import Comm, gather_uneven
from sparsify.core import host_sync
from sparsify.core.checks import check_k
from sparsify.kernels import TorchKernel, Workspace
from sparsify.ranges import NonNegativeInt
from sparsify.types import (
    BucketContext,
    BucketStep,
    GroupSelection,
    MethodPart,
    PredictedBytes,
    Selection,
    bytes_between,
    hash_64_bits,
    index_dtype,
)


class Selector(MethodPart, ABC):
    """Base of the parts of methods that choose k of n elements."""

    # True if every worker chooses k elements; False if their number depends on the data.
    selects_fixed_count: ClassVar[bool] = False

    @property
    def shared(self) -> bool:
        """True if all workers choose the same indices."""
        return False

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """Return the state for a bucket like this tensor; by default buffers, which are not saved."""
        return Workspace.with_kernel(like, context)

    @abstractmethod
    def select(self, acc: Tensor, k: int, comm: Comm, state: Any) -> Selection:
        """Return (k',) distinct indices in [0, n) of acc (n,), which must not be written to."""

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: Any
    ) -> Selection:
        """Add grad (n,), if any, to acc (n,), and select from the sum; some selectors do both in one pass."""
        return self.select(acc if grad is None else acc.add_(grad), k, comm, state)

    def try_accumulate_and_select_group(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor],
        ks: Sequence[int],
        states: Sequence[Any],
        weight: float,
        reset_grads_to: Sequence[Tensor] = (),
    ) -> GroupSelection | None:
        """Accumulate and select from several buckets in one pass: acc <- weight x acc + grad.

        Args:
            accs: (n,) of each bucket.
            grads: pieces (m,) of the gradients, bucket after bucket.
            reset_grads_to: pieces of the same sizes. If given, what is added is this less grad, instead of
                grad, and grad becomes a copy of it.

        Returns:
            None, with nothing changed, where this selector can't do it in one pass.
        """
        return None


class FixedCountSelector(Selector):
    """Base of selectors that choose as many elements on all workers: k, or a number by k and shapes."""

    selects_fixed_count: ClassVar[bool] = True


class SinglePassSelector(Selector):
    """Base of selectors that define `accumulate_and_select`, because one pass does both."""

    def select(self, acc: Tensor, k: int, comm: Comm, state: Any) -> Selection:
        return self.accumulate_and_select(acc, None, k, comm, state)


@dataclass(frozen=True)
class TopK(SinglePassSelector, FixedCountSelector):
    """A selector of exactly the k largest elements by absolute value. Published operator: torch.topk."""

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: Workspace
    ) -> Selection:
        return Selection(*state.kernel.topk(acc, grad, k))


@dataclass
class RandomKeyStream:
    """A counter of draws, from which a new random key follows for each draw."""

    context: BucketContext = field(metadata={"saved": False})
    step: NonNegativeInt = 0

    def next_key(self) -> int:
        """Count a draw, and return its random key."""
        self.step += 1
        return self.context.random_key_for_rank(self.step)


@dataclass
class RandpermGenerator:
    """The random generator of the published operator."""

    generator: Generator


SamplingRule = Literal["hash", "permutation"]


@dataclass(frozen=True)
class RandomK(FixedCountSelector):
    """A selector of k uniformly random indices without replacement.

    Args:
        shared: all workers draw the same indices (from a shared seed), so that none need to be sent.
        sampling: `hash`, O(k + sqrt n) and equal on every device (see `sample_indices`); or `permutation`,
            the published operator: the head of torch.randperm(n), a sort of n random keys in O(n).
    """

    shared: bool = False
    sampling: SamplingRule = "hash"

    def init(self, like: Tensor, context: BucketContext) -> RandomKeyStream | RandpermGenerator:
        context = context.without_rank if self.shared else context
        return (
            RandomKeyStream(context)
            if self.sampling == "hash"
            else RandpermGenerator(context.make_generator_for_rank(like.device))
        )

    def select(
        self, acc: Tensor, k: int, comm: Comm, state: RandomKeyStream | RandpermGenerator
    ) -> Selection:
        n = acc.numel()
        check_k(k, n)
        if isinstance(state, RandpermGenerator):
            return Selection(torch.randperm(n, generator=state.generator, device=acc.device)[:k])
        return Selection(sample_indices(n, k, state.next_key(), acc.device))


FEISTEL_ROUNDS = 6  # four rounds make a Feistel network pseudo-random (Luby and Rackoff 1988)


def sample_indices(n: int, k: int, key: int, device: torch.device) -> Tensor:
    """Return (k,) distinct pseudo-random indices below n, which differ for every key.

    A Feistel network permutes a grid of a x b >= n points, with a b - n < a = ceil(sqrt n). Of the images of
    the first k + (a b - n) points at least k lie below n, and the first k of these are the sample. There is
    no host synchronisation.
    """
    a = math.isqrt(n - 1) + 1 if n else 1
    b = -(-n // a)
    points = torch.arange(min(n, k) + a * b - n, device=device)
    left, right = points // b, points % b
    for turn in range(FEISTEL_ROUNDS):
        # A hash of one half moves the other, alternately. This is invertible whatever the hash is.
        left = (left + hash_31_bits(right, hash_64_bits(key + 2 * turn))) % a
        right = (right + hash_31_bits(left, hash_64_bits(key + 2 * turn + 1))) % b
    images = left * b + right
    is_below_n = images < n
    slots = torch.where(is_below_n, is_below_n.cumsum(0) - 1, k).clamp_(max=k)
    return torch.empty(k + 1, dtype=torch.int64, device=device).scatter_(0, slots, images)[:k]


def hash_31_bits(numbers: Tensor, key: int) -> Tensor:
    """Return pseudo-random numbers of 31 bits (m,), one for each of `numbers` (m,) int64."""
    x = (numbers ^ (key & 0x7FFFFFFF)) * (key >> 32 | 1) & 0x7FFFFFFF
    x = (x ^ x >> 15) * 0x2C1B3C6D & 0x7FFFFFFF
    x = (x ^ x >> 12) * 0x297A2D39 & 0x7FFFFFFF
    return x ^ x >> 15


@dataclass(frozen=True)
class BlockRandomK(FixedCountSelector):
    """A selector of k consecutive elements from a random start. Eghlidi and Jaggi 2020, section 3.

    Args:
        shared: all workers start at the same index (from a shared seed).
        aligned: starts are multiples of k, and the last n mod k elements are never chosen, as in mlbench's
            code; otherwise any element can be the start and the block wraps around the end, as in PowerSGD's
            code. The paper leaves this open.
    """

    shared: bool = False
    aligned: bool = False

    def init(self, like: Tensor, context: BucketContext) -> RandomKeyStream:
        return RandomKeyStream(context.without_rank if self.shared else context)

    def select(self, acc: Tensor, k: int, comm: Comm, state: RandomKeyStream) -> Selection:
        n = acc.numel()
        check_k(k, n)
        start = state.next_key() % (n // k) * k if self.aligned else state.next_key() % n
        # The indices stay consecutive (modulo n): AllGatherBlocks relies on it.
        return Selection(torch.arange(start, start + k, device=acc.device) % n)


@dataclass
class ArangeCache:
    """A cache of the indices 0 to k - 1, for the largest k so far."""

    indices: Tensor = field(metadata={"saved": False})  # (k,)


@dataclass(frozen=True)
class FirstK(FixedCountSelector):
    """A selector of the first k elements. As it costs nothing, it shows what the harness itself costs."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> ArangeCache:
        return ArangeCache(torch.empty(0, dtype=torch.int64, device=like.device))

    def select(self, acc: Tensor, k: int, comm: Comm, state: ArangeCache) -> Selection:
        check_k(k, acc.numel())
        if len(state.indices) < k:
            state.indices = torch.arange(k, device=acc.device)
        return Selection(state.indices[:k])


# DEFT, MiCRO and ExDyna choose exclusively: each worker selects in its own stretch of the bucket, so that no
# index is chosen twice. Facts are from their public code (kljp/deft, kljp/micro, kljp/exdyna).


def split_evenly(n: int, size: int) -> list[int]:
    """Return `size` numbers with sum n that differ by at most 1, larger ones first."""
    return [n // size + (index < n % size) for index in range(size)]


class ExclusiveIndicesUnion(NamedTuple):
    """The disjoint choices of all workers, in the order of ranks."""

    indices: Tensor  # (k',) distinct, equal on all workers
    counts: list[int]  # the number of indices of each worker


def gather_exclusive_indices(comm: Comm, chosen: Tensor, n: int) -> ExclusiveIndicesUnion:
    """All-gather choices that do not overlap, so that nothing needs sorting. One host synchronisation."""
    gathered = gather_uneven(comm, chosen.to(index_dtype(n)))
    return ExclusiveIndicesUnion(torch.cat(gathered), [len(indices) for indices in gathered])


def predict_exclusive_index_gather_bytes(bucket_step: BucketStep) -> PredictedBytes:
    """Return the bytes of `gather_exclusive_indices`: lists of indices, padded to the longest."""
    (total,) = set(bucket_step.sent_counts)
    world_size = bucket_step.world_size
    least = bucket_step.max_chosen or -(-total // world_size)
    most = bucket_step.max_chosen or total
    costs = [cost.gather_uneven(bucket_step.index_nbytes * count, world_size) for count in (least, most)]
    return bytes_between(costs[:1], costs[1:])


# Selectors that compare magnitudes with a threshold share these. Plain torch operators compute the magnitudes
# once and compare them with one threshold after the other, as published code does. The other kernels compare
# while they read, so they compute nothing beforehand.


def compute_magnitudes(acc: Tensor, workspace: Workspace) -> Tensor:
    """Return |acc| (n,), in a buffer."""
    return torch.abs(acc, out=workspace.buffer("magnitudes"))


def mask_buffer(workspace: Workspace) -> Tensor:
    """Return a buffer (n,) of bool."""
    return workspace.buffer("mask", torch.bool)


def compute_magnitudes_if_needed(acc: Tensor, workspace: Workspace) -> None:
    """Compute magnitudes where `select_above_threshold` will need them for this acc."""
    if isinstance(workspace.kernel, TorchKernel):
        compute_magnitudes(acc, workspace)


def select_above_threshold(
    acc: Tensor, threshold: Tensor | float, workspace: Workspace, strict: bool = False
) -> Selection:
    """Return the indices where |acc| >= threshold (> if strict), ascending. One host synchronisation.

    Call `compute_magnitudes_if_needed` first.
    """
    if isinstance(workspace.kernel, TorchKernel):
        compare = torch.gt if strict else torch.ge
        mask = compare(workspace.buffer("magnitudes"), threshold, out=mask_buffer(workspace))
        return Selection(host_sync.nonzero(mask))
    return Selection(*workspace.kernel.above_threshold(acc, None, threshold, strict))
