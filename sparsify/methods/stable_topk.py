from __future__ import annotations

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
from sparsify.methods._quantise import block_norms, num_blocks
from sparsify.ranges import Density, NonNegativeInt, PositiveInt, Scope, check_arguments
from sparsify.select import Selector
from sparsify.types import BucketContext, BucketStep, CollectiveCall, Selection

BlockScore = Literal["l1", "l2", "max", "count"]


@check_arguments
def stable_topk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    block: PositiveInt = 10_000,
    every: PositiveInt = 100,
    score: BlockScore = "l1",
) -> Sparsifier:
    """Stable Top-K: regions of large gradients persist, so they are chosen rarely. Zhang, TACC (slides).

    No paper or code is known. A step of a worker:

    1. acc = residual + gradient
    2. Every `every` steps: score each block of `block` elements of acc, all-reduce the scores, and choose the
       k // block blocks of highest score.
    3. All-reduce the values of the chosen blocks, without indices, since all workers choose alike.
    4. The residual keeps all other elements of acc.

    The slides publish no constants: a figure shows blocks (there: buckets) of 10000 elements, and nothing
    says how often blocks are chosen. Also open in the slides, and ours: the score (`score`, summed over the
    workers); that k counts elements; that residuals stay when the choice changes. So a newly chosen block
    delivers up to `every` steps of gradients at once, and a block that is never chosen starves: its residual
    grows until its score wins. With a learning rate tuned for dense training, both may need a smaller
    learning rate or a smaller `every`.

    No host synchronisation, except for one in each step that chooses where blocks do not divide n.

    Args:
        density: k/n, the largest share of the elements that all workers send. Lower: fewer bytes, more error.
        block: B, the number of elements of a block; the last may be shorter. At most k elements are sent, so
            a block never has more than k: choose it well below k, else the choice is coarse (one block if
            k < 2 block).
        every: N, the number of steps that use one choice. Another k (in a density warm-up) needs another
            choice. Higher: less time to choose, and staler blocks.
        score: `l1`, the sum of magnitudes; `l2`, of squares; `max`, the largest magnitude; or `count`, the
            number of a worker's k largest elements in the block, which takes a top-k over all elements.
    """
    selector = StableBlocks(block, every, score)
    return Sparsifier(density, selector, ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass
class BlockChoice:
    """The indices of the chosen blocks, and the number of steps left until the next choice."""

    workspace: Workspace = field(metadata={"saved": False})
    indices: Tensor = field(metadata={"any_size": True})  # (k',)
    k: NonNegativeInt = 0  # the k of the choice; 0 before the first
    left: NonNegativeInt = 0


@dataclass(frozen=True)
class StableBlocks(Selector):
    """A selector of the k // block blocks of highest score over all workers, chosen once in `every` steps."""

    block: PositiveInt = 10_000
    every: PositiveInt = 100
    score: BlockScore = "l1"
    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> BlockChoice:
        no_indices = torch.empty(0, dtype=torch.int64, device=like.device)
        return BlockChoice(Workspace.with_kernel(like, context), no_indices)

    def select(self, acc: Tensor, k: int, comm: Comm, state: BlockChoice) -> Selection:
        if not state.left or state.k != k:
            state.indices = self.choose_indices(acc, k, comm, state.workspace)
            state.k = k
            state.left = self.every
        state.left -= 1
        return Selection(state.indices)

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        if bucket_step.step % self.every:
            return []
        num_scores = num_blocks(bucket_step.n, min(self.block, bucket_step.k))
        return [CollectiveCall("all_reduce", num_scores * bucket_step.value_dtype.itemsize)]

    def choose_indices(self, acc: Tensor, k: int, comm: Comm, workspace: Workspace) -> Tensor:
        """Choose blocks with all workers; return the indices (k',) of their elements, ascending."""
        n, block = acc.numel(), min(self.block, k)
        scores = comm.all_reduce(self.score_blocks(acc, k, block, workspace))
        num_chosen = k // block if k < n else len(scores)
        # The sort is stable, so that of equal scores the first wins, on every worker.
        chosen = scores.sort(descending=True, stable=True).indices[:num_chosen].sort().values
        indices = (chosen[:, None] * block + torch.arange(block, device=acc.device)).flatten()
        num_missing = -n % block  # elements that the last block is short of
        if num_missing and host_sync.to_host(chosen[-1]) == len(scores) - 1:
            indices = indices[: len(indices) - num_missing]
        return indices

    def score_blocks(self, acc: Tensor, k: int, block: int, workspace: Workspace) -> Tensor:
        """Return this worker's score of each block of acc (n,)."""
        if self.score == "count":
            scores = acc.new_zeros(num_blocks(acc.numel(), block))
            largest = workspace.kernel.topk(acc, None, k).indices
            return scores.index_add_(0, largest // block, scores.new_ones(1).expand(k))
        # Norms are computed in one pass, without writing a tensor of n elements.
        scores = block_norms(acc, block, self.score)
        return scores.square_() if self.score == "l2" else scores
