"""EXAMPLE: what it does, in a line; whose idea it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.ranges import Density, Scope
from sparsify.select import Draws, ExactlyK
from sparsify.types import BucketContext, Selection


# The signature is the configuration: method.density=0.01 stands behind `run method=example`. Types are
# checked before anything starts; sparsify/ranges.py has more of them, and Literal["l1", "l2"] is one, too.
def example(density: Density = 0.001, scope: Scope = "global") -> Sparsifier:
    """Every (n/k)-th element from a random start, the same on all workers, with error feedback.

    Of a bucket with n elements each of the P workers sends k = density n:

        acc    <- residual + gradient          # ErrorFeedback
        S      <- indices of k elements        # the selector below: what you change
        update <- sum over workers of acc[S], over P, and 0 elsewhere       # AllReduce
        residual <- acc, and 0 at S            # what was sent is not owed any more

    Args:
        density: k/n, the share of a bucket that each worker sends.
        scope: what is one bucket: `global` (the whole model), `layer`, or so many MB.
    """
    # Workers that choose alike need no indices, and add their values up (AllReduce). Where each chooses for
    # itself, say `shared = False` below, and take AllGather() of the same module.
    return Sparsifier(density, EveryNth(), ErrorFeedback(), AllReduce(), scope)


@dataclass(frozen=True)
class EveryNth(ExactlyK):
    """Which k of n: every (n/k)-th, from a random start."""

    shared: ClassVar[bool] = True  # all workers choose alike

    def init(self, like: Tensor, context: BucketContext) -> Draws:
        """The state of a bucket; it is saved with checkpoints."""
        return Draws(context.shared)  # the same random numbers on every worker

    def select(self, acc: Tensor, k: int, comm: Comm, state: Draws) -> Selection:
        """acc (n,) -> (k,) distinct indices. `acc` is not to be written to."""
        n = acc.numel()
        teeth = torch.arange(k, device=acc.device) * (n // k)
        return Selection((state.key() + teeth) % n)
