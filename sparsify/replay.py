"""Exchanges without gradients: selections in, what every worker sends out. For more workers than models fit.

One process holds what the workers selected, one selection after the other, and works out which collectives
the exchange would have called with how many bytes, as `CountingComm` would have counted them: to the byte, by
the same rules on the same sums. Where numbers of elements tell all, by `MethodPart.collective_calls`; else by a function for
the exchange. Memory: two buffers of n elements, whatever P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify import cost
from sparsify.core.wire import Wire
from sparsify.cost import LENGTH, Network
from sparsify.exchange import differences, even_borders
from sparsify.method import Dense, Method, Sparsifier
from sparsify.methods.deft import Deft
from sparsify.methods.micro import ExclusiveThreshold
from sparsify.methods.oktopk import TOO_MANY, Regions, Reused, SplitReduceBalance, least, quantiles
from sparsify.methods.sparcml import SplitAllGather
from sparsify.select import UnionSelector
from sparsify.types import BucketContext, BucketStep, CollectiveCall, MethodPart, SparseVector, num_selected

Selected = Sequence[SparseVector]  # what each worker selected, by rank; may be made when it is asked for


class Collective(NamedTuple):
    """One collective that all workers call."""

    call: str  # as in `sparsify.cost.TEXTBOOK`
    brought: list[int]  # bytes that each worker hands in; of all_to_all, that it sends to others
    arriving: list[int] | None = None  # of all_to_all: bytes that each worker gets from others
    route: Sequence[tuple[int, int]] = ()  # of permute

    def costs(self) -> list[cost.Cost]:
        """Cost for each worker, as the communicator counts it."""
        return [
            CollectiveCall(self.call, nbytes, self.route).cost(len(self.brought)) for nbytes in self.brought
        ]

    def seconds(self, network: Network) -> float:
        """Seconds until the last worker has what it waits for."""
        if self.route:
            return network.permute_seconds(max(self.brought), self.route)
        return network.seconds(self.call, max(self.brought), len(self.brought))


@dataclass(frozen=True)
class BucketTraffic:
    """All that the workers send of one bucket in one step."""

    size: int
    collectives: list[Collective]

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each worker sends."""
        return self._summed([[each.sent_bytes for each in one.costs()] for one in self.collectives])

    @property
    def received_bytes(self) -> list[int]:
        """Bytes that each worker receives: but for all_to_all, in rings and trees, what it sends."""
        return self._summed(
            [one.arriving or [each.sent_bytes for each in one.costs()] for one in self.collectives]
        )

    @property
    def messages(self) -> int:
        """Latency terms, one after the other."""
        return sum(one.costs()[0].messages for one in self.collectives)

    def seconds(self, network: Network) -> float:
        """Simulated: by the alpha-beta model, as virtual ranks' clocks have it."""
        return sum(one.seconds(network) for one in self.collectives)

    def _summed(self, columns: list[list[int]]) -> list[int]:
        return [sum(numbers) for numbers in zip(*columns, strict=True)] or [0] * self.size


def balance(loads: Sequence[int]) -> float:
    """The largest load over the mean: 1 where all workers have as much to do, P where one has everything."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


class Replay:
    """A method's exchange over `size` workers, of one bucket, step by step; or a ValueError."""

    def __init__(self, method: Method, n: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self.method, self.n, self.size, self.dtype = sparse_part(method), n, size, dtype
        self.step, self.state = 0, None
        if isinstance(self.method, Sparsifier):
            like = torch.empty(0, dtype=dtype, device="cpu")
            self.state = self.method.exchange.init(like, BucketContext(0, 0, 0))

    def next(self, parts: Selected, k: int | None = None) -> BucketTraffic:
        """One step. `parts` are of each worker, with int32 or int64 indices; without `k`, it is the method's
        of n.
        """
        k = num_selected(self.n, self.method.density_at(10**9)) if k is None else k
        calls = list[Collective]()
        if isinstance(self.method, Sparsifier):
            bucket_step = BucketStep(((self.n,),), k, self.dtype, self.size, self.step, [])
            calls += chosen_together(self.method.select, bucket_step)
            calls += exchanged(self.method.exchange, parts, bucket_step, self.state)
        else:
            calls += [alike("all_reduce", self.n * self.dtype.itemsize, self.size)]
        self.step += 1
        return BucketTraffic(self.size, calls)


def sparse_part(method: Method) -> Sparsifier | Dense:
    """The method, if it can be replayed: the bucket is taken to be no vector, where that matters."""
    if isinstance(method, Sparsifier | Dense):
        return method
    raise ValueError(f"{method!r} exchanges no selections, so there is none to replay")


def alike(call: str, nbytes: int, size: int) -> Collective:
    """A collective to which all workers bring as much."""
    return Collective(call, [nbytes] * size)


def called(part: MethodPart, bucket_step: BucketStep) -> list[Collective]:
    """Collectives of a part for which numbers of elements tell all."""
    return [
        Collective(call.kind, [call.nbytes] * bucket_step.world_size, route=call.route)
        for call in part.collective_calls(bucket_step)
    ]


def chosen_together(selector: Any, bucket_step: BucketStep) -> list[Collective]:
    """Collectives by which the workers agree upon a choice."""
    if isinstance(selector, ExclusiveThreshold | Deft | UnionSelector):
        raise ValueError(
            f"{type(selector).__name__} chooses by what the gradient holds: it can't be replayed"
        )
    return called(selector, bucket_step) if isinstance(selector, MethodPart) else []


def exchanged(exchange: Any, parts: Selected, bucket_step: BucketStep, state: Any) -> list[Collective]:
    """The collectives of one exchange."""
    match exchange:
        case SplitAllGather():
            return split_all_gather(exchange, parts, bucket_step)
        case SplitReduceBalance():
            return split_reduce_balance(exchange, parts, bucket_step, state)
        case MethodPart() if type(exchange).collective_calls is not MethodPart.collective_calls:
            return called(exchange, bucket_step._replace(sent_counts=counted(exchange, parts, bucket_step)))
    raise ValueError(f"{type(exchange).__name__} can't be replayed: it has no function here")


def counted(exchange: Any, parts: Selected, bucket_step: BucketStep) -> list[int]:
    """Elements that each worker brings; no more of `parts` is made than tells them."""
    if exchange.needs_equal_counts:
        return [bucket_step.k] * bucket_step.world_size
    if exchange.needs_shared_indices:
        return [parts[0].indices.numel()] * bucket_step.world_size
    return [part.indices.numel() for part in parts]


def split_all_gather(exchange: SplitAllGather, parts: Selected, bucket_step: BucketStep) -> list[Collective]:
    """SparCML."""
    borders = even_borders(bucket_step.n, bucket_step.world_size)
    calls, reduced = split_and_reduced(exchange.wire, parts, borders, bucket_step)
    counts = in_regions(reduced.indices, borders)
    calls.append(alike("all_gather", LENGTH, bucket_step.world_size))
    if exchange.is_dense(counts, bucket_step.n, bucket_step.dtype):
        region = max(differences(borders)) * exchange.wire.value_dtype(bucket_step.dtype).itemsize
        return [*calls, alike("all_gather", region, bucket_step.world_size)]
    return [*calls, *pairs_gathered(exchange.wire, counts, bucket_step)]


def split_reduce_balance(
    exchange: SplitReduceBalance, parts: Selected, bucket_step: BucketStep, state: Regions
) -> list[Collective]:
    """Ok-Topk. Borders and the global threshold are re-used from step to step, as the exchange's."""
    size, calls = bucket_step.world_size, list[Collective]()
    if state.step % exchange.regions_every == 0:
        state.borders = balanced_borders(parts, bucket_step.n)
        calls += [alike("all_gather", LENGTH * (size - 1), size)] if size > 1 else []
    state.step += 1
    split, reduced = split_and_reduced(exchange.wire, parts, state.borders, bucket_step)
    kept, kept_calls = kept_globally(exchange, reduced, bucket_step.k, state.threshold, state.borders)
    counts = in_regions(kept, state.borders)
    calls += [*split, *kept_calls]
    if exchange.balance:
        calls.append(shared_out(exchange.wire, counts, bucket_step))
        counts = differences(even_borders(sum(counts), size))
    return [*calls, *pairs_gathered(exchange.wire, counts, bucket_step)]


def split_and_reduced(
    wire: Wire, parts: Selected, borders: Sequence[int], bucket_step: BucketStep
) -> tuple[list[Collective], SparseVector]:
    """Lengths of pieces, then the pieces; and the sums over all workers, taken in the order of ranks."""
    n, size, dtype = bucket_step.n, bucket_step.world_size, bucket_step.dtype
    sums = torch.zeros(n, dtype=dtype, device="cpu")
    is_chosen = torch.zeros(n, dtype=torch.bool, device="cpu")
    # Elements from worker r to the owner of region s.
    pieces = torch.empty(size, size, dtype=torch.int64, device="cpu")
    for rank, part in enumerate(parts):
        indices = part.indices.long()
        sums.index_add_(0, indices, wire.rounded(part).values)
        is_chosen.index_fill_(0, indices, True)
        pieces[rank] = torch.tensor(in_regions(indices.sort().values, borders), device="cpu")
    pieces.fill_diagonal_(0)
    indices = is_chosen.nonzero().squeeze(1)
    lengths = [LENGTH * (size - 1)] * size
    announced = Collective("all_to_all", lengths, lengths)
    calls = [announced, pieces_exchanged(wire, bucket_step, pieces.sum(dim=1), pieces.sum(dim=0))]
    return calls, SparseVector(indices, sums[indices])


def pieces_exchanged(wire: Wire, bucket_step: BucketStep, sent: Tensor, arriving: Tensor) -> Collective:
    """All-to-all of so many elements, which each worker sends to others and gets from them: (size,) each."""
    out, back = (
        [wire.nbytes(count, bucket_step.n, bucket_step.dtype) for count in each.tolist()]
        for each in (sent, arriving)
    )
    return Collective("all_to_all", out, back)


def kept_globally(
    exchange: SplitReduceBalance, reduced: SparseVector, k: int, state: Reused, borders: Sequence[int]
) -> tuple[Tensor, list[Collective]]:
    """Indices of the sums that reach the global threshold: `SplitReduceBalance.keep` for all workers."""
    size, due, kept, values = len(borders) - 1, state.is_due(k), reduced.indices, reduced.values
    calls = [alike("all_gather", LENGTH, size)]
    if not due:
        reaching = values.abs() >= state.threshold
        kept, values = kept[reaching], values[reaching]
    if not len(kept):
        state.k = 0
    elif due or len(kept) > TOO_MANY * k:
        most = max(in_regions(kept, borders))
        calls.append(alike("all_gather", most * values.element_size(), size))
        best = values.abs().topk(min(k, len(values)), sorted=False).indices
        state.renew(least(values[best].abs()), k, exchange.threshold_every if due else state.left)
        kept = kept[best].sort().values
    else:
        state.drift(len(kept), k, exchange.drift)
    state.left -= 1
    return kept, calls


def shared_out(wire: Wire, counts: Sequence[int], bucket_step: BucketStep) -> Collective:
    """The same elements in the same order, as many on each worker: what each sends to others, and gets."""
    starts = torch.tensor([0, *counts], device="cpu").cumsum(0)
    shares = torch.tensor(even_borders(sum(counts), len(counts)), device="cpu")
    stays = (torch.minimum(starts[1:], shares[1:]) - torch.maximum(starts[:-1], shares[:-1])).clamp(min=0)
    return pieces_exchanged(wire, bucket_step, starts.diff() - stays, shares.diff() - stays)


def pairs_gathered(wire: Wire, counts: Sequence[int], bucket_step: BucketStep) -> list[Collective]:
    """Padded to the longest; nothing where all are empty."""
    nbytes = wire.nbytes(max(counts), bucket_step.n, bucket_step.dtype)
    return [alike("all_gather", nbytes, bucket_step.world_size)] if nbytes else []


def balanced_borders(parts: Selected, n: int) -> list[int]:
    """Means over the workers of the P-quantiles of what each selected, as `oktopk.balanced_borders`."""
    size = len(parts)
    totals = torch.zeros(size - 1, dtype=torch.int64, device="cpu")
    for part in parts:
        totals += quantiles(part.indices, n, size)
    return [0, *(totals // size).tolist(), n]


def in_regions(indices: Tensor, borders: Sequence[int]) -> list[int]:
    """Number of these, ascending, that lie in each region."""
    return differences(torch.searchsorted(indices, torch.tensor(borders, device="cpu")).tolist())
