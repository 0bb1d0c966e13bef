"""Replays of exchanges from selections alone, for more workers than have room for a model.

One process holds the selections of all workers, and computes which collectives the exchange would call with
how many bytes: to the byte, as `CountingComm` counts them. Where numbers of elements determine them, they
come from `MethodPart.collective_calls`; other exchanges have a function in this module. Memory: two buffers
of n elements, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify import cost
from sparsify.core.wire import Wire
from sparsify.cost import LENGTH_BYTES, Network
from sparsify.exchange import Exchange, differences, even_borders
from sparsify.method import Dense, Method, Sparsifier
from sparsify.methods.oktopk import (
    RENEWAL_RATIO,
    RegionState,
    ReusedThreshold,
    SplitReduceBalance,
    index_quantiles,
    minimum_or_tiny,
)
from sparsify.methods.sparcml import SplitAllGather
from sparsify.select import Selector
from sparsify.types import BucketContext, BucketStep, CollectiveCall, MethodPart, SparseVector, num_selected

DTYPE = torch.float32  # of gradients
Selections = Sequence[SparseVector]  # of each worker, by rank; may compute an item when it is read


class ReplayedCollective(NamedTuple):
    """A collective that all workers call, with the bytes of each worker."""

    kind: str  # as in `sparsify.cost.TEXTBOOK`
    input_bytes: list[int]  # of the tensor that each worker brings; of all_to_all, bytes for other workers
    route: Sequence[tuple[int, int]] | None = None  # (source, destination) pairs of permute

    def costs(self) -> list[cost.CollectiveCost]:
        """Return the cost for each worker, as the communicator counts it."""
        size = len(self.input_bytes)
        return [CollectiveCall(self.kind, nbytes, self.route).cost(size) for nbytes in self.input_bytes]

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each worker sends."""
        return [worker_cost.sent_bytes for worker_cost in self.costs()]

    def simulated_seconds(self, network: Network) -> float:
        """Return the seconds until the last worker has received everything."""
        nbytes = max(self.input_bytes)
        if self.route is not None:
            return network.permute_seconds(nbytes, self.route)
        return network.collective_seconds(self.kind, nbytes, len(self.input_bytes))


@dataclass(frozen=True)
class BucketTraffic:
    """The collectives of one bucket in one step, and their bytes, messages and seconds."""

    world_size: int
    collectives: list[ReplayedCollective]

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each worker sends."""
        columns = [collective.sent_bytes for collective in self.collectives]
        return [sum(numbers) for numbers in zip(*columns, strict=True)] or [0] * self.world_size

    @property
    def messages(self) -> int:
        """The number of latency terms, one after the other."""
        return sum(collective.costs()[0].messages for collective in self.collectives)

    def simulated_seconds(self, network: Network) -> float:
        """Return the simulated seconds by the alpha-beta model, as virtual ranks are charged them."""
        return sum(collective.simulated_seconds(network) for collective in self.collectives)


class ExchangeReplay:
    """A replay of a method's exchange of one bucket over many workers, step by step.

    Raises:
        ValueError: the method can't be replayed.
    """

    def __init__(self, method: Method, n: int, world_size: int) -> None:
        check_replayable(method)
        self.method: Any = method
        self.n = n
        self.world_size = world_size
        self.step = 0
        self.state = None
        if isinstance(self.method, Sparsifier):
            self.state = self.method.exchange.init(
                torch.empty(0, dtype=DTYPE, device="cpu"), BucketContext(0, 0, 0)
            )

    def replay_step(self, selections: Selections, k: int | None = None) -> BucketTraffic:
        """Replay one step.

        Args:
            selections: with int32 or int64 indices.
            k: the number of elements that were to be selected; by default of the method's density.
        """
        k = num_selected(self.n, self.method.density_at(10**9)) if k is None else k
        if isinstance(self.method, Dense):
            collectives = [_uniform_collective("all_reduce", self.n * DTYPE.itemsize, self.world_size)]
        else:
            bucket_step = BucketStep(((self.n,),), k, DTYPE, self.world_size, self.step, [])
            collectives = [
                *_selector_collectives(self.method.select, bucket_step),
                *_exchange_collectives(self.method.exchange, selections, bucket_step, self.state),
            ]
        self.step += 1
        return BucketTraffic(self.world_size, collectives)


def check_replayable(method: Method) -> None:
    """Refuse a method that exchanges no selections. Vectors are not treated specially."""
    if not isinstance(method, Sparsifier | Dense):
        raise ValueError(f"{method!r} exchanges no selections, so there is none to replay")


def _uniform_collective(kind: str, nbytes: int, world_size: int) -> ReplayedCollective:
    """Return a collective to which all workers bring the same number of bytes."""
    return ReplayedCollective(kind, [nbytes] * world_size)


def _part_collectives(part: MethodPart, bucket_step: BucketStep) -> list[ReplayedCollective]:
    """Return the collectives of a part of a method that numbers of elements determine."""
    return [
        ReplayedCollective(call.kind, [call.nbytes] * bucket_step.world_size, route=call.route)
        for call in part.collective_calls(bucket_step)
    ]


def _selector_collectives(selector: Selector, bucket_step: BucketStep) -> list[ReplayedCollective]:
    """Return the collectives by which workers agree upon a shared selection."""
    if type(selector).predict_bytes is not MethodPart.predict_bytes:
        raise ValueError(
            f"{type(selector).__name__} chooses by what the gradient holds: it can't be replayed"
        )
    return _part_collectives(selector, bucket_step)


def _exchange_collectives(
    exchange: Exchange, selections: Selections, bucket_step: BucketStep, state: Any
) -> list[ReplayedCollective]:
    """Return the collectives of one exchange."""
    match exchange:
        case SplitAllGather():
            return _replay_split_all_gather(exchange, selections, bucket_step)
        case SplitReduceBalance():
            return _replay_split_reduce_balance(exchange, selections, bucket_step, state)
    if type(exchange).collective_calls is MethodPart.collective_calls:
        raise ValueError(f"{type(exchange).__name__} can't be replayed: it has no function here")
    counts = _count_sent_elements(exchange, selections, bucket_step)
    return _part_collectives(exchange, bucket_step._replace(sent_counts=counts))


def _count_sent_elements(exchange: Exchange, selections: Selections, bucket_step: BucketStep) -> list[int]:
    """Return the number of elements that each worker sends, reading no more selections than needed."""
    if exchange.needs_equal_counts:
        return [bucket_step.k] * bucket_step.world_size
    if exchange.needs_shared_indices:
        return [selections[0].indices.numel()] * bucket_step.world_size
    return [selection.indices.numel() for selection in selections]


def _replay_split_all_gather(
    exchange: SplitAllGather, selections: Selections, bucket_step: BucketStep
) -> list[ReplayedCollective]:
    """Return the collectives of SparCML."""
    size = bucket_step.world_size
    borders = even_borders(bucket_step.n, size)
    collectives, reduced = _replay_split_and_reduce(exchange.wire, selections, borders, bucket_step)
    counts = _count_by_region(reduced.indices, borders)
    collectives.append(_uniform_collective("all_gather", LENGTH_BYTES, size))
    if exchange.is_dense(counts, bucket_step.n, bucket_step.dtype):
        region_nbytes = max(differences(borders)) * exchange.wire.value_dtype(bucket_step.dtype).itemsize
        return [*collectives, _uniform_collective("all_gather", region_nbytes, size)]
    return [*collectives, *_gather_collectives(exchange.wire, counts, bucket_step)]


def _replay_split_reduce_balance(
    exchange: SplitReduceBalance, selections: Selections, bucket_step: BucketStep, state: RegionState
) -> list[ReplayedCollective]:
    """Return the collectives of Ok-Topk, whose borders and global threshold serve several steps."""
    size = bucket_step.world_size
    collectives = list[ReplayedCollective]()
    if state.step % exchange.regions_every == 0:
        state.borders = _mean_quantile_borders(selections, bucket_step.n)
        if size > 1:
            collectives.append(_uniform_collective("all_gather", LENGTH_BYTES * (size - 1), size))
    state.step += 1
    split, reduced = _replay_split_and_reduce(exchange.wire, selections, state.borders, bucket_step)
    kept, agreement = _replay_threshold(exchange, reduced, bucket_step.k, state.threshold, state.borders)
    counts = _count_by_region(kept, state.borders)
    collectives += [*split, *agreement]
    if exchange.balance:
        collectives.append(_rebalance_collective(exchange.wire, counts, bucket_step))
        counts = differences(even_borders(sum(counts), size))
    return [*collectives, *_gather_collectives(exchange.wire, counts, bucket_step)]


def _replay_split_and_reduce(
    wire: Wire, selections: Selections, borders: Sequence[int], bucket_step: BucketStep
) -> tuple[list[ReplayedCollective], SparseVector]:
    """Return the collectives of `split_and_reduce`, and the sum of the selections in the order of ranks."""
    n = bucket_step.n
    size = bucket_step.world_size
    sums = torch.zeros(n, dtype=bucket_step.dtype, device="cpu")
    is_chosen = torch.zeros(n, dtype=torch.bool, device="cpu")
    # The number of elements that worker r sends to the owner of region s.
    counts = torch.empty(size, size, dtype=torch.int64, device="cpu")
    for rank, selection in enumerate(selections):
        indices = selection.indices.long()
        sums.index_add_(0, indices, wire.round_values(selection).values)
        is_chosen.index_fill_(0, indices, True)
        counts[rank] = torch.tensor(_count_by_region(indices.sort().values, borders), device="cpu")
    counts.fill_diagonal_(0)
    indices = is_chosen.nonzero().squeeze(1)
    collectives = [
        _uniform_collective("all_to_all", LENGTH_BYTES * (size - 1), size),
        _all_to_all_elements(wire, bucket_step, counts.sum(dim=1)),
    ]
    return collectives, SparseVector(indices, sums[indices])


def _all_to_all_elements(wire: Wire, bucket_step: BucketStep, sent_counts: Tensor) -> ReplayedCollective:
    """Return the all-to-all in which each worker sends these numbers of elements (P,) to the others."""
    nbytes = [wire.nbytes(count, bucket_step.n, bucket_step.dtype) for count in sent_counts.tolist()]
    return ReplayedCollective("all_to_all", nbytes)


def _replay_threshold(
    exchange: SplitReduceBalance,
    reduced: SparseVector,
    k: int,
    state: ReusedThreshold,
    borders: Sequence[int],
) -> tuple[Tensor, list[ReplayedCollective]]:
    """Return the indices of the sums that reach the global threshold, and the collectives that find it.

    Does for all workers what `SplitReduceBalance.filter_globally` does for one.
    """
    size = len(borders) - 1
    is_due = state.is_due(k)
    kept = reduced.indices
    values = reduced.values
    collectives = [_uniform_collective("all_gather", LENGTH_BYTES, size)]
    if not is_due:
        is_kept = values.abs() >= state.threshold
        kept, values = kept[is_kept], values[is_kept]
    if not len(kept):
        state.k = 0
    elif is_due or len(kept) > RENEWAL_RATIO * k:
        longest = max(_count_by_region(kept, borders))
        collectives.append(_uniform_collective("all_gather", longest * values.element_size(), size))
        largest = values.abs().topk(min(k, len(values)), sorted=False).indices
        state.renew(
            minimum_or_tiny(values[largest].abs()), k, exchange.threshold_every if is_due else state.left
        )
        kept = kept[largest].sort().values
    else:
        state.adjust(len(kept), k, exchange.drift)
    state.left -= 1
    return kept, collectives


def _rebalance_collective(wire: Wire, counts: Sequence[int], bucket_step: BucketStep) -> ReplayedCollective:
    """Return the all-to-all that gives all workers the same number of elements, in unchanged order."""
    starts = torch.tensor([0, *counts], device="cpu").cumsum(0)
    borders = torch.tensor(even_borders(sum(counts), len(counts)), device="cpu")
    unmoved = (torch.minimum(starts[1:], borders[1:]) - torch.maximum(starts[:-1], borders[:-1])).clamp(min=0)
    return _all_to_all_elements(wire, bucket_step, starts.diff() - unmoved)


def _gather_collectives(
    wire: Wire, counts: Sequence[int], bucket_step: BucketStep
) -> list[ReplayedCollective]:
    """Return the all-gather of selections padded to the longest; none where all are empty."""
    nbytes = wire.nbytes(max(counts), bucket_step.n, bucket_step.dtype)
    return [_uniform_collective("all_gather", nbytes, bucket_step.world_size)] if nbytes else []


def _mean_quantile_borders(selections: Selections, n: int) -> list[int]:
    """Return the means over the workers of the P-quantiles of their indices, as Ok-Topk's borders."""
    size = len(selections)
    totals = torch.zeros(size - 1, dtype=torch.int64, device="cpu")
    for selection in selections:
        totals += index_quantiles(selection.indices, n, size)
    return [0, *(totals // size).tolist(), n]


def _count_by_region(indices: Tensor, borders: Sequence[int]) -> list[int]:
    """Return how many of these ascending indices lie in each region."""
    return differences(torch.searchsorted(indices, torch.tensor(borders, device="cpu")).tolist())
