"""QSGD, TernGrad, signSGD, EF-signSGD and qgZ against the papers' quantisation in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify.methods.qgz import region_lengths
from tests.sparsify.laws import SHAPES, build, gradient, live
from tests.sparsify.methods.replays import (
    EXACT,
    Array,
    check_steps,
    check_updates,
    draw_uniform,
    repeat_gradients,
    round_at_random,
    split_tensors,
)

Encode = Callable[[Array, Array], Array]  # gradient plus residual, draws -> what arrives
WIDE: list[tuple[int, ...]] = [(40, 30), (1001,)]


def qsgd(levels: int, norm: str, block: int = 64) -> Encode:
    """Alistarh et al. 2017, section 3: Q_s(v_i) = |v| sgn(v_i) xi_i, for every bucket of its own."""

    def encode(acc: Array, draws: Array) -> Array:
        sent = np.zeros_like(acc)
        for start in range(0, acc.size, block):  # of 227 elements: three blocks and a rest
            at = slice(start, start + block)
            v = acc[at]
            size = np.float32(np.abs(v).max() if norm == "max" else np.sqrt((v**2).sum()))
            sent[at] = size * round_at_random(levels * v / size, draws[at]) / levels
        return sent

    return encode


def terngrad(sigma: str) -> Encode:
    """Wen et al. 2017, eqs. 1 to 3, with gradient clipping, eq. 9: c = 2.5."""

    def encode(acc: Array, draws: Array) -> Array:
        deviation = acc.std() if sigma == "about_mean" else np.sqrt((acc**2).mean())
        clipped = np.clip(acc, -2.5 * deviation, 2.5 * deviation)
        size = np.float32(np.abs(clipped).max())
        # Clipped once more to s as it travels: rounding it to fp32 may have made it smaller.
        sent: Array = size * round_at_random(np.clip(clipped / size, -1, 1), draws)
        return sent

    return encode


def efsignsgd(acc: Array, draws: Array) -> Array:
    """Karimireddy et al. 2019, algorithm 1; of each tensor by itself, as in the authors' code."""
    parts = [np.abs(part).mean() * np.sign(part) for _, part in split_tensors(SHAPES, acc)]
    return np.concatenate(parts)


CASES: list[tuple[str, dict[str, Any], Encode]] = [
    *(
        ("qsgd", {"bits": bits, "norm": norm, "block": 64}, qsgd(2 ** (bits - 1) - 1, norm))
        for bits in (2, 4, 8)
        for norm in ("l2", "max")
    ),
    ("qsgd", {"norm": "max", "block": 64, "feedback": "gradient"}, qsgd(7, "max")),
    ("terngrad", {"sigma": "about_zero", "scope": "global"}, terngrad("about_zero")),
    ("terngrad", {"sigma": "about_mean", "scope": "global"}, terngrad("about_mean")),
    ("efsignsgd", {"scope": "global", "feedback": "learning_rate"}, efsignsgd),
    ("efsignsgd", {"scope": "layer", "feedback": "gradient"}, efsignsgd),
]


@pytest.mark.parametrize(("name", "choices", "encode"), CASES)
def test_messages_are_those_of_the_paper(name: str, choices: dict[str, Any], encode: Encode) -> None:
    lived = live(sparsify.build(name, **choices), 3, 5, lr=0.1)
    draws = [draw_uniform(rank, 227, 5) for rank in range(3)]

    def step_of(accs: list[Array], step: int) -> tuple[Array, list[Array]]:
        sent = [encode(acc, own[step]) for acc, own in zip(accs, draws, strict=True)]
        owed = 1 if "feedback" in choices else 0
        return sum(sent[1:], sent[0]), [owed * (acc - part) for acc, part in zip(accs, sent, strict=True)]

    # EF-signSGD's scales travel as fp32.
    check_steps(lived, step_of, 1e-6 if name == "efsignsgd" else EXACT)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_signsgd_is_the_majority_vote(size: int) -> None:
    """Bernstein et al. 2018, algorithm 3: sign of the sum over workers of sign(g)."""

    def vote(grads: list[Array]) -> Array:
        votes: Array = np.sign(np.sign(grads).sum(axis=0))
        return votes

    check_updates(live(sparsify.build("signsgd"), size, 3), vote, 0)


def test_the_sign_of_zero_is_one_and_a_tie_moves_nothing() -> None:
    make = repeat_gradients([0.0, -0.0, -2.0, 5.0], [0.0, 0.0, 1.0, 1e-30])
    lived = live(sparsify.build("signsgd"), 2, 1, make, [(4,)])
    assert lived[0].updates[0].tolist() == [1.0, 1.0, 0.0, 1.0]


def test_terngrad_as_published_erases_what_has_no_deviation() -> None:
    """A tensor of one element, or of equal ones; about zero they have one."""
    for shape in ((1,), (4,)):
        make = repeat_gradients([3.0] * shape[0])
        for sigma, sent in (("about_mean", 0), ("about_zero", 3)):
            lived = live(sparsify.build("terngrad", sigma=sigma), 2, 3, make, [shape])
            assert (torch.stack(lived[0].updates) == sent).all(), (shape, sigma)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_qgz_errs_by_at_most_half_a_level_of_each_rounding(bits: int, size: int) -> None:
    lived = live(build("qgz", scope="global", bits=bits, block=64), size, steps=1, shapes=WIDE)
    grads = torch.stack([rank.gradients[0] for rank in lived])
    error = (lived[0].updates[0] - grads.mean(0)).abs().max()
    assert 0 < error <= 1.0001 * grads.abs().max() / (2 ** (bits - 1) - 1)  # scales travel as fp32


def test_regions_are_whole_blocks_and_may_be_empty() -> None:
    assert region_lengths(1000, 3, 256) == [512, 488, 0]
    assert region_lengths(10, 4, 4) == [4, 4, 2, 0]
    assert region_lengths(0, 2, 256) == [0, 0]


def test_a_nan_shows() -> None:
    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return gradient(rank, step, shape).index_fill(0, torch.tensor([0]), torch.nan)

    assert live(build("qgz", scope="global", block=64), 2, 1, make, WIDE)[0].updates[0].isnan().any()
