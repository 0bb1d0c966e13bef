"""AdaComp against a transcription of its algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify.methods.adacomp import AdaComp, Bins, num_codes, read, write
from sparsify.types import BucketContext
from tests.sparsify.laws import gradient, live
from tests.sparsify.methods.replays import Array, equal_updates, gradients_of, tensors_of

BIN_SHAPES = [(8, 4, 3, 3), (7,), (30, 37)]  # 288 = 5 x 50 + 38; 7; 1110 = 2 x 500 + 110


def adacomp_by_the_paper(grads: Array, conv_bin: int, other_bin: int) -> list[Array]:
    steps, workers, n = grads.shape
    e, updates = np.zeros((workers, n)), []
    for t in range(steps):
        update = np.zeros(n)
        for shape, at in tensors_of(BIN_SHAPES):
            length = conv_bin if len(shape) > 2 else other_bin
            size = at.stop - at.start
            for worker in range(workers):
                g = grads[t, worker, at]
                G = e[worker, at] + g
                H = G + g
                bins = [slice(a, min(a + length, size)) for a in range(0, size, length)]
                maxima = [abs(G[bin_]).max() for bin_ in bins]
                scale = np.float64(np.float32(np.mean(maxima)))
                Q = np.zeros(size)
                for one, most in zip(bins, maxima, strict=True):
                    sent = (abs(H[one]) >= most) & (most > 0)
                    Q[one][sent] = np.where(G[one][sent] < 0, -scale, scale)
                e[worker, at] = G - Q
                update[at] += Q / workers
        updates.append(update)
    return updates


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("bins", [(50, 500), (9, 64), (63, 17)])
def test_adacomp_is_the_papers_algorithm(bins: tuple[int, int], scope: str) -> None:
    method = sparsify.build("adacomp", scope=scope, conv_bin=bins[0], other_bin=bins[1])
    lived = live(method, 3, steps=6, shapes=BIN_SHAPES)
    # Float64; divided by 3 before the sum or after.
    equal_updates(lived, adacomp_by_the_paper(gradients_of(lived), *bins), rtol=1e-13, atol=1e-15)


def test_adacomps_defaults_are_the_published_ones() -> None:
    assert sparsify.defaults("adacomp") == {"scope": "layer", "conv_bin": 50, "other_bin": 500}


def encoded(acc: torch.Tensor, shapes: tuple[tuple[int, ...], ...], **bins: int) -> tuple[Any, Bins]:
    """The message of a first step, and the state."""
    method = AdaComp(**bins)
    state = method.init(acc, BucketContext(0, 0, 0, shapes))
    return write(*method.select(acc, acc.clone(), state), acc, state), state


@pytest.mark.parametrize(("shape", "width"), [((8, 4, 3, 3), 1), ((288,), 2), ((63,), 1), ((64,), 2)])
def test_a_code_takes_one_byte_where_the_bin_is_small_enough(shape: tuple[int, ...], width: int) -> None:
    acc = gradient(0, 0, shape).flatten()
    message, state = encoded(acc, (shape,))
    part = read(message, acc.dtype, state)
    assert len(message) == 4 + width * len(part.indices)
    # In the first step G = g and H = 2 g: what exceeds half of its bin's maximum is sent.
    bins = acc.abs().split(50 if len(shape) > 2 else 500)
    large = torch.cat([2 * bin_ >= bin_.max() for bin_ in bins]).nonzero().squeeze(1)
    assert torch.equal(part.indices, large)
    scale = torch.stack([bin_.max() for bin_ in bins]).mean().float().double()
    assert torch.equal(part.values, acc[large].sign() * scale)


def test_of_a_bin_of_zeros_nothing_is_sent() -> None:
    """0 >= 0 holds for all of it."""
    acc = torch.zeros(200).double()
    acc[70] = -8.0
    message, state = encoded(acc, ((2, 2, 50),))
    part = read(message, acc.dtype, state)
    assert num_codes(message, state) == 4  # a mark for each empty bin
    assert part.indices.tolist() == [0, 70, 100, 150]
    assert part.values.tolist() == [0, -2.0, 0, 0]  # the mean of the four maxima
    lived = live(sparsify.build("adacomp"), 2, make=lambda rank, step, shape: torch.zeros(shape).double())
    assert not any(update.any() for update in lived[0].updates)


def test_a_bin_is_empty_too_where_its_largest_is_about_to_shrink() -> None:
    method, grad = AdaComp(), torch.tensor([-4.0, 0.1, 0.2]).double()
    state = method.init(grad, BucketContext(0, 0, 0, ((3,),)))
    state.residual.copy_(torch.tensor([14.0, 0.0, 0.0]))
    acc = state.residual + grad  # 10; |H| = 6
    part = read(write(*method.select(acc, grad, state), acc, state), acc.dtype, state)
    assert part.indices.tolist() == [0]
    assert part.values.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_host_synchronisations_however_many_tensors(dtype: torch.dtype) -> None:
    lived = live(sparsify.build("adacomp", scope="global"), 3, shapes=BIN_SHAPES * 5, dtype=dtype)
    assert all(rank.host_syncs == [2] * 5 for rank in lived)
