"""Top-k within chunks: a selector, and an exchange that sends places inside chunks and few bits a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.checks import check_k
from sparsify.core.chunks import SIDE, ChunkLayout
from sparsify.core.codes import SCALE, TensorMembership, ValueCode, get_value_code
from sparsify.core.packing import pack_places, packed_places_nbytes, unpack_places
from sparsify.core.wire import concat_bytes, split_bytes
from sparsify.exchange import Exchange
from sparsify.kernels import native_unavailable_reason
from sparsify.kernels.native_chunks import NativeChunkSearch
from sparsify.kernels.native_codes import NativeStatistical2
from sparsify.ranges import AverageOver, ChunkSide, CodeName
from sparsify.select import ExactlyKSelector, SinglePassSelector
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    BucketStep,
    CollectiveCall,
    Delivery,
    MethodPart,
    Selection,
    SparseVector,
)


@dataclass
class Tiled:
    """The chunks of a bucket, which follow from its shapes."""

    tiles: ChunkLayout = field(metadata={"saved": False})

    @classmethod
    def like(cls, like: Tensor, context: BucketContext, side: int) -> Tiled:
        """Those of a bucket like this one; where its shapes are unknown, of one vector."""
        return cls(ChunkLayout(context.shapes or (tuple(like.shape),), side, like.device))

    @staticmethod
    def together(states: Sequence[Tiled], kept: ChunkLayout | None) -> ChunkLayout:
        """The chunks of several buckets that follow each other: those that were kept, if they are these."""
        each = [state.tiles for state in states]
        shapes = tuple(shape for tiles in each for shape in tiles.shapes)
        buckets = tuple(len(tiles.shapes) for tiles in each)
        if kept is not None and (kept.shapes, kept.tensors_per_bucket) == (shapes, buckets):
            return kept
        return ChunkLayout(shapes, each[0].side, each[0].device, buckets)


@dataclass
class SearchState(Tiled):
    """The chunks, and what searches them on CPUs, where it works; else torch's operators do."""

    native: NativeChunkSearch | None = field(default=None, metadata={"saved": False})
    joint: NativeChunkSearch | None = field(default=None, metadata={"saved": False})  # from this bucket on


@dataclass(frozen=True)
class ChunkTopK(SinglePassSelector, ExactlyKSelector):
    """The largest magnitudes of each chunk of each tensor. SparseLoCo, arXiv:2508.15706, section 3; DeMo,
    arXiv:2411.19870, takes them of a transform.

    Of a chunk its share of k is chosen, at least one element (`sparsify.core.chunks.num_chosen_of_chunk`): 64 of
    4096 at density 1/64. Deviation: the published code names a number, 64, for chunks of every size. Vectors,
    whose chunks have at most 64 elements, would be sent whole.

    Args:
        side: the most that a side of a chunk may have; 64 in SparseLoCo.
    """

    side: ChunkSide = SIDE

    def init(self, like: Tensor, context: BucketContext) -> SearchState:
        tiles = Tiled.like(like, context, self.side).tiles
        is_native = context.select != "torch" and like.is_cpu and not native_unavailable_reason()
        return SearchState(tiles, NativeChunkSearch(tiles) if is_native else None)

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: SearchState
    ) -> Selection:
        check_k(k, acc.numel())
        if state.native is not None:
            found = state.native.select_largest([acc], [] if grad is None else [grad], [k])
            if found is not None:
                return Selection(found.indices.long(), found.values)
        return Selection(*state.tiles.select_largest(acc if grad is None else acc.add_(grad), k))

    def search_group(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor],
        ks: Sequence[int],
        states: Sequence[SearchState],
        weight: float,
        anchors: Sequence[Tensor] = (),
    ) -> tuple[SparseVector, list[int]] | None:
        first = states[0]
        if first.native is None:
            return None
        tiles = Tiled.together(states, None if first.joint is None else first.joint.layout)
        if first.joint is None or first.joint.layout is not tiles:
            first.joint = NativeChunkSearch(tiles)
        found = first.joint.select_largest(accs, grads, ks, weight, anchors)
        return None if found is None else (found, tiles.counts_by_bucket(ks))


class Received(NamedTuple):
    """A worker's message, as all workers read it."""

    part: SparseVector
    norms: Tensor | None  # (T,) of the values of each tensor, where they travel


@dataclass
class GatherState(Tiled):
    """The chunks, and what is made from them when it is first needed."""

    parts: TensorMembership | None = field(default=None, metadata={"saved": False})  # of the last k
    senders: Tensor | None = field(default=None, metadata={"saved": False})  # (n,) int16, 0 between steps
    joint: GatherState | None = field(default=None, metadata={"saved": False})  # of buckets from this one on


@dataclass(frozen=True)
class ChunkGather(Exchange):
    """All-gather of what `ChunkTopK` chose, in one message: a place inside the chunk, of 12 bits, and a coded
    value for each element. Chunks are not named, for all workers have the same ones, and choose as many of
    each. The total is taken in the order of ranks, so that all workers get the same bits.

    64 of 4096 elements with 2 bits each are 112 bytes a chunk. To that come, for each tensor of the bucket,
    the scales of the code: 4 bytes with `int8` and `e3m0`, 8 with `symmetric2`, 16 with `statistical2`, none
    with plain numbers; and 4 bytes with `clip`. What rounding takes away stays in the residual.

    Args:
        code: how values travel, see `sparsify.core.codes`: `as_is`, `fp32` or `bf16`; in 8 bits (`int8`), 4
            (`e3m0`) or 2 (`symmetric2`, and SparseLoCo's own `statistical2`).
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

    def why_incompatible(self, select: MethodPart) -> str | None:
        if isinstance(select, ChunkTopK) and select.side == self.side:
            return None
        return (
            f"ChunkGather sends places in chunks whose sides are at most {self.side}, so that is what has to "
            f"be chosen, but it was given {select!r}; take ChunkTopK(side={self.side}), or AllGather"
        )

    def broken_laws(self) -> dict[str, str]:
        broken = dict[str, str]()
        if not self._code.is_exact:
            broken[DENSE_AT_DENSITY_1] = f"values are rounded to {self.code}"
        if self.average == "senders":
            broken[NOTHING_IS_LOST] = "an element that few workers sent counts as if all had sent it"
        if self.clip:
            clipped = "what is cut off at the median norm is neither applied nor kept"
            broken |= {NOTHING_IS_LOST: clipped, DENSE_AT_DENSITY_1: clipped}
        return broken

    def init(self, like: Tensor, context: BucketContext) -> GatherState:
        return GatherState(Tiled.like(like, context, self.side).tiles)

    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: GatherState) -> Delivery:
        return self._exchange(part, n, [k], comm, state)

    def exchange_group(
        self, part: SparseVector, n: int, ks: Sequence[int], comm: Comm, states: Sequence[GatherState]
    ) -> Delivery:
        first = states[0]
        tiles = Tiled.together(states, None if first.joint is None else first.joint.tiles)
        if first.joint is None or first.joint.tiles is not tiles:
            first.joint = GatherState(tiles)
        return self._exchange(part, n, ks, comm, first.joint)

    def _exchange(
        self, part: SparseVector, n: int, ks: Sequence[int], comm: Comm, state: GatherState
    ) -> Delivery:
        tiles, dtype = state.tiles, part.values.dtype
        if len(part.indices) != tiles.quota(ks).total:
            raise ValueError(
                f"{len(part.indices)} elements were chosen, and chunks of at most {self.side} x {self.side} "
                f"have {tiles.quota(ks).total} for k={sum(ks)} of {n}; choose them by "
                f"ChunkTopK(side={self.side})"
            )
        if state.parts is None or state.parts.counts != tiles.counts_by_tensor(ks):
            state.parts = TensorMembership.from_counts(tiles.counts_by_tensor(ks), part.values)
        coded = self._code.encode(part.values, state.parts)
        mine = SparseVector(part.indices, self._code.decode(coded, state.parts, dtype))
        norms = (
            [state.parts.sum_by_tensor(mine.values.double().square()).sqrt_().to(SCALE)] if self.clip else []
        )
        message = concat_bytes(*norms, coded, pack_places(tiles.to_places(part.indices, ks)))
        received = [
            Received(mine, norms[0] if norms else None)
            if rank == comm.rank
            else self._read(theirs, ks, part, tiles, state.parts)
            for rank, theirs in enumerate(comm.all_gather(message))
        ]
        total = self._clipped(received, state.parts) if self.clip else [one.part for one in received]
        if self.average == "senders":
            self._weigh(total, n, state)
        return Delivery([*total], [mine])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        # All workers choose as many; it is the number alone that counts, whichever tensors they are of.
        counts = [max(bucket_step.sent_counts), *[0] * (len(bucket_step.shapes) - 1)]
        return [CollectiveCall("all_gather", sum(self._fields(counts, bucket_step.value_dtype)))]

    @property
    def _code(self) -> ValueCode:
        if self.code == "statistical2" and not native_unavailable_reason():
            return NativeStatistical2()
        return get_value_code(self.code)

    def _fields(self, counts: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int]:
        """Bytes of norms, of coded values, and of places."""
        norms = SCALE.itemsize * len(counts) if self.clip else 0
        return norms, self._code.nbytes(counts, dtype), packed_places_nbytes(sum(counts))

    def _read(
        self,
        message: Tensor,
        ks: Sequence[int],
        mine: SparseVector,
        tiles: ChunkLayout,
        parts: TensorMembership,
    ) -> Received:
        """A message of elements of the same types as `mine`."""
        dtype = mine.values.dtype
        sizes = self._fields(parts.counts, dtype)
        kinds = (SCALE, sizes[0] // SCALE.itemsize), (torch.uint8, sizes[1]), (torch.uint8, sizes[2])
        norms, coded, places = split_bytes(message, *kinds)
        indices = tiles.to_indices(unpack_places(places, len(parts.tensors)), ks).to(mine.indices.dtype)
        values = self._code.decode(coded, parts, dtype)
        return Received(SparseVector(indices, values), norms if self.clip else None)

    def _clipped(self, received: Sequence[Received], parts: TensorMembership) -> list[SparseVector]:
        """What each worker sent, tensor by tensor scaled down to the median norm. A worker whose norm is not
        finite gets NaN or zeros, and moves no one else's limit.
        """
        norms = torch.stack([one.norms for one in received if one.norms is not None])  # (P, T)
        limits = norms.nanmedian(dim=0).values
        factors = torch.where(norms > limits, limits / norms, torch.ones_like(norms))
        factors = torch.where(norms.isnan(), norms, factors)
        return [
            SparseVector(indices, values * parts.repeat_by_tensor(own.to(values.dtype)))
            for ((indices, values), _), own in zip(received, factors, strict=True)
        ]

    def _weigh(self, total: list[SparseVector], n: int, state: GatherState) -> None:
        """Multiply each value by P and divide it by the number of workers that sent its element: the method
        divides by P.
        """
        if state.senders is None:
            state.senders = torch.zeros(n, dtype=torch.int16, device=total[0].values.device)
        senders, one = state.senders, torch.ones_like(total[0].indices, dtype=torch.int16)
        for part in total:
            senders.index_add_(0, part.indices, one)
        total[:] = [
            SparseVector(indices, values * len(total) / senders.index_select(0, indices).to(values.dtype))
            for indices, values in total
        ]
        for part in total:
            senders.index_fill_(0, part.indices.long(), 0)
