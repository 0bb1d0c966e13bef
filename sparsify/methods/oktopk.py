from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsify import cost, host
from sparsify.aggregate import Sparsifier
from sparsify.comm import Comm, gather_uneven
from sparsify.feedback import ErrorFeedback
from sparsify.parts import Delivery, Part, Place, Run, Selection, Sparse, check_choice, members
from sparsify.select import About, largest
from sparsify.split import differences, even_borders, rounding_errors, split_and_reduce
from sparsify.thresholds import Scratch
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

    At most 6 k (P-1)/P words a worker where regions are balanced and exactly k is selected. What a worker
    selected and the global threshold rejected stays in its residual. Host synchronisations per step and
    bucket: 6, one of them not in the steps that take the local threshold anew; those that take the global one
    anew, and regions anew, have one more each.

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
    scratch: Scratch | None = field(default=None, metadata={"saved": False})

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
        scratch = Scratch.like(like)
        return Reused(scratch.magnitudes.new_zeros(()), scratch=scratch)

    def select(self, acc: Tensor, k: int, comm: Comm, state: Reused) -> Selection:
        assert state.scratch is not None
        magnitudes = state.scratch.take(acc)
        if state.is_due(k):
            chosen = largest(acc, k, magnitudes)
            state.renew(least(magnitudes[chosen]), k, self.every)
        else:
            chosen = host.nonzero(state.scratch.at_least(state.threshold))
            count = len(chosen)
            state.drift(count, k, self.drift)
            if count > TOO_MANY * k:  # the k largest are among them
                chosen = chosen[magnitudes[chosen].topk(k, sorted=False).indices]
                state.renew(least(magnitudes[chosen]), k, state.left)
        state.left -= 1
        return Selection(chosen)


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

    wire: Wire = Wire()  # noqa: RUF009 (it is frozen)
    threshold_every: int = 32
    regions_every: int = 64
    drift: float = 1.008
    balance: bool = True
    needs_shared: ClassVar[bool] = False
    needs_exact: ClassVar[bool] = False

    def init(self, like: Tensor, place: Place) -> Regions:
        return Regions(Reused(Scratch.like(like[:1]).magnitudes.new_zeros(())))

    def exchange(self, part: Sparse, n: int, k: int, comm: Comm, state: Regions) -> Delivery:
        sent_bytes = 0
        if state.step % self.regions_every == 0:
            state.borders, sent_bytes = balanced_borders(part.indices, n, comm)
        state.step += 1
        reduced, split_bytes = split_and_reduce(part, state.borders, n, comm, self.wire)
        kept, threshold_bytes = self.keep(reduced, k, comm, state.threshold)
        total, gather_bytes = self.share_and_gather(kept, n, k, comm, state.threshold)
        survivors = torch.cat([one.indices for one in total]).long()
        mine = self.wire.rounded(part)
        # Locally selected and globally kept: only that was delivered.
        sent = mine.values.where(members(mine.indices.long(), survivors), 0)
        delivered: list[Sparse | Run] = [Sparse(mine.indices, sent)]
        delivered.append(rounding_errors(kept, self.wire.rounded(kept)))
        sent_bytes += split_bytes + threshold_bytes + gather_bytes
        return Delivery([*total], delivered, sent_bytes)

    def keep(self, reduced: Sparse, k: int, comm: Comm, state: Reused) -> tuple[Sparse, int]:
        """Of this worker's region what reaches the global threshold: exactly k on all workers together where
        that is taken anew, from everybody's sums.
        """
        if state.is_due(k):
            everybodys = gather_uneven(comm, reduced.values)
            lengths = [len(one) for one in everybodys]
            longest = max(lengths) * reduced.values.element_size()
            magnitudes = torch.cat(everybodys).abs()
            best = magnitudes.topk(min(k, len(magnitudes)), sorted=False).indices
            mask = torch.zeros_like(magnitudes, dtype=torch.bool).index_fill_(0, best, True)
            threshold = least(magnitudes[best]) if len(best) else magnitudes.new_zeros(())
            state.renew(threshold, k, self.threshold_every)
            reached = mask.split(lengths)[comm.rank]
            sent_bytes = cost.gather_uneven(longest, comm.size).sent_bytes
        else:
            reached, sent_bytes = reduced.values.abs() >= state.threshold, 0
        state.left -= 1
        at = host.nonzero(reached)
        return Sparse(reduced.indices[at], reduced.values[at]), sent_bytes

    def share_and_gather(
        self, kept: Sparse, n: int, k: int, comm: Comm, state: Reused
    ) -> tuple[list[Sparse], int]:
        """Everybody's to everybody, ascending over the workers, and the bytes."""
        size, rank, dtype = comm.size, comm.rank, kept.values.dtype
        mine = torch.tensor([len(kept.indices)], device=kept.indices.device)
        counts = [int(count) for count in host.read(torch.cat(comm.all_gather(mine)))]
        sent_bytes = cost.all_gather(cost.LENGTH, size).sent_bytes
        state.drift(sum(counts), k, self.drift)
        if self.balance:
            starts = [sum(counts[:one]) for one in range(size + 1)]
            shares = even_borders(sum(counts), size)
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
            sent_bytes += cost.all_to_all(away, size).sent_bytes
            parts = [self.wire.read(one, count, n, dtype) for one, count in zip(received, comes, strict=True)]
            kept = Sparse(torch.cat([p.indices for p in parts]), torch.cat([p.values for p in parts]))
            counts = differences(shares)
        if not (longest := self.wire.nbytes(max(counts), n, dtype)):
            return [kept], sent_bytes
        message = self.wire.write(kept, n)
        everybodys = comm.all_gather(torch.cat([message, message.new_zeros(longest - len(message))]))
        sent_bytes += cost.all_gather(longest, size).sent_bytes
        return [
            self.wire.read(one[: self.wire.nbytes(count, n, dtype)], count, n, dtype)
            for one, count in zip(everybodys, counts, strict=True)
        ], sent_bytes


def balanced_borders(indices: Tensor, n: int, comm: Comm) -> tuple[list[int], int]:
    """Means over the workers of the P-quantiles of what each selected; size + 1 positions, and the bytes. A
    worker that selected nothing proposes regions of equal length.
    """
    size, count = comm.size, indices.numel()
    if count:
        at = torch.tensor(even_borders(count, size)[1:-1], dtype=torch.int64, device=indices.device)
        proposed = indices.long().sort().values[at]
    else:
        proposed = torch.tensor(even_borders(n, size)[1:-1], dtype=torch.int64, device=indices.device)
    if size == 1:
        return [0, n], 0
    # Summed on the host: there is no integer that n x P could overflow (in the public code there is).
    proposals = host.read(torch.stack(comm.all_gather(proposed)))
    inner = [sum(positions) // size for positions in zip(*proposals, strict=True)]
    return [0, *inner, n], cost.all_gather(proposed.nbytes, size).sent_bytes


def overlaps(start: int, end: int, borders: Sequence[int]) -> list[int]:
    """How many of the positions from start to end lie between each border and the next."""
    return differences([min(max(border, start), end) for border in borders])
