"""Inputs of searches and their right results: all magnitudes sorted, equal ones by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sparsify.types import SparseVector

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of the same width
K = 30  # elements to choose, to which `GROUPS` are made
INF = 0x7F800000  # keys: of infinity,
LARGEST = INF - 1  # of the largest number,
NORMAL = 0x00800000  # and of the least that is not denormal
MOST = 0x7FFFFFFF  # of NaN, which all above infinity are


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=generator(seed))


def of_keys(groups: Sequence[tuple[int, int, int]], n: int) -> Tensor:
    """Return (n,) values of both signs, in random places, whose keys lie in the given ranges.

    Each group (count, least, most) gives so many keys; a count of 0 stands for all that are left.
    """
    chance = generator(n)
    keys = torch.empty(0, dtype=torch.int64)
    for count, least, most in groups:
        left = max(0, n - len(keys))
        keys = torch.cat([keys, torch.randint(least, most + 1, (count or left,), generator=chance)])
    keys = keys[torch.randperm(len(keys), generator=chance)[:n]]
    signs = torch.randint(2, (n,), generator=chance) << 31
    return (keys - signs).to(torch.int32).view(torch.float32)


def not_finite(n: int) -> Tensor:
    made = normal(n)
    made[n // 9 :][:4] = torch.inf
    made[n // 7 :][:3] = -torch.inf
    made[n // 2] = torch.nan
    return made


# Where a bound of the k-th can be in doubt: numbers that no comparison or subtraction holds for, with the
# k-th among them, just above or just below.
REST = (0, 0x38000000, 0x40000000)  # from 3e-5 to 2
ZEROS = (0, 0, 0)
GROUPS: dict[str, list[tuple[int, int, int]]] = {
    "all not a number": [(0, INF + 1, MOST)],
    "just k infinite": [(K, INF, INF), REST],
    "ten times k infinite": [(10 * K, INF, INF), REST],
    "infinite the k-th, not a number above": [(K // 2, INF + 1, MOST), (K, INF, INF), REST],
    "finite the k-th, infinite above": [(K // 2, INF, INF), (K, LARGEST - 1, LARGEST), REST],
    "one not a number among zeros": [(1, INF + 1, MOST), ZEROS],
    "all denormal": [(0, 1, NORMAL - 1)],
    "denormal the k-th": [(K // 2, NORMAL, NORMAL), (K, NORMAL - 2, NORMAL - 1), (0, 0, 2)],
    "the least among zeros": [(K // 2, 1, 1), ZEROS],
    "any bits": [(0, 0, MOST)],
    # Keys that differ in their last bits, counted by a third histogram.
    "close together": [(0, 0x3F800000, 0x3F800004)],
}
INPUTS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "heavy tails": lambda n: normal(n) ** 5,
    "few values": lambda n: (2 * normal(n)).round(),
    "all equal": lambda n: torch.full((n,), -0.3),
    "all zero": torch.zeros,
    "mostly zero": lambda n: normal(n) * (normal(n, 1) > 1.6),
    "only the last": lambda n: torch.zeros(n).index_fill_(0, torch.tensor([n - 1]), -7.0),
    "ascending": lambda n: normal(n).sort().values,
    "huge": lambda n: normal(n).clamp(-3, 3) * 1e38,
    "all scales": lambda n: normal(n).sign() * 10 ** (76 * torch.rand(n, generator=generator(4)) - 38),
    "one layer has it all": lambda n: normal(n) * (torch.arange(n) < n / 50),
    "equal in tiles": lambda n: normal(n // 32 + 1).repeat_interleave(32)[:n],
    "not finite": not_finite,
    **{name: partial(of_keys, groups) for name, groups in GROUPS.items()},
}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch, and kernels with it, work in so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keys_of(x: Tensor) -> Tensor:
    """Return the bits of |x| as whole numbers."""
    integer = INTEGERS[x.dtype]
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def largest(acc: Tensor, k: int) -> Tensor:
    """Return the indices (k,) of the largest magnitudes, ascending."""
    return keys_of(acc).sort(descending=True, stable=True).indices[:k].sort().values


def is_same(one: Tensor, other: Tensor) -> bool:
    """Compare bit by bit, for NaN equals nothing."""
    integer = INTEGERS[one.dtype]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def sum_of(acc: Tensor, grad: Tensor | None) -> Tensor:
    return acc.clone() if grad is None else acc + grad.to(acc.dtype)


def check_topk(kernel: Any, acc: Tensor, grad: Tensor | None, k: int) -> SparseVector:
    """Check what a kernel finds of a bucket, and what it adds to it."""
    expected = sum_of(acc, grad)
    found: SparseVector = kernel.topk(acc, grad, k)
    check_found(found, acc, expected, k, is_ordered=kernel.name != "triton")
    return found


def check_joint(
    kernel: Any, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]
) -> SparseVector:
    """Check what a kernel finds of several buckets; gradients may come in pieces that lie across them."""
    sizes = [acc.numel() for acc in accs]
    added = torch.cat([grad.float() for grad in grads]).split(sizes) if grads else [None] * len(accs)
    expected = list(map(sum_of, accs, added))
    found: SparseVector = kernel.topk(accs, grads, ks)
    parts = zip(found.indices.split(list(ks)), found.values.split(list(ks)), strict=True)
    bases = accumulate(sizes, initial=0)
    for (indices, values), acc, sums, k, base in zip(parts, accs, expected, ks, bases, strict=False):
        check_found(SparseVector(indices - base, values), acc, sums, k)
    return found


def check_found(found: SparseVector, acc: Tensor, expected: Tensor, k: int, is_ordered: bool = False) -> None:
    indices = found.indices.long()
    assert is_same(acc, expected)
    assert found.indices.dtype == torch.int32
    assert torch.equal(indices if is_ordered else indices.sort().values, largest(expected, k))
    assert is_same(found.values, expected[indices])


def check_above(
    kernel: Any, acc: Tensor, grad: Tensor | None, threshold: float | Tensor, strict: bool = False
) -> None:
    """Check what a kernel finds beyond a threshold, which is rounded as the bucket is; indices ascend."""
    expected = sum_of(acc, grad)
    least = torch.as_tensor(threshold, dtype=acc.dtype, device=acc.device)
    reach = expected.abs() > least if strict else expected.abs() >= least
    indices, values = kernel.above_threshold(acc, grad, threshold, strict)
    assert is_same(acc, expected)
    assert torch.equal(indices.long(), reach.nonzero().squeeze(1))
    assert is_same(values, expected[reach])


def check_views(
    make: Callable[[Tensor], Any],
    draw: Callable[[int, int], Tensor],
    n: int = 1500,
    has_gaps: bool = True,
) -> None:
    """Check what a kernel finds of views that begin anywhere and leave gaps, in which it writes nothing."""
    for start, step in ((1, 1), (3, 1), (1, 2), (1, 3)):
        own_step = step if has_gaps else 1
        whole, other = (draw(3 * n + 3, seed) for seed in (0, 1))
        acc = whole[start::own_step][:n]
        grad = other[start::step][:n]
        expected = whole.clone()
        check_topk(make(acc.clone()), acc, grad, K)
        check_above(make(acc.clone()), acc, grad, 1.0)
        expected[start::own_step][:n] = acc
        assert torch.equal(whole, expected)


def check_add(
    kernel: Any, memories: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float, clears: bool = False
) -> None:
    """Check that memories are what they are when torch adds each part times alpha, in turn, to the bit."""
    expected = torch.zeros_like(torch.cat([*memories])) if clears else torch.cat([*memories])
    for indices, values in parts:
        expected[indices.long()] += values.float() * alpha
    kernel.add(memories, parts, alpha, clears)
    assert is_same(torch.cat([*memories]), expected)
