from collections.abc import Sequence
from dataclasses import dataclass

from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.methods.micro import ExclusiveThresholdSelector, SharedThreshold
from sparsify.ranges import Density, ImplementationVariant, PositiveFloat, PositiveInt, Scope, check_arguments
from sparsify.select import split_evenly

# The public code is kljp/exdyna.
ALIGNMENT = 32  # block sizes are multiples of it
# Loads in units of their mean, from which on one block moves.
OVERLOADED = 1.05
UNDERLOADED = 0.95238
MIN_BLOCKS_DIVISOR = 4  # a partition keeps 1/4 of the blocks that it would have if all had equally many


@check_arguments
def exdyna(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    rule: ImplementationVariant = "intended",
    threshold: PositiveFloat | None = None,
    blocks: PositiveInt = 1024,
) -> Sparsifier:
    """ExDyna: MiCRO with partitions that follow the load. Yoon and Oh 2024 (CCGrid).

    arXiv:2402.13781. Step t on worker r of P, with the residual e:

    1. acc = e + gradient
    2. The blocks of a bucket are divided into P partitions. In partition (t + r) mod P of acc, worker r
       chooses the elements whose magnitude reaches the threshold.
    3. The indices are all-gathered.
    4. An all-reduce averages the values at all these indices; e keeps the rest of acc.
    5. A partition in which too much was chosen gives a block to a neighbour in which too little was. The
       threshold rises if more than k elements were sent, and falls if fewer were.

    Two host synchronisations per step and bucket. The start is slow, and the threshold rises until as much
    leaves the residual as comes in, as in `micro`.

    Args:
        density: k/n, the share of the elements that all workers send together in a step. Lower: fewer bytes,
            more error.
        rule: how the threshold moves: `intended`, or `published`, as the public code does; see `micro`.
        threshold: the first threshold; None for 1 / (2 sqrt k). Higher: fewer elements in the first steps.
        blocks: how many blocks a bucket has. More: partitions follow the load in smaller moves. Their size is
            a multiple of 32, and the elements that are left over belong to the last partition. A bucket of
            fewer than 32 x blocks elements, where the published code divides by zero, has fewer blocks: of 32
            elements, or of n / (4 P) where that is smaller.
    """
    select = ExDyna(rule, threshold, blocks)
    return Sparsifier(density, select, ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass(frozen=True)
class ExDyna(ExclusiveThresholdSelector):
    """A selector whose partitions are P runs of blocks, which the workers take in turns."""

    blocks: PositiveInt = 1024

    def partition_sizes(self, n: int, size: int, state: SharedThreshold) -> list[int]:
        # Where the block size is the published one, more than `blocks` fit once it is rounded down.
        block = block_size(n, self.blocks, size)
        num_blocks = min(self.blocks, n // block)
        state.blocks = state.blocks or split_evenly(num_blocks, size)
        sizes = [block * count for count in state.blocks]
        sizes[-1] += n - block * num_blocks
        return sizes

    def move_borders(self, counts: list[int], n: int, state: SharedThreshold) -> None:
        size = len(counts)
        # Worker r had partition (step + r) mod P.
        loads = [counts[(partition - state.step) % size] for partition in range(size)]
        move_blocks_in_place(state.blocks, loads, block_size(n, self.blocks, size) * sum(loads) / n)


def block_size(n: int, blocks: int, world_size: int) -> int:
    """Return the number of elements of a block, at least 1."""
    aligned = n // blocks // ALIGNMENT * ALIGNMENT
    return aligned or max(1, min(ALIGNMENT, n // (MIN_BLOCKS_DIVISOR * world_size)))


def move_blocks_in_place(blocks: list[int], loads: list[int], block_load: float) -> None:
    """Move one block between neighbours of which one selected too much and the other too little, in place.

    The load that is expected to move with it is accounted for before the next pair is looked at.

    Args:
        blocks: number of blocks of each partition.
        loads: number of elements selected in each partition.
        block_load: number of elements selected in a block, on average.
    """
    mean = sum(loads) / len(loads)  # published: cut to an integer, which is 0 where few are selected
    min_blocks = sum(blocks) / (MIN_BLOCKS_DIVISOR * len(blocks))
    for left in range(len(blocks) - 1):
        right = left + 1
        for giver, taker in ((left, right), (right, left)):
            if (
                loads[giver] > OVERLOADED * mean
                and loads[taker] < UNDERLOADED * mean
                and blocks[giver] - 1 >= min_blocks
            ):
                blocks[giver] -= 1
                blocks[taker] += 1
                loads[giver] -= int(block_load)
                loads[taker] += int(block_load)
                break  # the pair is done; else what was moved might come back
