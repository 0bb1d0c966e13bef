from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsify import cost, host
from sparsify.aggregate import Sparsifier
from sparsify.comm import Comm
from sparsify.feedback import ErrorFeedback
from sparsify.parts import Delivery, Part, Place, Run, Selection, Sparse, Work, check_choice
from sparsify.select import ExactlyK, TopK
from sparsify.split import differences, even_borders, rounding_errors, split_and_reduce
from sparsify.wire import Wire


def sparcml(
    density: float = 0.001,
    scope: str | float = "global",
    density_warmup: Sequence[float] = (),
    bucket: int | None = None,
    dense_at: float | None = None,
    index: str = "int32",
    value: str = "as_is",
) -> Sparsifier:
    """SparCML (TopkDSA): pairs go to the owners of regions, which reduce them; what comes of it goes to all,
    dense where it has filled up. Renggli et al. 2019 (SC), arXiv:1802.08021: DSAR_Split_allgather.

    The update is Top-k's; between 4 k (P-1)/P words, where all workers choose alike, and (2k + n) (P-1)/P.
    Four host synchronisations per step and bucket: three in `split_and_reduce`, one for the owners' counts.

    Args:
        bucket: select k n / bucket of every `bucket` elements instead of k of n; 512 in the paper. None: of
            n.
        dense_at: the share of elements from which the result travels dense. None: value bytes / (index bytes
            + value bytes), the paper's delta, from which on pairs are longer: 1/2 for 4 + 4 bytes; or less,
            where one owner's pairs, which all are padded to, are longer than a region. Ok-Topk's copy takes
            1/3.
        index, value: how pairs are written, see `sparsify.wire.Wire`; delta16 has a header for every message,
            too long for pieces.
    """
    check_choice("index encoding", index, ("int32", "int64"))
    select = TopK() if bucket is None else TopKOfEach(bucket)
    exchange = SplitAllGather(Wire(index, value), dense_at)
    return Sparsifier(density, select, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass(frozen=True)
class TopKOfEach(ExactlyK):
    """The largest of every `bucket` consecutive elements, at least one of each; the last may be shorter."""

    bucket: int = 512
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bucket < 1:
            raise ValueError(f"bucket={self.bucket} is out of range: it must be at least 1 element")

    def counts(self, n: int, k: int) -> tuple[int, int]:
        """Of every whole bucket, and of the rest."""
        rest = n % self.bucket
        return max(1, self.bucket * k // n), min(rest, max(1, rest * k // n)) if rest else 0

    def bounds(self, n: int, k: int, size: int) -> tuple[int, int]:
        each, last = self.counts(n, k)
        return (n // self.bucket * each + last,) * 2

    def init(self, like: Tensor, place: Place) -> Work:
        return Work.like(like)

    def select(self, acc: Tensor, k: int, comm: Comm, state: Work) -> Selection:
        n, work = acc.numel(), state.buffer
        whole, (each, last) = n // self.bucket * self.bucket, self.counts(n, k)
        torch.abs(acc, out=work)
        best = work[:whole].view(-1, self.bucket).topk(each, sorted=False).indices
        best += torch.arange(0, whole, self.bucket, device=acc.device)[:, None]
        chosen = [best.flatten()]
        if last:
            chosen.append(work[whole:].topk(last, sorted=False).indices + whole)
        return Selection(torch.cat(chosen))


@dataclass(frozen=True)
class SplitAllGather(Part):
    """Split and reduce, then allgather, of pairs or of dense regions."""

    wire: Wire = Wire()
    dense_at: float | None = None
    needs_shared: ClassVar[bool] = False
    needs_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dense_at is not None and not 0 < self.dense_at <= 1:
            raise ValueError(f"dense_at={self.dense_at} is out of range: a share of n lies in (0, 1]")

    def init(self, like: Tensor, place: Place) -> None:
        return None

    def fill_in(self, n: int, dtype: torch.dtype) -> float:
        """delta: from so many elements on, pairs take more bytes than n values."""
        value = self.wire.value_dtype(dtype).itemsize
        index = self.wire.nbytes(1, n, dtype) - value
        return n * (value / (index + value) if self.dense_at is None else self.dense_at)

    def is_dense(self, counts: list[int], n: int, dtype: torch.dtype) -> bool:
        """From the owners' counts alone, so that all workers decide alike."""
        longest_region = -(-n // len(counts)) * self.wire.value_dtype(dtype).itemsize
        longer = self.dense_at is None and self.wire.nbytes(max(counts), n, dtype) > longest_region
        return longer or sum(counts) >= self.fill_in(n, dtype)

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: None) -> Delivery:
        borders, dtype = even_borders(n, comm.size), part.values.dtype
        reduced, sent_bytes = split_and_reduce(part, borders, n, comm, self.wire)
        mine = host.put([reduced.indices.numel()], reduced.indices)
        counts = [int(count) for count in host.read(torch.cat(comm.all_gather(mine)))]
        sent_bytes += cost.all_gather(cost.LENGTH, comm.size).sent_bytes
        if self.is_dense(counts, n, dtype):
            total, rounded, price = self.gather_dense(reduced, borders, comm)
        else:
            total, rounded, price = self.gather_pairs(reduced, counts, n, comm)
        delivered: list[Sparse | Run] = [self.wire.rounded(part), rounding_errors(reduced, rounded)]
        return Delivery(total, delivered, sent_bytes + price)

    def gather_pairs(
        self, reduced: Sparse, counts: list[int], n: int, comm: Comm
    ) -> tuple[list[Sparse | Run], Sparse, int]:
        """Padded to the longest. What comes to all, this worker's sums as they arrive, and the bytes."""
        dtype, longest = reduced.values.dtype, self.wire.nbytes(max(counts), n, reduced.values.dtype)
        message = self.wire.write(reduced, n)
        padded = torch.cat([message, message.new_zeros(longest - len(message))])
        everybodys = comm.all_gather(padded)
        total: list[Sparse | Run] = [
            self.wire.read(one[: self.wire.nbytes(count, n, dtype)], count, n, dtype)
            for one, count in zip(everybodys, counts, strict=True)
        ]
        return total, self.wire.rounded(reduced), cost.all_gather(longest, comm.size).sent_bytes

    def gather_dense(
        self, reduced: Sparse, borders: list[int], comm: Comm
    ) -> tuple[list[Sparse | Run], Sparse, int]:
        """Whole regions, padded to the longest."""
        lengths = differences(borders)
        narrow = self.wire.narrowed(reduced.values)
        region = narrow.new_zeros(max(lengths))
        region.index_copy_(0, reduced.indices - borders[comm.rank], narrow)
        everybodys = comm.all_gather(region)
        total: list[Sparse | Run] = [
            Run(start, one[:length].to(reduced.values.dtype))
            for start, one, length in zip(borders, everybodys, lengths, strict=False)
        ]
        return total, self.wire.rounded(reduced), cost.all_gather(region.nbytes, comm.size).sent_bytes
