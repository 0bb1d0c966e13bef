from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.methods.micro import ExclusiveThresholdSelector, SharedThreshold
from sparsify.ranges import Density, ImplementationVariant, PositiveFloat, PositiveInt, Scope, check_arguments
from sparsify.select import split_evenly
from sparsify.types import Selection

ALIGNMENT = 32  # kljp/exdyna: block sizes are multiples of it
# Loads in units of their mean, from which on one block moves.
OVERLOADED, UNDERLOADED = 1.05, 0.95238
LEAST = 4  # a partition keeps 1/4 of the blocks that it would have if all had equally many


@check_arguments
def exdyna(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    rule: ImplementationVariant = "intended",
    threshold: PositiveFloat | None = None,
    blocks: PositiveInt = 1024,
) -> Sparsifier:
    """ExDyna: MiCRO with partitions that follow the load. Yoon and Oh, CCGrid 2024, arXiv:2402.13781.

    Two host synchronisations per step and bucket. Slow start, and a threshold that rises until as much leaves
    as comes in, as in `micro`.

    Args:
        density: k/n, the share of the elements that all workers send together in a step.
        rule: how the threshold moves: `intended`, or `published`, as the public code does; see micro.
        threshold: the first one; None: 1 / (2 sqrt k).
        blocks: how many a bucket is cut into. Their size is a multiple of 32, and what is left over belongs
            to the last partition. A bucket of fewer than 32 x blocks elements, where the published code
            divides by zero, has blocks of 32, or of n / (4 P) where that is smaller, and fewer of them.
    """
    select = ExDyna(rule, threshold, blocks)
    return Sparsifier(density, select, ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass(frozen=True)
class ExDyna(ExclusiveThresholdSelector):
    """P runs of blocks, which the workers take in turns."""

    blocks: PositiveInt = 1024

    def select(self, acc: Tensor, k: int, comm: Comm, state: SharedThreshold) -> Selection:
        n, size = acc.numel(), comm.size
        block = block_size(n, self.blocks, size)
        # Where the block size is the published one, more than `blocks` fit once the size is rounded down.
        number = min(self.blocks, n // block)
        state.blocks = state.blocks or split_evenly(number, size)
        sizes = [block * held for held in state.blocks]
        sizes[-1] += n - block * number
        union = self.select_in_partition(acc, k, sizes, comm, state)
        if k < n:
            loads = [0] * size
            for rank, count in enumerate(union.counts):
                loads[(state.step + rank) % size] = count
            rebalance(state.blocks, loads, block * sum(loads) / n)
        self.adapt_threshold(len(union.indices), k, size, state)
        return Selection(union.indices)


def block_size(n: int, blocks: int, size: int) -> int:
    """Elements of a block, at least 1."""
    return n // blocks // ALIGNMENT * ALIGNMENT or max(1, min(ALIGNMENT, n // (LEAST * size)))


def rebalance(blocks: list[int], loads: list[int], load_of_block: float) -> None:
    """Between neighbours of which one selected too much and the other too little, one block moves. In place;
    the load that is expected to move with it is accounted for before the next pair is looked at.
    """
    mean = sum(loads) / len(loads)  # published: cut to an integer, which is 0 where few are selected
    least = sum(blocks) / (LEAST * len(blocks))
    for left in range(len(blocks) - 1):
        right = left + 1
        for giver, taker in ((left, right), (right, left)):
            if (
                loads[giver] > OVERLOADED * mean
                and loads[taker] < UNDERLOADED * mean
                and blocks[giver] - 1 >= least
            ):
                blocks[giver] -= 1
                blocks[taker] += 1
                loads[giver] -= int(load_of_block)
                loads[taker] += int(load_of_block)
                break  # the pair is done; else what was moved might come back
