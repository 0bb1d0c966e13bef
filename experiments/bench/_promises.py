"""Closed forms: the bytes that a worker sends of a bucket in one step, from the sizes of what is sent.

From numbers of elements alone, by the collectives of `sparsify.cost`: nothing here looks at a message.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from sparsify import cost
from sparsify.exchange import AllGather, AllGatherBlocks, AllReduce
from sparsify.method import Dense, Method, Sparsifier
from sparsify.methods._partitions import ExclusiveThreshold
from sparsify.methods._quantised_all_gather import QuantisedAllGather
from sparsify.methods.adacomp import CODES, MATRIX, AdaComp
from sparsify.methods.deft import Deft, fragments
from sparsify.methods.dgc import WithDenseVectors
from sparsify.methods.gtopk import Tree
from sparsify.methods.hardthreshold import SignedWords
from sparsify.methods.oktopk import SplitReduceBalance
from sparsify.methods.powersgd import PowerSGD
from sparsify.methods.qsgd import QSGD
from sparsify.methods.scalecom import LeaderTopK
from sparsify.methods.signsgd import Sign
from sparsify.methods.sparcml import SplitAllGather
from sparsify.methods.stable_topk import StableBlocks
from sparsify.methods.terngrad import TernGrad
from sparsify.types import work_dtype

INDEX, SCALE = 4, 4  # bytes


class Seen(NamedTuple):
    """One bucket in one step, as it looks from outside."""

    shapes: tuple[tuple[int, ...], ...]  # of its tensors
    k: int
    dtype: torch.dtype
    size: int  # workers
    step: int
    selected: list[int]  # elements that each worker sent
    longest: int | None = None  # the largest number of elements that any worker chose itself, where known

    @property
    def n(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def value(self) -> int:
        """Bytes of a value that is sent."""
        return work_dtype(self.dtype).itemsize


class Range(NamedTuple):
    """Bytes. `least` and `most` differ where the sizes depend on more than what is seen from outside."""

    least: int
    most: int


def promised(method: Method, seen: Seen) -> Range | None:
    """What each worker sends; None of a method that has no closed form here."""
    match method:
        case Dense():
            return exactly(cost.all_reduce(seen.n * seen.dtype.itemsize, seen.size))
        case WithDenseVectors():
            is_vector = all(len(shape) <= 1 for shape in seen.shapes)
            return promised(Dense() if is_vector else method.sparse, seen)
        case QuantisedAllGather():
            return exactly(cost.all_gather(quantised_nbytes(method.quantise, seen.n), seen.size))
        case PowerSGD():
            return power_sgd(method, seen)
        case AdaComp():
            return exactly(cost.gather_uneven(adacomp_nbytes(method, seen), seen.size))
        case Sparsifier():
            choosing, sending = of_selector(method.select, seen), of_exchange(method.exchange, seen)
            if choosing is None or sending is None:
                return None
            return Range(choosing.least + sending.least, choosing.most + sending.most)
    return None


def exactly(*collectives: cost.Cost) -> Range:
    total = sum(collective.sent_bytes for collective in collectives)
    return Range(total, total)


def between(least: cost.Cost, most: cost.Cost) -> Range:
    return Range(least.sent_bytes, most.sent_bytes)


def of_selector(selector: Any, seen: Seen) -> Range:
    """What the workers send to agree upon a choice."""
    match selector:
        case LeaderTopK():
            return exactly(cost.broadcast(INDEX * seen.k, seen.size))
        case StableBlocks():
            blocks = -(-seen.n // min(selector.block, seen.k))
            is_due = seen.step % selector.every == 0
            return exactly(cost.all_reduce(blocks * seen.value * is_due, seen.size))
        case ExclusiveThreshold():
            return union(seen)
        case Deft():
            sizes = [torch.Size(shape).numel() for shape in seen.shapes]
            plan = cost.broadcast(2 * INDEX * len(fragments(sizes, seen.size)), seen.size).sent_bytes
            return Range(*(plan + nbytes for nbytes in union(seen)))
    return Range(0, 0)


def union(seen: Seen) -> Range:
    """Lists of indices, padded to the longest."""
    (together,) = set(seen.selected)
    if seen.longest is not None:
        return exactly(cost.gather_uneven(INDEX * seen.longest, seen.size))
    shortest = -(-together // seen.size)
    return between(*(cost.gather_uneven(INDEX * longest, seen.size) for longest in (shortest, together)))


def of_exchange(exchange: Any, seen: Seen) -> Range | None:
    size, most = seen.size, max(seen.selected)
    work = work_dtype(seen.dtype)
    match exchange:
        case AllGather(packed=False):
            return exactly(cost.all_gather(INDEX * most, size), cost.all_gather(seen.value * most, size))
        case AllGather():
            gather = cost.gather_uneven if exchange.uneven else cost.all_gather
            return exactly(gather(exchange.wire.nbytes(most, seen.n, work), size))
        case SignedWords():
            return exactly(cost.gather_uneven(INDEX * most, size))
        case AllGatherBlocks():
            return exactly(cost.all_gather(INDEX + seen.value * most, size))
        case AllReduce():
            return exactly(cost.all_reduce(seen.value * most, size))
        case Tree():
            return exactly(cost.tree(exchange.wire.nbytes(seen.k, seen.n, work), size))
        case SplitAllGather():
            pairs = exchange.wire.nbytes(min(seen.n, sum(seen.selected)), seen.n, work)
            region = -(-seen.n // size) * exchange.wire.value_dtype(work).itemsize
            counts = cost.all_gather(cost.LENGTH, size)
            return between(
                cost.exchange_pieces(0, size) + counts,
                cost.exchange_pieces(exchange.wire.nbytes(most, seen.n, work), size)
                + counts
                + cost.all_gather(max(pairs, region), size),
            )
        case SplitReduceBalance():
            together = min(seen.n, sum(seen.selected))
            pairs = exchange.wire.nbytes(together, seen.n, work)
            counts = cost.all_gather(cost.LENGTH, size)
            borders = cost.all_gather(cost.LENGTH * (size - 1), size)
            least = cost.exchange_pieces(0, size) + counts
            if seen.step % exchange.regions_every == 0:
                least += borders
            sums = cost.all_gather(seen.value * together, size)  # where the threshold is taken anew
            return between(
                least,
                least
                + cost.all_to_all(exchange.wire.nbytes(most, seen.n, work), size)
                + sums
                + cost.all_to_all(pairs, size)
                + cost.all_gather(pairs, size),
            )
    return None


def quantised_nbytes(quantiser: Any, n: int) -> int:
    """Codes packed into bytes, behind scales."""
    match quantiser:
        case QSGD():
            return -(-n * quantiser.bits // 8) + SCALE * -(-n // quantiser.block)
        case TernGrad():
            return -(-n * 2 // 8) + SCALE
        case Sign():
            return -(-n // 8)
    return -(-n // 8) + SCALE  # EF-signSGD


def adacomp_nbytes(method: AdaComp, seen: Seen) -> int:
    """The longest message: a scale for each tensor, and a code for each element."""
    tensors = [shape for shape in seen.shapes if torch.Size(shape).numel()]
    bins = [
        min(torch.Size(shape).numel(), method.conv_bin if len(shape) > MATRIX else method.other_bin)
        for shape in tensors
    ]
    code = next(code for code in CODES if max(bins) <= code.nothing)
    return SCALE * len(tensors) + code.dtype.itemsize * max(seen.selected)


def power_sgd(method: PowerSGD, seen: Seen) -> Range:
    """P with what is not compressed, then Q."""
    first = second = 0
    for shape in seen.shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)
        rank = min(method.rank, rows, columns)
        smaller = rank * (rows + columns) * method.min_compression_rate < rows * columns
        compressed = len(shape) > 1 and smaller
        first += rows * (rank if compressed else columns)
        second += columns * rank if compressed else 0
    return exactly(*(cost.all_reduce(seen.value * numbers, seen.size) for numbers in (first, second)))
