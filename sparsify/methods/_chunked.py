"""Top-k within chunks: a selector, and an exchange that sends places inside chunks and few bits a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.checks import check_k
from sparsify.core.chunks import SIDE, ChunkLayout
from sparsify.core.codes import SCALE, VALUE_CODES, TensorSegments, ValueCode
from sparsify.core.packing import pack_places, packed_places_nbytes, unpack_places
from sparsify.core.wire import concat_bytes, split_bytes
from sparsify.exchange import Exchange
from sparsify.kernels import native_unavailable_reason
from sparsify.kernels.native_chunks import NativeChunkSearch
from sparsify.kernels.native_codes import NativeStatistical2
from sparsify.ranges import AverageOver, ChunkSide, CodeName
from sparsify.select import FixedCountSelector, SinglePassSelector
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    BucketStep,
    CollectiveCall,
    Delivery,
    GroupSelection,
    MethodPart,
    Selection,
    SparseVector,
)


def make_chunk_layout(like: Tensor, context: BucketContext, side: int) -> ChunkLayout:
    """Cut a bucket like this tensor into chunks. A bucket whose shapes are unknown is one vector."""
    return ChunkLayout(context.shapes or (tuple(like.shape),), side, like.device)


@dataclass(init=False)
class ChunkSearchState:
    """The chunks of a bucket, and the native searches of it, if they work here; else torch's operators do.

    No checkpoint saves them: none is a field.
    """

    def __init__(self, layout: ChunkLayout, native: NativeChunkSearch | None) -> None:
        self.layout = layout
        self.native = native
        # Of the group of buckets that begins with this one.
        self.group_native: NativeChunkSearch | None = None


@dataclass(init=False)
class ChunkGatherState:
    """The chunks of a bucket, and what is made from them when it is first needed.

    No checkpoint saves them: none is a field.
    """

    def __init__(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self.tensor_segments: TensorSegments | None = None  # of the last k
        self.num_senders_by_element: Tensor | None = None  # (n,) int16, 0 between steps
        # Of the group of buckets that begins with this one.
        self.group_state: ChunkGatherState | None = None


OfLayout = TypeVar("OfLayout", NativeChunkSearch, ChunkGatherState)


def reuse_or_make_joint(
    cached: OfLayout | None,
    states: Sequence[ChunkSearchState | ChunkGatherState],
    make: Callable[[ChunkLayout], OfLayout],
) -> OfLayout:
    """Make what several buckets that follow each other need from their joint chunks.

    Return `cached` if it has the same chunks.
    """
    layouts = [state.layout for state in states]
    shapes = tuple(shape for layout in layouts for shape in layout.shapes)
    tensors_per_bucket = tuple(len(layout.shapes) for layout in layouts)
    if cached and (cached.layout.shapes, cached.layout.tensors_per_bucket) == (shapes, tensors_per_bucket):
        return cached
    return make(ChunkLayout(shapes, layouts[0].side, layouts[0].device, tensors_per_bucket))


@dataclass(frozen=True)
class ChunkTopK(SinglePassSelector, FixedCountSelector):
    """A selector of the largest magnitudes of each chunk of each tensor.

    SparseLoCo, arXiv:2508.15706, section 3; DeMo, arXiv:2411.19870, takes them of a transform. Of a chunk its
    share of k is chosen, at least one element (`sparsify.core.chunks.num_chosen_of_chunk`): 64 of 4096 at
    density 1/64. Deviation: the published code names a number, 64, for chunks of every size. Vectors, whose
    chunks have at most 64 elements, would be sent whole.

    Args:
        side: the most that a side of a chunk may have; 64 in SparseLoCo.
    """

    side: ChunkSide = SIDE

    def init(self, like: Tensor, context: BucketContext) -> ChunkSearchState:
        layout = make_chunk_layout(like, context, self.side)
        is_native = context.select != "torch" and like.is_cpu and not native_unavailable_reason()
        return ChunkSearchState(layout, NativeChunkSearch(layout) if is_native else None)

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: ChunkSearchState
    ) -> Selection:
        check_k(k, acc.numel())
        if state.native is not None:
            chosen = state.native.try_accumulate_and_select([acc], [] if grad is None else [grad], [k])
            if chosen is not None:
                return Selection(chosen.indices.long(), chosen.values)
        return Selection(*state.layout.select_largest(acc if grad is None else acc.add_(grad), k))

    def try_accumulate_and_select_group(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor],
        ks: Sequence[int],
        states: Sequence[ChunkSearchState],
        weight: float,
        reset_grads_to: Sequence[Tensor] = (),
    ) -> GroupSelection | None:
        first = states[0]
        if first.native is None:
            return None
        search = first.group_native = reuse_or_make_joint(first.group_native, states, NativeChunkSearch)
        selection = search.try_accumulate_and_select(accs, grads, ks, weight, reset_grads_to)
        return None if selection is None else GroupSelection(selection, search.layout.counts_by_bucket(ks))


class ReceivedSelection(NamedTuple):
    """A worker's selection, as all workers read it in its message."""

    selection: SparseVector
    norms: Tensor  # (T,) of the values of each tensor; empty unless the exchange clips


@dataclass(frozen=True)
class ChunkGather(Exchange):
    """An all-gather of the selections of `ChunkTopK`, in one message: coded values, and places in chunks.

    A place inside a chunk takes 12 bits. Chunks are not named, for all workers have the same ones, and choose
    as many of each. The total is taken in the order of ranks, so that all workers get the same bits.

    64 of 4096 elements with 2 bits each are 112 bytes a chunk. To that come, for each tensor of the bucket,
    the scales of the code: 4 bytes with `int8` and `e3m0`, 8 with `symmetric2`, 16 with `statistical2`, none
    with plain numbers; and 4 bytes with `clip`. What rounding takes away stays in the residual.

    Args:
        code: how values travel, see `sparsify.core.codes`: `as_is`, `fp32` or `bf16`; in 8 bits (`int8`), 4
            (`e3m0`) or 2 (`symmetric2`, and SparseLoCo's own `statistical2`). Fewer bits: fewer bytes, more
            rounding.
        average: over all `workers`, as algorithm 1 of SparseLoCo divides; or, for each element, over the
            `senders`: those that sent it, as the code of its live run does (tplr-ai/templar, which takes
            scatter_reduce's mean; here in a fixed order). That takes 2 bytes of memory for each of n.
        clip: each worker's values of a tensor are scaled down to the median norm over the workers, the lower
            one of an even number, as in templar. Each worker sends its norms, so all decide alike.
        side: of the selector's chunks.
    """

    supports_groups: ClassVar[bool] = True

    code: CodeName = "symmetric2"
    average: AverageOver = "workers"
    clip: bool = False
    side: ChunkSide = SIDE

    @property
    def needs_equal_counts(self) -> bool:
        return True

    def why_incompatible(self, selector: MethodPart) -> str | None:
        if isinstance(selector, ChunkTopK) and selector.side == self.side:
            return None
        return (
            f"ChunkGather sends places in chunks whose sides are at most {self.side}, so that is what has to "
            f"be chosen, but it was given {selector!r}; take ChunkTopK(side={self.side}), or AllGather"
        )

    def broken_laws(self) -> dict[str, str]:
        broken = dict[str, str]()
        if not self._value_code.is_exact:
            broken[DENSE_AT_DENSITY_1] = f"values are rounded to {self.code}"
        if self.average == "senders":
            broken[NOTHING_IS_LOST] = "an element that few workers sent counts as if all had sent it"
        if self.clip:
            clipped = "what is cut off at the median norm is neither applied nor kept"
            broken |= {NOTHING_IS_LOST: clipped, DENSE_AT_DENSITY_1: clipped}
        return broken

    def init(self, like: Tensor, context: BucketContext) -> ChunkGatherState:
        return ChunkGatherState(make_chunk_layout(like, context, self.side))

    def exchange(
        self, selection: SparseVector, n: int, k: int, comm: Comm, state: ChunkGatherState
    ) -> Delivery:
        return self._exchange(selection, n, [k], comm, state)

    def exchange_group(
        self,
        selection: SparseVector,
        n: int,
        ks: Sequence[int],
        comm: Comm,
        states: Sequence[ChunkGatherState],
    ) -> Delivery:
        first = states[0]
        group_state = first.group_state = reuse_or_make_joint(first.group_state, states, ChunkGatherState)
        return self._exchange(selection, n, ks, comm, group_state)

    def _exchange(
        self, selection: SparseVector, n: int, ks: Sequence[int], comm: Comm, state: ChunkGatherState
    ) -> Delivery:
        """Exchange a selection, of the only bucket or of a group."""
        layout = state.layout
        quota = layout.quota(ks)
        if len(selection.indices) != quota.total:
            raise ValueError(
                f"{len(selection.indices)} elements were chosen, and chunks of at most {self.side} x "
                f"{self.side} have {quota.total} for k={sum(ks)} of {n}; choose them by "
                f"ChunkTopK(side={self.side})"
            )
        segments = state.tensor_segments
        if segments is None or segments.counts != quota.counts:
            segments = state.tensor_segments = TensorSegments.from_counts(quota.counts, selection.values)
        # 1. Code the values, and read them as receivers will: that is what this worker delivers.
        coded = self._value_code.encode(selection.values, segments)
        values = self._value_code.decode(coded, segments, selection.values.dtype)
        delivered = SparseVector(selection.indices, values)
        norms = values.new_empty(0, dtype=SCALE)
        if self.clip:
            norms = segments.sum_by_tensor(values.double().square()).sqrt_().to(SCALE)
        # 2. Gather the messages of all workers: norms, values and places.
        message = concat_bytes(norms, coded, pack_places(layout.indices_to_places(selection.indices, ks)))
        received = [
            ReceivedSelection(delivered, norms)
            if rank == comm.rank
            else self._read_message(their_message, ks, selection, layout, segments)
            for rank, their_message in enumerate(comm.all_gather(message))
        ]
        # 3. Weigh what each worker sent.
        total = [selection for selection, _ in received]
        if self.clip:
            total = self._clip_to_median_norm(received, segments)
        if self.average == "senders":
            total = self._average_over_senders(total, n, state)
        return Delivery([*total], [delivered])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        # All workers choose as many. Only the number counts, whichever tensors they are of.
        counts = [max(bucket_step.sent_counts), *[0] * (len(bucket_step.shapes) - 1)]
        return [CollectiveCall("all_gather", sum(self._field_nbytes(counts, bucket_step.value_dtype)))]

    @property
    def _value_code(self) -> ValueCode:
        """The code that `code` names."""
        if self.code == "statistical2" and not native_unavailable_reason():
            return NativeStatistical2()
        return VALUE_CODES[self.code]

    def _field_nbytes(self, counts: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int]:
        """Return the bytes of norms, of coded values, and of places, given the value counts of tensors."""
        norms_nbytes = SCALE.itemsize * len(counts) if self.clip else 0
        return norms_nbytes, self._value_code.nbytes(counts, dtype), packed_places_nbytes(sum(counts))

    def _read_message(
        self,
        message: Tensor,
        ks: Sequence[int],
        like: SparseVector,
        layout: ChunkLayout,
        segments: TensorSegments,
    ) -> ReceivedSelection:
        """Read a message of elements of the same types as `like`."""
        dtype = like.values.dtype
        norms_nbytes, coded_nbytes, places_nbytes = self._field_nbytes(segments.counts, dtype)
        norms, coded, places = split_bytes(
            message,
            (SCALE, norms_nbytes // SCALE.itemsize),
            (torch.uint8, coded_nbytes),
            (torch.uint8, places_nbytes),
        )
        indices = layout.places_to_indices(unpack_places(places, len(segments.tensors)), ks).to(
            like.indices.dtype
        )
        values = self._value_code.decode(coded, segments, dtype)
        return ReceivedSelection(SparseVector(indices, values), norms)

    def _clip_to_median_norm(
        self, received: Sequence[ReceivedSelection], segments: TensorSegments
    ) -> list[SparseVector]:
        """Scale down each worker's values of each tensor to the median norm over the workers.

        A worker whose norm is not finite gets NaN or zeros, and moves no one else's limit.
        """
        norms = torch.stack([worker_norms for _, worker_norms in received])  # (P, T)
        limits = norms.nanmedian(dim=0).values
        factors = torch.where(norms > limits, limits / norms, torch.ones_like(norms))
        factors = torch.where(norms.isnan(), norms, factors)
        return [
            SparseVector(indices, values * segments.repeat_by_tensor(worker_factors.to(values.dtype)))
            for ((indices, values), _), worker_factors in zip(received, factors, strict=True)
        ]

    def _average_over_senders(
        self, total: Sequence[SparseVector], n: int, state: ChunkGatherState
    ) -> list[SparseVector]:
        """Multiply each value by P and divide it by the number of workers that sent its element.

        The method divides by P afterwards.
        """
        if state.num_senders_by_element is None:
            state.num_senders_by_element = torch.zeros(n, dtype=torch.int16, device=total[0].values.device)
        counts = state.num_senders_by_element
        ones = torch.ones_like(total[0].indices, dtype=torch.int16)
        for indices, _ in total:
            counts.index_add_(0, indices, ones)
        averaged = [
            SparseVector(indices, values * len(total) / counts.index_select(0, indices).to(values.dtype))
            for indices, values in total
        ]
        for indices, _ in total:
            counts.index_fill_(0, indices.long(), 0)
        return averaged
