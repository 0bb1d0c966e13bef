from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsify import cost, host
from sparsify.aggregate import Sparsifier
from sparsify.comm import Comm
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Search, kernel
from sparsify.parts import Delivery, Part, Place, Run, Selection, Sparse, check_choice, members, work_dtype
from sparsify.select import About
from sparsify.split import differences, even_borders, rounding_errors, split_and_reduce
from sparsify.wire import Wire

# Shigangli/Ok-Topk: a re-used threshold moves by a factor when it selects fewer or more than so many times k.
FEWEST, MOST = 2 / 3, 5 / 4
TOO_MANY = 4 / 3  # from here on it is taken anew: else nothing would bound the volume


def oktopk(
    density: float = 0.001,
    scope: str | float = "global",
    density_warmup: Sequence[float] = (),
    threshold_every: int = 32,
    regions_every: int = 64,
    local_drift: float = 1.012,
    global_drift: float = 1.008,
    balance: bool = True,
    index: str = "int32",
    value: str = "as_is",
) -> Sparsifier:
    """Ok-Topk: thresholds that are re-used, regions that are balanced, split and reduce. Li and Hoefler 2022
    (PPoPP), arXiv:2201.07598, algorithms 1 and 2.

    At most 6 k (P-1)/P words a worker where regions are balanced and about k is selected. What a worker
    selected and the global threshold rejected stays in its residual. So that nothing else can happen, a
    re-used threshold that selects more than 4k/3 is taken anew, from what it selects; a global one costs k to
    P k more words then, as it does every `threshold_every` steps. Host synchronisations per step and bucket:
    6; where a local threshold is taken anew one less, where a global one is one more, or two, and one more
    where regions are.

    Constants are those of the public code for VGG. It runs the first 512 iterations dense there (128 for the
    LSTM, 0 for BERT), which the paper does not say: density_warmup=[1.0] does an epoch of it.

    Args:
        threshold_every: tau', steps between exact thresholds: 32; 128 for BERT.
        regions_every: tau, steps between new borders of the regions: 64.
        local_drift, global_drift: the factor by which a re-used threshold moves when it selects less than
            2k/3 or more than 5k/4: 1.012 and 1.008; 1.025 and 1.036 for BERT.
        balance: share out what is left equally before it goes to all, as in the paper; left out in the public
            code but for BERT.
        index, value: how pairs are written, see `sparsify.wire.Wire`; delta16 has a header for every message,
            too long for pieces.
    """
    check_choice("index encoding", index, ("int32", "int64"))
    for name, drift in (("local_drift", local_drift), ("global_drift", global_drift)):
        if not drift >= 1:
            raise ValueError(f"{name}={drift} is out of range: it must be at least 1, which is no drift")
    for name, steps in (("threshold_every", threshold_every), ("regions_every", regions_every)):
        if steps < 1:
            raise ValueError(f"{name}={steps} is out of range: it must be at least 1 step")
    exchange = SplitReduceBalance(Wire(index, value), threshold_every, regions_every, global_drift, balance)
    select = ReusedThreshold(threshold_every, local_drift)
    return Sparsifier(density, select, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass
class Reused:
    """A threshold, and for how many steps it is re-used still."""

    threshold: Tensor  # 0-d
    k: int = 0  # for which; 0: none yet
    left: int = 0
    search: Search | None = None

    def is_due(self, k: int) -> bool:
        """Is it to be taken anew? Also when k has changed."""
        return not self.left or self.k != k

    def renew(self, threshold: Tensor, k: int, every: int) -> None:
        self.threshold, self.k, self.left = threshold.clone(), k, every

    def drift(self, count: int, k: int, factor: float) -> None:
        """After a step in which it selected `count`."""
        if count < FEWEST * k:
            self.threshold.div_(factor).clamp_(min=torch.finfo(self.threshold.dtype).tiny)
        elif count > MOST * k:
            self.threshold.mul_(factor)


@dataclass(frozen=True)
class ReusedThreshold(About):
    """All that reach a threshold, which is the k-th largest magnitude of some steps ago."""

    every: int = 32
    drift: float = 1.012

    def bounds(self, n: int, k: int, size: int) -> tuple[int, int]:
        return 0, max(k, int(TOO_MANY * k))

    def init(self, like: Tensor, place: Place) -> Reused:
        return Reused(no_threshold(like), search=Search(kernel(like, place.select)))

    def select(self, acc: Tensor, k: int, comm: Comm, state: Reused) -> Selection:
        return self.add_and_select(acc, None, k, comm, state)

    def add_and_select(
        self, acc: Tensor, rest: Tensor | None, k: int, comm: Comm, state: Reused
    ) -> Selection:
        assert state.search is not None
        if state.is_due(k):
            chosen, values = state.search.kernel.top(acc, rest, k)
            state.renew(least(values.abs()), k, self.every)
        else:
            chosen, values = state.search.kernel.beyond(acc, rest, state.threshold)
            count = len(chosen)
            state.drift(count, k, self.drift)
            if count > TOO_MANY * k:  # the k largest are among them
                best = values.abs().topk(k, sorted=False).indices
                chosen, values = chosen[best], values[best]
                state.renew(least(values.abs()), k, state.left)
        state.left -= 1
        return Selection(chosen, values=values)


def no_threshold(like: Tensor) -> Tensor:
    """0-d, where thresholds are kept of buckets like this one."""
    return torch.zeros((), dtype=work_dtype(like.dtype), device=like.device)


def least(magnitudes: Tensor) -> Tensor:
    """The smallest, but never 0, which everything reaches."""
    return magnitudes.amin().clamp(min=torch.finfo(magnitudes.dtype).tiny)


@dataclass
class Regions:
    """Who owns what, and the global threshold; alike on all workers."""

    threshold: Reused
    borders: list[int] = field(default_factory=list)  # size + 1 positions
    step: int = 0


@dataclass(frozen=True)
class SplitReduceBalance(Part):
    """Split and reduce; keep what reaches the global threshold; share it out; gather it."""

    wire: Wire = Wire()
    threshold_every: int = 32
    regions_every: int = 64
    drift: float = 1.008
    balance: bool = True
    needs_shared: ClassVar[bool] = False
    needs_exact: ClassVar[bool] = False

    def init(self, like: Tensor, place: Place) -> Regions:
        return Regions(Reused(no_threshold(like)))

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: Regions) -> Delivery:
        sent_bytes = 0
        if state.step % self.regions_every == 0:
            state.borders, sent_bytes = balanced_borders(part.indices, n, comm)
        state.step += 1
        reduced, split_bytes = split_and_reduce(part, state.borders, n, comm, self.wire)
        kept, counts, threshold_bytes = self.keep(reduced, k, comm, state.threshold)
        rounded, share_bytes = self.wire.rounded(kept), 0
        delivered: list[Sparse | Run] = [rounding_errors(kept, rounded)]
        if self.balance:
            kept, counts, share_bytes = self.share_out(kept, counts, n, comm)
        total, gather_bytes = self.gather(kept, counts, n, comm)
        survivors = torch.cat([one.indices for one in total]).long()
        mine = self.wire.rounded(part)
        # Locally selected and globally kept: only that was delivered.
        sent = mine.values.where(members(mine.indices.long(), survivors), 0)
        delivered.append(Sparse(mine.indices, sent))
        sent_bytes += split_bytes + threshold_bytes + share_bytes + gather_bytes
        return Delivery([*total], delivered, sent_bytes)

    def keep(self, reduced: Sparse, k: int, comm: Comm, state: Reused) -> tuple[Sparse, list[int], int]:
        """Of this worker's region what reaches the global threshold; how much that is on each worker; the
        bytes. Exactly the k largest where the threshold is taken anew, from everybody's sums.
        """
        due, candidates = state.is_due(k), reduced
        if not due:
            at = host.nonzero(reduced.values.abs() >= state.threshold)
            candidates = Sparse(reduced.indices[at], reduced.values[at])
        number = host.put([len(candidates.indices)], reduced.indices)
        counts = [int(count) for count in host.read(torch.cat(comm.all_gather(number)))]
        sent_bytes = cost.all_gather(cost.LENGTH, comm.size).sent_bytes
        if not sum(counts):
            state.k = 0  # nothing to take a threshold from: try again
        elif due or sum(counts) > TOO_MANY * k:
            every = self.threshold_every if due else state.left
            mask, threshold = largest_of_all(candidates.values, counts, k, comm)
            sent_bytes += cost.all_gather(max(counts) * reduced.values.element_size(), comm.size).sent_bytes
            state.renew(threshold, k, every)
            at = host.nonzero(mask[comm.rank])
            candidates = Sparse(candidates.indices[at], candidates.values[at])
            counts = [int(count) for count in host.read(torch.stack([one.sum() for one in mask]))]
        else:
            state.drift(sum(counts), k, self.drift)
        state.left -= 1
        return candidates, counts, sent_bytes

    def share_out(self, kept: Sparse, counts: list[int], n: int, comm: Comm) -> tuple[Sparse, list[int], int]:
        """The same elements in the same order over all workers, as many on each; and the bytes."""
        rank, dtype = comm.rank, kept.values.dtype
        starts = [sum(counts[:one]) for one in range(comm.size + 1)]
        shares = even_borders(sum(counts), comm.size)
        lengths = overlaps(starts[rank], starts[rank + 1], shares)
        comes = overlaps(shares[rank], shares[rank + 1], starts)
        pieces = zip(kept.indices.split(lengths), kept.values.split(lengths), strict=True)
        messages = [self.wire.write(Sparse(*piece), n) for piece in pieces]
        received = comm.all_to_all(
            torch.cat(messages),
            [len(message) for message in messages],
            [self.wire.nbytes(count, n, dtype) for count in comes],
        )
        away = sum(len(message) for message in messages) - len(messages[rank])
        parts = [self.wire.read(one, count, n, dtype) for one, count in zip(received, comes, strict=True)]
        share = Sparse(torch.cat([one.indices for one in parts]), torch.cat([one.values for one in parts]))
        return share, differences(shares), cost.all_to_all(away, comm.size).sent_bytes

    def gather(self, kept: Sparse, counts: list[int], n: int, comm: Comm) -> tuple[list[Sparse], int]:
        """Everybody's to everybody, padded to the longest; and the bytes."""
        dtype = kept.values.dtype
        if not (longest := self.wire.nbytes(max(counts), n, dtype)):
            return [kept], 0
        message = self.wire.write(kept, n)
        everybodys = comm.all_gather(torch.cat([message, message.new_zeros(longest - len(message))]))
        total = [
            self.wire.read(one[: self.wire.nbytes(count, n, dtype)], count, n, dtype)
            for one, count in zip(everybodys, counts, strict=True)
        ]
        return total, cost.all_gather(longest, comm.size).sent_bytes


def largest_of_all(values: Tensor, counts: list[int], k: int, comm: Comm) -> tuple[list[Tensor], Tensor]:
    """Which of everybody's values are among the k largest magnitudes, (count,) bool of each worker; and the
    smallest of these.
    """
    padded = torch.cat([values, values.new_zeros(max(counts) - len(values))])
    everybodys = [one[:count] for one, count in zip(comm.all_gather(padded), counts, strict=True)]
    magnitudes = torch.cat(everybodys).abs()
    best = magnitudes.topk(min(k, len(magnitudes)), sorted=False).indices
    mask = torch.zeros_like(magnitudes, dtype=torch.bool).index_fill_(0, best, True)
    return list(mask.split(counts)), least(magnitudes[best])


def balanced_borders(indices: Tensor, n: int, comm: Comm) -> tuple[list[int], int]:
    """Means over the workers of the P-quantiles of what each selected; size + 1 positions, and the bytes. A
    worker that selected nothing proposes regions of equal length.
    """
    size, count = comm.size, indices.numel()
    if count:
        at = host.put(even_borders(count, size)[1:-1], indices)
        proposed = indices.long().sort().values[at]
    else:
        proposed = host.put(even_borders(n, size)[1:-1], indices)
    if size == 1:
        return [0, n], 0
    # Summed on the host: there is no integer that n x P could overflow (in the public code there is).
    proposals = host.read(torch.stack(comm.all_gather(proposed)))
    inner = [sum(positions) // size for positions in zip(*proposals, strict=True)]
    return [0, *inner, n], cost.all_gather(proposed.nbytes, size).sent_bytes


def overlaps(start: int, end: int, borders: Sequence[int]) -> list[int]:
    """How many of the positions from start to end lie between each border and the next."""
    return differences([min(max(border, start), end) for border in borders])
