"""Selectors: rules that choose k of n. They get the accumulated gradient and return indices."""

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
    MethodPart,
    PredictedBytes,
    Selection,
    SparseVector,
    bytes_between,
    index_dtype,
    mix_bits,
)


class Selector(MethodPart, ABC):
    """Part of a method that chooses k of n. How many a worker chooses depends on its data, unless `exact`."""

    selects_exactly_k: ClassVar[bool] = False  # does every worker choose the same number, known beforehand?

    @property
    def shared(self) -> bool:
        """True if all workers choose alike."""
        return False

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one; by default what searches it, of which nothing is saved."""
        return Workspace.with_kernel(like, context)

    @abstractmethod
    def select(self, acc: Tensor, k: int, comm: Comm, state: Any) -> Selection:
        """(n,) -> (k',) distinct indices in [0, n). `acc` is not to be written to."""

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: Any
    ) -> Selection:
        """acc (n,) += grad (n,) if there is one, then as `select`; some do both in one pass."""
        return self.select(acc if grad is None else acc.add_(grad), k, comm, state)

    def search_together(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor],
        ks: Sequence[int],
        states: Sequence[Any],
        weight: float,
        anchors: Sequence[Tensor] = (),
    ) -> tuple[SparseVector, list[int]] | None:
        """Of several buckets acc <- weight x acc + grad; what is chosen of their space, and how many elements
        that is of each. None where it can't be done at once, and nothing has changed.

        Args:
            accs: (n,) of each bucket.
            grads: tensors (m,) that follow each other in the space.
            anchors: such tensors, too; then anchor - grad is added in the place of grad, which becomes a copy
                of the anchor.
        """
        return None


class ExactlyKSelector(Selector):
    """Base of selectors that always choose k."""

    selects_exactly_k: ClassVar[bool] = True


class SinglePassSelector(Selector):
    """Base of selectors whose `accumulate_and_select` is their own: one pass does both."""

    def select(self, acc: Tensor, k: int, comm: Comm, state: Any) -> Selection:
        return self.accumulate_and_select(acc, None, k, comm, state)


@dataclass(frozen=True)
class TopK(SinglePassSelector, ExactlyKSelector):
    """The k largest by absolute value, exactly. Published operator: torch.topk."""

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: Workspace
    ) -> Selection:
        return Selection(*state.kernel.topk(acc, grad, k))


@dataclass
class DrawCounter:
    """The number of draws so far; the next draw depends on it and on the context only."""

    context: BucketContext = field(metadata={"saved": False})
    step: NonNegativeInt = 0

    def next_key(self) -> int:
        """The next draw's own number."""
        self.step += 1
        return self.context.random_key(self.step)


@dataclass
class PermutationState:
    """The published operator's generator."""

    generator: Generator


SamplingRule = Literal["hash", "permutation"]


@dataclass(frozen=True)
class RandomK(ExactlyKSelector):
    """k uniformly random indices without replacement.

    Args:
        shared: all workers draw alike (from a shared seed), so that indices need not be sent.
        sampling: `hash`, O(k + sqrt n) and the same on every device (see `sample`); or `permutation`, the
            published operator: the head of torch.randperm(n), a sort of n random keys in O(n).
    """

    shared: bool = False
    sampling: SamplingRule = "hash"

    def init(self, like: Tensor, context: BucketContext) -> DrawCounter | PermutationState:
        context = context.shared if self.shared else context
        return (
            DrawCounter(context)
            if self.sampling == "hash"
            else PermutationState(context.make_generator(like.device))
        )

    def select(self, acc: Tensor, k: int, comm: Comm, state: DrawCounter | PermutationState) -> Selection:
        n = acc.numel()
        check_k(k, n)
        if isinstance(state, PermutationState):
            return Selection(torch.randperm(n, generator=state.generator, device=acc.device)[:k])
        return Selection(sample_indices(n, k, state.next_key(), acc.device))


ROUNDS = 6  # of the Feistel network; four make it pseudo-random (Luby and Rackoff 1988)


def sample_indices(n: int, k: int, key: int, device: torch.device) -> Tensor:
    """(k,) distinct indices below n, pseudo-random; different for every key. No host synchronisation. A
    Feistel network permutes a grid of a x b >= n points, with a b - n < a = ceil(sqrt n): of the images of
    the first k + (a b - n) points at least k lie below n; the first k of those are the sample.
    """
    a = math.isqrt(n - 1) + 1 if n else 1
    b = -(-n // a)
    points = torch.arange(min(n, k) + a * b - n, device=device)
    left, right = points // b, points % b
    for turn in range(ROUNDS):
        # Alternately each half is moved by a hash of the other: invertible, whatever the hash.
        left = (left + hash_31_bits(right, mix_bits(key + 2 * turn))) % a
        right = (right + hash_31_bits(left, mix_bits(key + 2 * turn + 1))) % b
    images = left * b + right
    inside = images < n
    slots = torch.where(inside, inside.cumsum(0) - 1, k).clamp_(max=k)
    return torch.empty(k + 1, dtype=torch.int64, device=device).scatter_(0, slots, images)[:k]


def hash_31_bits(numbers: Tensor, key: int) -> Tensor:
    """(m,) int64 -> (m,) pseudo-random numbers of 31 bits."""
    x = (numbers ^ (key & 0x7FFFFFFF)) * (key >> 32 | 1) & 0x7FFFFFFF
    x = (x ^ x >> 15) * 0x2C1B3C6D & 0x7FFFFFFF
    x = (x ^ x >> 12) * 0x297A2D39 & 0x7FFFFFFF
    return x ^ x >> 15


@dataclass(frozen=True)
class BlockRandomK(ExactlyKSelector):
    """k consecutive elements from a random start. Eghlidi and Jaggi 2020, section 3.

    Args:
        shared: all workers start at the same place (from a shared seed).
        aligned: starts are multiples of k, and the last n mod k elements are never chosen, as in mlbench's
            code; else any element can be the start and the block wraps around the end, as in PowerSGD's code.
            The paper leaves it open.
    """

    shared: bool = False
    aligned: bool = False

    def init(self, like: Tensor, context: BucketContext) -> DrawCounter:
        return DrawCounter(context.shared if self.shared else context)

    def select(self, acc: Tensor, k: int, comm: Comm, state: DrawCounter) -> Selection:
        n = acc.numel()
        check_k(k, n)
        start = state.next_key() % (n // k) * k if self.aligned else state.next_key() % n
        # The indices stay consecutive (modulo n): AllGatherBlocks relies on it.
        return Selection(torch.arange(start, start + k, device=acc.device) % n)


@dataclass
class IndexCache:
    """0 to k - 1, made once for the largest k."""

    indices: Tensor = field(metadata={"saved": False})  # (k,)


@dataclass(frozen=True)
class FirstK(ExactlyKSelector):
    """The first k. It looks at nothing and computes nothing: a control for what the harness itself costs."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> IndexCache:
        return IndexCache(torch.empty(0, dtype=torch.int64, device=like.device))

    def select(self, acc: Tensor, k: int, comm: Comm, state: IndexCache) -> Selection:
        check_k(k, acc.numel())
        if len(state.indices) < k:
            state.indices = torch.arange(k, device=acc.device)
        return Selection(state.indices[:k])


@dataclass(frozen=True)
class Union(Selector):
    """The union of all workers' choices: each worker selects its own, and indices are all-gathered.

    The `index-union` of kljp's code (DEFT, MiCRO, ExDyna) and of Accordion. Indices travel as int32 where
    that suffices (theirs: int64), padded to the longest list as there.
    """

    own: Selector
    shared: ClassVar[bool] = True

    def broken_laws(self) -> dict[str, str]:
        return self.own.broken_laws()

    def init(self, like: Tensor, context: BucketContext) -> Any:
        return self.own.init(like, context)

    def select(self, acc: Tensor, k: int, comm: Comm, state: Any) -> Selection:
        chosen = self.own.select(acc, k, comm, state).indices
        gathered = gather_uneven(comm, chosen.to(index_dtype(acc.numel())))
        host_sync.count_sync()  # for the size of the union
        return Selection(torch.unique(torch.cat(gathered)))


# ExclusiveIndices choices: each worker selects in its own part, so that no index is chosen twice. What DEFT, MiCRO
# and ExDyna share; facts from their public code (kljp/deft, kljp/micro, kljp/exdyna).


def split_evenly(n: int, size: int) -> list[int]:
    """n as a sum of `size` numbers that differ by at most 1, larger ones first."""
    return [n // size + (at < n % size) for at in range(size)]


class ExclusiveIndices(NamedTuple):
    """The choices of all workers, worker by worker."""

    indices: Tensor  # (k',) distinct; alike on all workers
    counts: list[int]  # of each worker


def gather_exclusive_indices(comm: Comm, chosen: Tensor, n: int) -> ExclusiveIndices:
    """Union of choices that do not overlap: nothing to sort. Indices travel as in `Union`. One host
    synchronisation.
    """
    gathered = gather_uneven(comm, chosen.to(index_dtype(n)))
    return ExclusiveIndices(torch.cat(gathered), [len(indices) for indices in gathered])


def predict_union_bytes(bucket_step: BucketStep) -> PredictedBytes:
    """Bytes of `gather_exclusive_indices`: lists of indices, padded to the longest."""
    (together,) = set(bucket_step.sent_counts)
    longest = (
        (-(-together // bucket_step.world_size), together)
        if bucket_step.max_chosen is None
        else (bucket_step.max_chosen, bucket_step.max_chosen)
    )
    least, most = (
        cost.gather_uneven(bucket_step.index_nbytes * count, bucket_step.world_size) for count in longest
    )
    return bytes_between([least], [most])


# What selectors share that compare magnitudes with a threshold. Plain operators take the magnitudes once,
# and compare them with one threshold after the other, as published code does. The other kernels compare
# while they read, so nothing is taken beforehand.


def compute_magnitudes(acc: Tensor, workspace: Workspace) -> Tensor:
    """(n,) -> (n,): |acc|, in a buffer."""
    return torch.abs(acc, out=workspace.buffer("magnitudes"))


def mask_buffer(workspace: Workspace) -> Tensor:
    """(n,) bool, a buffer."""
    return workspace.buffer("mask", torch.bool)


def prepare_magnitudes(acc: Tensor, workspace: Workspace) -> None:
    """Take magnitudes, before one or several calls of `select:reaching` with this acc."""
    if isinstance(workspace.kernel, TorchKernel):
        compute_magnitudes(acc, workspace)


def select_above_threshold(
    acc: Tensor, threshold: Tensor | float, workspace: Workspace, strict: bool = False
) -> Selection:
    """Indices where |acc| >= threshold (> if strict), ascending; after `select:prepare`. One host sync."""
    if isinstance(workspace.kernel, TorchKernel):
        compare = torch.gt if strict else torch.ge
        mask = compare(workspace.buffer("magnitudes"), threshold, out=mask_buffer(workspace))
        return Selection(host_sync.nonzero(mask))
    return Selection(*workspace.kernel.above_threshold(acc, None, threshold, strict))
