"""What programs of the Triton kernels compete in: small inputs, many programs, against plain torch.

How the kernels are made and called is said here only, in the functions below `--- kernels`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sparsify.kernels import gpu
from sparsify.kernels.segments import GpuSegments
from sparsify.types import Sparse
from tests.sparsify.kernels.test_gpu_kernels import expected, same

Describe = Callable[[str], None]  # is told what is done, before it is done


# --- kernels
# -------------------------------------------------------------------------------------------------
@contextmanager
def little_work() -> Iterator[None]:
    """Programs take few elements at a time, so that several have something to do; new memory is not 0."""
    is_set = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN and the largest numbers
    with mock.patch.multiple(gpu, CHUNK=16, RANKED=8), warnings.catch_warnings():
        # Of NaN and overflow; and that Triton 3.6 takes arrays of one for numbers.
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.filterwarnings("ignore", "Conversion of an array with ndim", DeprecationWarning)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(is_set)


def make_alone(like: Tensor, tile: int, ties: int, bound: int | None, capacity: int | None) -> Any:
    return gpu.Gpu(like, tile=tile, sample=64, ties=ties, bound=bound, capacity=capacity)


def make_together(likes: Sequence[Tensor], tile: int) -> Any:
    return GpuSegments(likes, tile=tile, fewest=1)


def alone(kernel: Any, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
    """The k largest of a bucket."""
    found: Sparse = kernel.topk(acc, grad, k)
    return found


def together(
    kernel: Any, accs: Sequence[Tensor], grads: Sequence[Tensor] | None, ks: Sequence[int]
) -> list[Sparse]:
    """The k largest of each bucket, with indices within it."""
    found: list[Sparse] = kernel.topk(accs, [None] * len(accs) if grads is None else grads, ks)
    return found


def above(kernel: Any, acc: Tensor, grad: Tensor | None, threshold: float, strict: bool) -> Sparse:
    """All of a bucket that reaches a threshold, ascending."""
    found: Sparse = kernel.above(acc, grad, threshold, strict)
    return found


# --- cases
# -------------------------------------------------------------------------------------------------
DATA: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda n, own: torch.randn(n, generator=own),
    "few values": lambda n, own: torch.randint(-2, 3, (n,), generator=own).float(),
    "all equal": lambda n, own: torch.full((n,), -0.3),
    "all zero": lambda n, own: torch.zeros(n),
    "both zeros": lambda n, own: torch.zeros(n) * torch.randn(n, generator=own).sign(),
    "mostly zero": lambda n, own: (
        torch.randn(n, generator=own) * (torch.rand(n, generator=own) < 0.05).float()
    ),
    "Inf and NaN": lambda n, own: torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.5])[
        torch.randint(5, (n,), generator=own)
    ],
    "all NaN": lambda n, own: torch.full((n,), torch.nan),
    "all scales": lambda n, own: 10 ** (76 * torch.rand(n, generator=own) - 38),
    "denormal": lambda n, own: torch.randn(n, generator=own) * 2.0**-140,
    # Keys that differ in their last bits, counted by a third histogram, or in those and some before.
    "close together": lambda n, own: _of_keys(0x3F800000 + torch.randint(5, (n,), generator=own)),
    "near": lambda n, own: _of_keys(0x3F800000 + 700 * torch.randint(9, (n,), generator=own)),
    "equal in tiles": lambda n, own: torch.randn(n // 32 + 1, generator=own).repeat_interleave(32)[:n],
}
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 500  # elements
TOO_HIGH = 0x7F000000  # a bound


class Contest:
    """A case that follows from a seed: a kernel, and what it is asked, several times."""

    def __init__(self, seed: int, say: Describe = lambda line: None) -> None:
        self.chance, self.own, self.say = random.Random(seed), torch.Generator().manual_seed(seed), say
        self.lend: Callable[..., None] = lambda *tensors: None

    def run(self) -> None:
        """AssertionError, if what is found is not what torch finds."""
        with little_work():
            self.chance.choice((self.alone, self.alone, self.together, self.together, self.above))()

    def alone(self) -> None:
        n, tile = self.length(), self.chance.choice((32, 32, 64))
        first, ties = self.data(n), self.chance.choice((1, 2, 16, 128))
        bounds = (None, None, None, 0, 1, TOO_HIGH, TOO_HIGH, int(_keys(first)[self.chance.randrange(n)]))
        bound = self.chance.choice(bounds)
        capacity = self.chance.choice((None, None, None, self.chance.randint(1, n)))
        self.say(f"alone: {n=} {tile=} {ties=} {bound=} {capacity=}")
        kernel = make_alone(first, tile, ties, bound, capacity)
        for number, acc in enumerate(self.calls(first)):
            grad = self.gradient(acc)
            want = _added(acc, grad)
            k = self.k(want)
            self.say(f"{k=}, gradient: {None if grad is None else grad.dtype}")
            _check(alone(kernel, acc, grad, k), acc, want, k)
            assert kernel.stats().steps == number + 1

    def together(self) -> None:
        sizes = [self.length() for _ in range(self.chance.choice((1, 2, 3)))]
        tile = self.chance.choice((64, 128))
        self.say(f"together: {sizes=} {tile=}")
        firsts = [self.data(n) for n in sizes]
        kernel = make_together(firsts, tile)
        for accs in zip(*map(self.calls, firsts), strict=False):
            kinds = self.chance.choice((GRADIENTS[:1], GRADIENTS[1:2], GRADIENTS, ()))
            grads = [self.gradient_of(acc, kinds) for acc in accs] if kinds else None
            added: Sequence[Tensor | None] = [None] * len(accs) if grads is None else grads
            wants = [_added(acc, grad) for acc, grad in zip(accs, added, strict=True)]
            ks = [self.k(want, 0) for want in wants]
            self.say(f"{ks=}, gradients: {[None if grad is None else grad.dtype for grad in added]}")
            self.lend(*accs, *added)
            found = together(kernel, accs, grads, ks)
            assert len(found) == len(accs)
            for part, acc, want, k in zip(found, accs, wants, ks, strict=True):
                _check(part, acc, want, k)

    def above(self) -> None:
        n, tile = self.length(), self.chance.choice((32, 32, 64))
        first = self.data(n)
        self.say(f"above: {n=} {tile=}")
        kernel = make_alone(first, tile, 16, None, None)
        for acc in self.calls(first):
            grad, strict = self.gradient(acc), self.chance.random() < 0.5
            want = _added(acc, grad)
            threshold = self.chance.choice((0.0, 0.3, float(want[self.chance.randrange(n)].abs())))
            self.say(f"{threshold=} {strict=}, gradient: {None if grad is None else grad.dtype}")
            indices, values = above(kernel, acc, grad, threshold, strict)
            reach = (want.abs() > threshold) if strict else (want.abs() >= threshold)
            assert same(acc, want)
            assert torch.equal(indices.long(), reach.nonzero().squeeze(1))
            assert same(values, want[indices.long()])

    def length(self) -> int:
        return self.chance.choice((self.chance.randint(1, LONGEST), LONGEST, LONGEST, LONGEST, 257, 64, 1))

    def k(self, want: Tensor, least: int = 1) -> int:
        """Any; often one that takes all of some equal elements, where each count that is lost matters."""
        n = len(want)
        if self.chance.random() < 0.5:
            return int((_keys(want) >= _keys(want)[self.chance.randrange(n)]).sum())
        return max(least, min(n, self.chance.choice((least, 1, n, n // 2, self.chance.randint(1, n), 7))))

    def data(self, n: int) -> Tensor:
        kind = self.chance.choice(list(DATA))
        self.say(f"{n} elements: {kind}")
        return DATA[kind](n, self.own)

    def calls(self, first: Tensor) -> Iterator[Tensor]:
        """What is accumulated in, at each call of one kernel."""
        yield first
        for _ in range(self.chance.choice((0, 1, 2))):
            yield first if self.chance.random() < 0.5 else self.data(len(first))

    def gradient(self, acc: Tensor) -> Tensor | None:
        """A gradient of any type, or none."""
        return None if self.chance.random() < 0.4 else self.gradient_of(acc, GRADIENTS)

    def gradient_of(self, acc: Tensor, kinds: Sequence[torch.dtype]) -> Tensor:
        """A gradient of one of these types."""
        acc.nan_to_num_(0.5, posinf=torch.inf, neginf=-torch.inf)  # NaN + 1 may be any NaN
        return (2 * torch.randn(len(acc), generator=self.own)).round().to(self.chance.choice(kinds))


def _of_keys(keys: Tensor) -> Tensor:
    return keys.int().view(torch.float32)


def _keys(data: Tensor) -> Tensor:
    return data.view(torch.int32) & 0x7FFFFFFF


def _added(acc: Tensor, grad: Tensor | None) -> Tensor:
    return acc.clone() if grad is None else acc + grad.float()


def _check(found: Sparse, acc: Tensor, want: Tensor, k: int) -> None:
    assert same(acc, want)
    assert found.indices.shape == found.values.shape == (k,)
    assert torch.equal(found.indices.long().sort().values, expected(want, k))
    assert same(found.values, want[found.indices.long()])
