"""Chunks searched in C++: they choose what torch's operators choose."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from sparsify.core.chunks import ChunkLayout
from sparsify.kernels import native_unavailable_reason
from sparsify.kernels.native import KIND_BY_DTYPE, VECTOR_LEVELS, best_vector_level
from sparsify.kernels.native_chunks import NativeChunkSearch
from sparsify.methods._chunked import ChunkTopK
from sparsify.types import BucketContext, num_selected
from tests.conftest import there
from tests.sparsify.core.test_chunks import SHAPES, Shapes, check_chosen, check_equal, numel, random
from tests.sparsify.kernels.oracle import INPUTS, generator, threads

trouble = native_unavailable_reason()
pytestmark = pytest.mark.skipif(bool(trouble), reason=str(trouble))
LARGER: list[Shapes] = [[(128, 64 * 35)], [(50, 1280)]]
every_level = pytest.mark.parametrize(
    "level", [] if trouble else VECTOR_LEVELS[: VECTOR_LEVELS.index(best_vector_level()) + 1]
)


def search(
    of: Shapes, density: float, acc: Tensor, grad: Tensor | None = None, level: str | None = None
) -> None:
    tiles = ChunkLayout(of)
    k = num_selected(acc.numel(), density)
    summed = acc.clone() if grad is None else acc + grad
    found = there(
        NativeChunkSearch(tiles, level).try_accumulate_and_select([acc], [] if grad is None else [grad], [k])
    )
    check_equal(acc, summed)
    check_chosen(tiles, k, summed, found)


@every_level
def test_they_choose_the_largest_of_each_chunk(level: str) -> None:
    """At each density with one kind of gradient, or none."""
    for of in SHAPES + LARGER:
        n = numel(of)
        for density, kind in zip(
            (1 / 64, 1 / 64, 0.3, 0.7, 1.0, 1e-3), [None, *KIND_BY_DTYPE, None, torch.float32], strict=True
        ):
            search(of, density, random(n), None if kind is None else random(n, 1, kind), level)


@every_level
def test_strange_numbers_are_searched_exactly(level: str) -> None:
    """Where what one chunk lets expect of the next is wrong: too few, too many, or all are beyond it."""
    of: Shapes = [(640, 640)]
    n = numel(of)
    zeros = random(n)
    zeros.view(-1, 640)[64:200] = 0
    zeros.view(-1, 640)[300:500:7] = 1e-42
    scales = 10.0 ** torch.randint(-30, 30, (100, 1), generator=generator(3))
    of_any_scale = (random(n).view(100, -1) * scales).view(-1)
    for acc in (zeros, of_any_scale, *(make(n) for make in INPUTS.values())):
        search(of, 1 / 64, acc, None, level)


def test_threads_choose_alike() -> None:
    of: Shapes = [(2048, 1024), (1000,), (640, 640)]
    n = numel(of)
    found = []
    for number in (1, 2, 5):
        with threads(number):
            found.append(
                there(
                    NativeChunkSearch(ChunkLayout(of)).try_accumulate_and_select(
                        [random(n)], [random(n, 1)], [n // 64]
                    )
                )
            )
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_the_selector_takes_them_unless_the_user_wants_torchs_operators() -> None:
    for select in ("auto", "torch"):
        state = ChunkTopK().init(random(8259), BucketContext(0, 0, 0, ((64, 128), (67,)), select))
        assert (state.native is None) == (select == "torch")


@every_level
def test_drift_is_added_to_the_residual_and_parameters_go_back_to_the_anchor(level: str) -> None:
    """Several buckets, whose tensors lie in memories of their own, are merged to the bit.

    One operator after the other gives the same.
    """
    of: Shapes = [(128, 192), (1000,), (0,), (67, 65), (3,)]
    tiles = ChunkLayout(of, tensors_per_bucket=[1, 3, 1])
    ks = [num_selected(n, 1 / 64) for n in tiles.bucket_numels]
    accs = [random(n, n) for n in tiles.bucket_numels]
    own, anchors = ([random(prod(shape), seed) for shape in of] for seed in (1, 2))
    before = torch.cat(anchors)
    drift = before - torch.cat(own)
    chunks = NativeChunkSearch(tiles, level)
    for _ in range(2):  # the second time with kept tables
        summed = torch.cat(accs) * 0.95 + drift
        check_chosen(tiles, ks, summed, there(chunks.try_accumulate_and_select(accs, own, ks, 0.95, anchors)))
        assert torch.equal(torch.cat(accs), summed)
        assert torch.equal(torch.cat(own), before)
        assert torch.equal(torch.cat(anchors), before)
        drift = torch.zeros(tiles.n)


def test_what_it_cannot_read_is_left_as_it_is() -> None:
    """Other types, gaps, a chunk in two memories."""
    chunks = NativeChunkSearch(ChunkLayout([(64, 64)]))
    acc = random(4096)
    grad = random(4096, 1)
    for accs, grads, anchors in (
        ([acc.double()], [grad], []),
        ([acc], [grad.double()], []),
        ([acc], [grad.bfloat16()], [grad]),
        ([acc.repeat(2)[::2]], [grad], []),
        ([acc], [*grad.split(1000)], []),
        ([acc], [grad[1:]], []),
    ):
        before = accs[0].clone()
        assert chunks.try_accumulate_and_select(accs, grads, [64], 0.5, anchors) is None
        assert torch.equal(accs[0], before)
