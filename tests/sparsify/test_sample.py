"""Samples without replacement: `select.sample`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsify.select import sample
from sparsify.types import BucketContext

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 2, 3, 5, 97, 100, 1009, 65_536, 1_000_003])
def test_samples_are_distinct_and_in_range(n: int) -> None:
    for k in {1, min(n, 10), min(n, 5000), n if n < 2000 else 1}:
        for key in (0, 1, BucketContext(0, 0, 0).key(), 2**63 - 1):
            drawn = sample(n, k, key, CPU)
            assert drawn.shape == (k,)
            assert drawn.dtype == torch.int64
            assert len(drawn.unique()) == k
            assert 0 <= drawn.min() <= drawn.max() < n


@pytest.mark.parametrize("n", [1, 2, 7, 97, 100])
def test_a_sample_of_everything_is_a_permutation(n: int) -> None:
    assert sorted(sample(n, n, 5, CPU).tolist()) == list(range(n))


def test_samples_are_uniform() -> None:
    n, k, draws = 53, 5, 1500
    place = BucketContext(seed=1, rank=0, bucket=0)
    counts, pairs = torch.zeros(n), torch.zeros(n)
    for step in range(draws):
        drawn = sample(n, k, place.key(step), CPU)
        counts[drawn] += 1
        pairs[(drawn[1] - drawn[0]) % n] += 1
    for observed, expected, cells in ((counts, draws * k / n, n), (pairs[1:], draws / (n - 1), n - 1)):
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        # cells - 1 degrees of freedom: mean cells - 1, variance twice that; six standard deviations. Without
        # replacement the counts vary a little less.
        assert abs(chi_square - (cells - 1)) < 6 * (2 * (cells - 1)) ** 0.5


def test_samples_differ_between_keys_and_repeat_with_them() -> None:
    place = BucketContext(seed=1, rank=0, bucket=0)
    drawn = {tuple(sample(1000, 10, place.key(step), CPU).tolist()) for step in range(50)}
    assert len(drawn) == 50
    assert torch.equal(sample(1000, 10, place.key(), CPU), sample(1000, 10, place.key(), CPU))


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("n", [10**6, 10**9, 10**9 + 7])
def test_a_sample_takes_memory_for_k_and_the_root_of_n(n: int) -> None:
    with Largest() as seen:
        drawn = sample(n, 1000, 3, CPU)
    assert len(drawn.unique()) == 1000
    assert drawn.max() < n
    assert seen.numel <= 1000 + int(n**0.5) + 1
