"""AdaComp against a transcription of its algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify.methods.adacomp import AdaComp, AdaCompState, decode, encode, num_codes
from sparsify.types import BucketContext, SparseVector
from tests.sparsify.laws import gradient, live
from tests.sparsify.methods.replays import Array, check_updates, split_tensors

BIN_SHAPES: list[tuple[int, ...]] = [(8, 4, 3, 3), (7,), (30, 37)]  # 5 x 50 + 38; 7; 2 x 500 + 110


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("bins", [(50, 500), (9, 64), (63, 17)])
def test_adacomp_is_the_papers_algorithm(bins: tuple[int, int], scope: str) -> None:
    method = sparsify.build("adacomp", scope=scope, conv_bin=bins[0], other_bin=bins[1])
    residuals = [np.zeros(1405) for _ in range(3)]

    def update_of(grads: list[Array]) -> Array:
        total = np.zeros(1405)
        for grad, residual in zip(grads, residuals, strict=True):
            acc = residual + grad
            soon = acc + grad
            sent = np.zeros(1405)
            parts = (split_tensors(BIN_SHAPES, flat) for flat in (acc, soon, sent))
            for (shape, G), (_, H), (_, Q) in zip(*parts, strict=True):
                length = bins[0] if len(shape) > 2 else bins[1]
                of_bins = range(0, G.size, length)
                largest = np.array([abs(G[at : at + length]).max() for at in of_bins])
                scale = np.float64(np.float32(largest.mean()))
                is_sent = abs(H) >= np.repeat(largest, length)[: G.size]
                Q[is_sent] = np.where(G[is_sent] < 0, -scale, scale)
            residual[:] = acc - sent
            total += sent
        return total / 3

    check_updates(live(method, 3, steps=6, shapes=BIN_SHAPES), update_of, 1e-13)


def encode_gradient(
    acc: torch.Tensor, grad: torch.Tensor, shape: tuple[int, ...], residual: torch.Tensor | None = None
) -> tuple[Any, SparseVector, AdaCompState]:
    """Return the message for this gradient plus residual, what is read of it, and the state."""
    method = AdaComp()
    state = method.init(acc, BucketContext(0, 0, 0, (shape,)))
    if residual is not None:
        state.residual.copy_(residual)
    message = encode(*method.select_overwriting_grad(acc, grad, state), acc, state.layout)
    return message, decode(message, acc.dtype, state.layout), state


@pytest.mark.parametrize(("shape", "width"), [((8, 4, 3, 3), 1), ((288,), 2), ((63,), 1), ((64,), 2)])
def test_a_code_takes_one_byte_where_the_bin_is_small_enough(shape: tuple[int, ...], width: int) -> None:
    acc = gradient(0, 0, shape).flatten()
    message, part, _ = encode_gradient(acc, acc.clone(), shape)
    assert len(message) == 4 + width * len(part.indices)


def test_of_a_bin_of_zeros_nothing_is_sent() -> None:
    """0 >= 0 holds for all of it."""
    acc = torch.zeros(200).double()
    acc[70] = -8.0
    message, part, state = encode_gradient(acc, acc.clone(), (2, 2, 50))
    assert num_codes(message, state.layout) == 4  # a mark for each empty bin
    assert part.indices.tolist() == [0, 70, 100, 150]
    assert part.values.tolist() == [0, -2.0, 0, 0]  # the mean of the four maxima


def test_a_bin_is_empty_too_where_its_largest_is_about_to_shrink() -> None:
    residual = torch.tensor([14.0, 0.0, 0.0])
    grad = torch.tensor([-4.0, 0.1, 0.2]).double()
    _, part, _ = encode_gradient(residual + grad, grad, (3,), residual)  # G = 10; |H| = 6
    assert part.indices.tolist() == [0]
    assert part.values.tolist() == [0.0]
