"""Exclusive choices: each worker selects in its own part, so that no index is chosen twice. What DEFT,
MiCRO and ExDyna share; facts from their public code (kljp/deft, kljp/micro, kljp/exdyna).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsify import host_sync
from sparsify.checks import check_choice, check_positive
from sparsify.comm import Comm, gather_uneven
from sparsify.types import BucketContext, Part, index_dtype
from sparsify.workspace import Workspace

RULES = ("intended", "published")
# kljp/micro and kljp/exdyna, gradient_reducers.py: the band of r = k'/k, and the factors of the threshold.
ABOVE, BELOW = 1.1, 0.909
RISE, FALL = 1.005, 0.995  # outside of the band
DRIFT_UP, DRIFT_DOWN = 1.00125, 0.9987  # inside


def split_evenly(n: int, size: int) -> list[int]:
    """n as a sum of `size` numbers that differ by at most 1, larger ones first."""
    return [n // size + (at < n % size) for at in range(size)]


class Exclusive(NamedTuple):
    """The choices of all workers, worker by worker."""

    indices: Tensor  # (k',) distinct; alike on all workers
    counts: list[int]  # of each worker


def gather_exclusive(comm: Comm, chosen: Tensor, n: int) -> Exclusive:
    """Union of choices that do not overlap: nothing to sort, no index twice. One host synchronisation.

    Indices travel as int32 where that suffices (published: int64), padded to the longest list as there.
    """
    gathered = gather_uneven(comm, chosen.to(index_dtype(n)))
    return Exclusive(torch.cat(gathered), [len(indices) for indices in gathered])


@dataclass
class Threshold:
    """The threshold, alike on all workers since it is computed from gathered counts alone."""

    workspace: Workspace = field(metadata={"saved": False})
    value: float = 0.0  # 0: none yet
    step: int = 0
    blocks: list[int] = field(default_factory=list)  # of each partition; ExDyna's


@dataclass(frozen=True)
class ExclusiveThreshold(Part):
    """What MiCRO and ExDyna share: all of the own partition that reaches a threshold, which follows the
    count.

    Two host synchronisations: for this worker's choices, and for all workers' counts.

    Args:
        rule: how the threshold follows r = k'/k. Above the band it rises by 0.5 %, below it falls by 0.5 %.
            Inside, `published`, the public code: it always rises, by 0.125 %, since the test that should tell
            r > 1 from r < 1 reads r > 0. `intended`: it rises by 0.125 % if r > 1, else falls by 0.13 %;
            and k is taken as the number of workers at least, since each sends one element at least (see
            `choose`): with less, r never reaches the band and the threshold never stops rising.
        threshold: the first one; None: 1 / (2 sqrt k), the public code's.
    """

    rule: str = "intended"
    threshold: float | None = None
    shared: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, RULES)
        if self.threshold is not None:
            check_positive(threshold=self.threshold)

    def init(self, like: Tensor, context: BucketContext) -> Threshold:
        return Threshold(Workspace.searching(like, context))

    def choose(self, acc: Tensor, k: int, sizes: list[int], comm: Comm, state: Threshold) -> Exclusive:
        """Worker r looks at partition (step + r) mod P. `sizes` are the partitions', in order."""
        n, at = acc.numel(), (state.step + comm.rank) % comm.size
        start, length = sum(sizes[:at]), sizes[at]
        state.value = state.value or self.threshold or 1 / (2 * math.sqrt(k))
        if k == n:  # a threshold can't ask for everything
            chosen = torch.arange(start, start + length, device=acc.device)
        else:
            # Zeros reach no threshold, however low it has fallen.
            threshold = max(state.value, torch.finfo(acc.dtype).tiny)
            own = acc[start : start + length]
            chosen = state.workspace.kernel.above(own, None, threshold).indices.long().add_(start)
            if length and not len(chosen):  # as published: then one element, another one in each step
                chosen = host_sync.to_device([start + state.step % length], acc)
        return gather_exclusive(comm, chosen, n)

    def follow(self, count: int, k: int, size: int, state: Threshold) -> None:
        """After a step in which the workers sent `count` elements together."""
        state.step += 1
        r = count / (max(k, size) if self.rule == "intended" else k)
        if r > ABOVE:
            factor = RISE
        elif r > BELOW:
            factor = DRIFT_UP if self.rule == "published" or r > 1 else DRIFT_DOWN
        else:
            factor = FALL
        state.value *= factor
