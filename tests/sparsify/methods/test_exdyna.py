"""ExDyna against a transcription of its algorithm."""

from __future__ import annotations

import pytest
import torch

import sparsify
from sparsify.methods.exdyna import ExDyna, block_size, rebalance
from sparsify.select import split_evenly
from tests.sparsify.laws import gradient, live
from tests.sparsify.methods.replays import equal_updates, exclusive_by_the_paper, gradients_of, select


@pytest.mark.parametrize("rule", ["intended", "published"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_exdyna_is_the_papers_algorithm_and_blocks_move(size: int, rule: str) -> None:
    def skewed(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return gradient(rank, step, shape) * torch.linspace(0.5, 2, shape[0]).double()

    method = sparsify.build("exdyna", density=0.1, threshold=3.0, rule=rule, blocks=20)
    lived = live(method, size, steps=15, make=skewed, shapes=[(1330,)])
    updates, sizes = exclusive_by_the_paper(gradients_of(lived), 0.1, 3.0, rule, 20)
    equal_updates(lived, updates, rtol=1e-14, atol=0)
    assert size == 1 or sizes[-1][-1] < sizes[0][-1]  # the last partition has the largest gradients
    assert all(sum(partition) == 1330 for partition in sizes)


def test_exdynas_blocks_are_multiples_of_32_and_the_last_partition_has_the_rest() -> None:
    assert block_size(14_728_266, 1024, 8) == 14_368  # VGG-16
    assert block_size(32 * 1024, 1024, 8) == 32
    assert block_size(32 * 1024 - 1, 1024, 8) == 32  # fewer blocks
    assert block_size(100, 1024, 8) == 3
    assert block_size(5, 1024, 8) == 1
    assert split_evenly(10, 4) == [3, 3, 2, 2]


def test_one_block_moves_between_neighbours_of_which_one_has_too_much_and_the_other_too_little() -> None:
    blocks = [8, 8, 8]
    rebalance(blocks, [20, 10, 6], 1.0)  # mean 12: the second pair are both below it
    assert blocks == [7, 9, 8]
    rebalance(blocks, [6, 20, 10], 1.0)
    assert blocks == [8, 7, 9]  # one to the left, one to the right
    fixed = [8, 8, 8]
    rebalance(fixed, [12, 12, 12], 1.0)
    assert fixed == [8, 8, 8]
    least = [2, 8, 14]  # a quarter of 8 stays
    rebalance(least, [30, 3, 3], 1.0)
    assert least == [2, 8, 14]


def test_exdyna_balances_what_micro_leaves_unbalanced() -> None:
    """load_inc of the public code: P max(k_i) / k - 1."""
    n, scale = 3200, torch.linspace(0.2, 3, 3200).double()
    accs = [gradient(rank, 0, (n,)) * scale for rank in range(4)]
    _, states = select(ExDyna(threshold=3.0, blocks=100), 4, accs, 320, steps=150)

    def imbalance(blocks: list[int]) -> float:
        large = (torch.stack(accs).abs() >= 3).sum(dim=0)
        loads = [int(part.sum()) for part in large.split([32 * held for held in blocks])]
        return 4 * max(loads) / sum(loads) - 1

    assert imbalance([25, 25, 25, 25]) > 1
    assert imbalance(states[0].blocks) < 0.1
