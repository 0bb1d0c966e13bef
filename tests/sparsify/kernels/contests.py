"""What programs of the Triton kernels compete in: small inputs, many programs, against the oracle."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sparsify.kernels import triton_search
from sparsify.kernels.triton_group_search import TritonGroupSearch
from tests.sparsify.kernels.oracle import (
    INPUTS,
    check_above,
    check_add,
    check_joint,
    check_topk,
    keys_of,
    sum_of,
)

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 500  # elements
UNREACHABLE_KEY = 0x7F000000  # a bound


@contextmanager
def little_work() -> Iterator[None]:
    """Let programs take few elements at a time, so that several have something to do; new memory is not 0."""
    is_set = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN and the largest numbers
    with mock.patch.multiple(triton_search, CANDIDATE_BLOCK=16, WORD_BLOCK=4), warnings.catch_warnings():
        # Of NaN and overflow; and that Triton 3.6 takes arrays of one for numbers.
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.filterwarnings("ignore", "Conversion of an array with ndim", DeprecationWarning)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(is_set)


class Contest:
    """A case that follows from a seed: a kernel, and what it is asked, several times."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.own = torch.Generator().manual_seed(seed)
        self.lend: Callable[..., None] = lambda *tensors: None

    def run(self) -> None:
        """Raise AssertionError if what is found is not what the oracle finds."""
        with little_work():
            self.chance.choice((self.alone, self.alone, self.together, self.together, self.above))()

    def alone(self) -> None:
        """Search the k largest of a bucket."""
        first = self.data()
        at = self.chance.randrange(len(first))
        bound = self.chance.choice(
            (None, None, None, 0, 1, UNREACHABLE_KEY, UNREACHABLE_KEY, int(keys_of(first)[at]))
        )
        capacity = self.chance.choice((None, None, None, at + 1))
        kernel = self.make(first, bound=bound, capacity=capacity)
        for acc in self.calls(first):
            grad = self.gradient(acc)
            k = self.k(sum_of(acc, grad))
            check_topk(kernel, acc, grad, k)

    def together(self) -> None:
        """Search the k largest of each bucket; write twice half of all to memories."""
        firsts = [self.data() for _ in range(self.chance.choice((1, 2, 3)))]
        kernel = TritonGroupSearch(firsts, block=self.chance.choice((64, 128)), min_blocks=1)
        num_elements = sum(map(len, firsts))
        for accs in zip(*map(self.calls, firsts), strict=False):
            kinds = self.chance.choice((GRADIENT_DTYPES[:1], GRADIENT_DTYPES[1:2], GRADIENT_DTYPES, ()))
            grads = [self.gradient_of(acc, kinds) for acc in accs] if kinds else []
            sums = list(map(sum_of, accs, grads)) if kinds else accs
            ks = [self.k(one, 0) for one in sums]
            memories = torch.full((num_elements,), torch.nan).tensor_split(self.chance.choice((1, 3)))
            self.lend(*accs, *grads, *memories)
            found = check_joint(kernel, accs, grads, ks)
            check_add(kernel, memories, [found, found], 0.5, clears=True)

    def above(self) -> None:
        """Search all of a bucket that reaches a threshold."""
        first = self.data()
        kernel = self.make(first)
        for acc in self.calls(first):
            grad = self.gradient(acc)
            reached = sum_of(acc, grad)[self.chance.randrange(len(acc))]
            threshold = self.chance.choice((0.0, 0.3, float(reached.abs())))
            strict = self.chance.random() < 0.5
            check_above(kernel, acc, grad, threshold, strict)

    def make(self, like: Tensor, **options: Any) -> triton_search.TritonKernel:
        return triton_search.TritonKernel(like, block=self.chance.choice((32, 32, 64)), sample=64, **options)

    def k(self, sums: Tensor, least: int = 1) -> int:
        """Draw any k; often one that takes all of some equal elements, where each lost count matters."""
        n = len(sums)
        if self.chance.random() < 0.5:
            return int((keys_of(sums) >= keys_of(sums)[self.chance.randrange(n)]).sum())
        return max(least, min(n, self.chance.choice((least, 1, n, n // 2, self.chance.randint(1, n), 7))))

    def data(self, n: int | None = None) -> Tensor:
        """Draw a bucket, of this length if one is given."""
        lengths = (self.chance.randint(1, LONGEST), LONGEST, LONGEST, LONGEST, 257, 64, 1)
        n = n or self.chance.choice(lengths)
        name = self.chance.choice(list(INPUTS))
        return INPUTS[name](n).roll(self.chance.randrange(n))

    def calls(self, first: Tensor) -> Iterator[Tensor]:
        """Yield what is accumulated in, at each call of one kernel."""
        yield first
        for _ in range(self.chance.choice((0, 1, 2))):
            yield first if self.chance.random() < 0.5 else self.data(len(first))

    def gradient(self, acc: Tensor) -> Tensor | None:
        """Draw a gradient of any type, or none."""
        return None if self.chance.random() < 0.4 else self.gradient_of(acc, GRADIENT_DTYPES)

    def gradient_of(self, acc: Tensor, kinds: tuple[torch.dtype, ...]) -> Tensor:
        """Draw a gradient of one of these types."""
        acc.nan_to_num_(0.5, posinf=torch.inf, neginf=-torch.inf)  # NaN + 1 may be any NaN
        return (2 * torch.randn(len(acc), generator=self.own)).round().to(self.chance.choice(kinds))
