"""Averages of rounded elements: twice the rounding of one, whatever the number of workers; nothing lost."""

from __future__ import annotations

import pytest
import torch

from sparsify.methods.qgz import regions
from tests.sparsify.laws import build, gradient, live

SHAPES = [(40, 30), (1001,)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_average_errs_by_at_most_half_a_level_of_each_rounding(bits: int, size: int) -> None:
    lives = live(build("qgz", scope="global", bits=bits, block=64), size, steps=1, shapes=SHAPES)
    mean = torch.stack([lived.gradients[0] for lived in lives]).mean(0)
    largest = max(lived.gradients[0].abs().max() for lived in lives)
    levels = 2 ** (bits - 1) - 1
    error = (lives[0].updates[0] - mean).abs().max()
    assert 0 < error <= 2 * 0.5 * 1.0001 * largest / levels  # scales travel as fp32


@pytest.mark.parametrize("size", [1, 3, 4])
def test_with_a_residual_the_sums_rounding_is_kept_by_its_owner(size: int) -> None:
    """Updates and residuals add up to the gradients, over many steps."""
    lives = live(build("qgz", scope="global", block=64, feedback="gradient"), size, steps=8, shapes=SHAPES)
    seen = sum(sum(lived.gradients) for lived in lives)
    kept = sum(lived.residual for lived in lives)
    torch.testing.assert_close(size * sum(lives[0].updates) + kept, seen, rtol=1e-10, atol=1e-10)


def test_regions_are_whole_blocks_and_may_be_empty() -> None:
    assert regions(1000, 3, 256) == [512, 488, 0]
    assert regions(10, 4, 4) == [4, 4, 2, 0]
    assert regions(0, 2, 256) == [0, 0]


def test_bytes_are_those_of_a_rounded_all_reduce() -> None:
    """2 (P-1)/P of half a byte an element, and a scale of 4 bytes for every 256."""
    n, size = 4096, 4
    lives = live(build("qgz", scope="global"), size, steps=1, shapes=[(n,)])
    assert lives[0].wire_bytes == [2 * (size - 1) * (n // size // 2 + n // size // 256 * 4)]


def test_a_block_of_zeros_stays_zero_and_a_nan_shows() -> None:
    def zero(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def broken(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        values = gradient(rank, step, shape)
        values.view(-1)[0] = torch.nan
        return values

    method = build("qgz", scope="global", block=64)
    assert not live(method, 2, steps=1, make=zero, shapes=SHAPES)[0].updates[0].any()
    assert live(method, 2, steps=1, make=broken, shapes=SHAPES)[0].updates[0].isnan().any()
