from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import Density, NonNegativeInt, PositiveInt, Scope, check_arguments
from sparsify.select import Selector
from sparsify.types import BucketContext, BucketStep, CollectiveCall, Selection

BlockScore = Literal["l1", "l2", "max", "count"]
ORDERS = {"l1": 1, "l2": 2, "max": math.inf}  # the norm that each of these is


@check_arguments
def stable_topk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    block: PositiveInt = 10_000,
    every: PositiveInt = 100,
    score: BlockScore = "l1",
) -> Sparsifier:
    """Stable Top-K: regions of large gradients persist, so they are chosen rarely. Zhang, TACC (slides; no
    paper or code is known).

    The slides publish no constants: a figure shows buckets of 10000, nothing says how often indices are
    chosen anew. They leave open, and are answered here: how a bucket is scored (`score`, summed over the
    workers); who chooses (all together: scores are allreduced, so all workers choose alike and values
    travel without indices); in what k is counted (elements: k // block buckets); what becomes of residuals
    when the choice changes (nothing: they stay, and those of a newly chosen bucket, up to `every` steps of
    gradients, are all delivered at once). A bucket that is never chosen starves: its residual grows, until
    its score wins at the next choice. At a learning rate tuned for dense training both may ask for a smaller
    one, or a smaller `every`.

    Host synchronisations: none; where buckets do not divide n, one in each step that chooses.

    Args:
        density: k/n, the share of the elements that the workers send at most, all of them the same ones.
        block: B, elements of a bucket; the last may be shorter. Never more than k, so that at most k elements
            are sent: choose it well below k, else the choice is coarse (one bucket, at k < 2 block).
        every: N, steps that use the same choice. Another k (in a density warm-up) asks for another choice.
        score: `l1`, sums of magnitudes; `l2`, of squares; `max`, the largest magnitudes, summed over workers;
            or `count`, how many of a worker's k largest lie in the bucket, which takes a top-k over
            everything.
    """
    select = StableBlocks(block, every, score)
    return Sparsifier(density, select, ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass
class BlockChoice:
    """Indices that were chosen, and for how long."""

    workspace: Workspace = field(metadata={"saved": False})
    indices: Tensor = field(metadata={"any_size": True})  # (k',)
    k: NonNegativeInt = 0  # for which; 0: nothing chosen yet
    left: NonNegativeInt = 0  # steps until a new choice


@dataclass(frozen=True)
class StableBlocks(Selector):
    """The k // block buckets of highest score over all workers, chosen once in `every` steps."""

    block: PositiveInt = 10_000
    every: PositiveInt = 100
    score: BlockScore = "l1"
    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> BlockChoice:
        nothing = torch.empty(0, dtype=torch.int64, device=like.device)
        return BlockChoice(Workspace.with_kernel(like, context), nothing)

    def select(self, acc: Tensor, k: int, comm: Comm, state: BlockChoice) -> Selection:
        if not state.left or state.k != k:
            state.indices = self.choose_indices(acc, k, comm, state.workspace)
            state.k, state.left = k, self.every
        state.left -= 1
        return Selection(state.indices)

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        blocks, is_due = (
            -(-bucket_step.n // min(self.block, bucket_step.k)),
            bucket_step.step % self.every == 0,
        )
        return [CollectiveCall("all_reduce", blocks * bucket_step.value_dtype.itemsize)] if is_due else []

    def choose_indices(self, acc: Tensor, k: int, comm: Comm, workspace: Workspace) -> Tensor:
        """(k',) indices of the chosen buckets, ascending."""
        n, block = acc.numel(), min(self.block, k)
        scores = comm.all_reduce(self.score_blocks(acc, k, block, workspace))
        num_chosen = k // block if k < n else len(scores)
        # Stable: of equal scores the first wins, on every worker.
        best = scores.sort(descending=True, stable=True).indices[:num_chosen].sort().values
        indices = (best[:, None] * block + torch.arange(block, device=acc.device)).flatten()
        if last_block_deficit(n, block) and host_sync.to_host(best[-1]) == len(scores) - 1:
            indices = indices[: len(indices) - last_block_deficit(n, block)]
        return indices

    def score_blocks(self, acc: Tensor, k: int, block: int, workspace: Workspace) -> Tensor:
        """(n,) -> (number of buckets,): this worker's."""
        n = acc.numel()
        whole, scores = n // block, acc.new_zeros(-(-n // block))
        if self.score == "count":
            mine = workspace.kernel.topk(acc, None, k).indices
            return scores.index_add_(0, mine // block, scores.new_ones(1).expand(k))
        order = ORDERS[self.score]  # one pass each, and nothing of size n is written
        torch.linalg.vector_norm(acc[: whole * block].view(whole, block), order, dim=1, out=scores[:whole])
        if whole < len(scores):
            torch.linalg.vector_norm(acc[whole * block :], order, dim=0, out=scores[whole])
        return scores.square_() if self.score == "l2" else scores


def last_block_deficit(n: int, block: int) -> int:
    """Number of elements that the last bucket is short of."""
    return -n % block
