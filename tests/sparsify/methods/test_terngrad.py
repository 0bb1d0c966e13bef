"""TernGrad against the paper's quantisation in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from tests.sparsify.laws import live
from tests.sparsify.methods.replays import given, grads, stochastic_level, uniform


@pytest.mark.parametrize("sigma", ["about_zero", "about_mean"])
def test_terngrad_is_the_papers_quantisation(sigma: str) -> None:
    """Wen et al. 2017, eqs. 1 to 3, with gradient clipping, eq. 9: c = 2.5."""
    steps = 4
    lived = live(sparsify.build("terngrad", sigma=sigma, scope="global"), 3, steps)
    draws = [uniform(rank, 227, steps) for rank in range(3)]
    for step in range(steps):
        total = np.zeros(227)
        for rank, g in enumerate(grads(lived, step)):
            deviation = g.std() if sigma == "about_mean" else np.sqrt((g**2).mean())
            clipped = np.clip(g, -2.5 * deviation, 2.5 * deviation)
            s = np.float32(np.abs(clipped).max())
            # Clipped once more to s as it travels: rounding it to fp32 may have made it smaller.
            total += s * stochastic_level(np.clip(clipped / s, -1, 1), draws[rank][step])
        np.testing.assert_allclose(lived[0].updates[step], total / 3, rtol=1e-12, atol=1e-12)


def test_terngrad_sends_two_bits_for_each_element() -> None:
    """GRACE's sends 8."""
    assert sparsify.defaults("terngrad")["clip"] == 2.5
    assert live(sparsify.build("terngrad"), 2, 1, shapes=[(1001,)])[0].wire_bytes == [-(-1001 // 4) + 4]


def test_terngrad_as_published_erases_what_has_no_deviation() -> None:
    """A tensor of one element, or of equal ones; about zero they have one."""
    for shape, values in (((1,), [3.0]), ((4,), [3.0] * 4)):
        published, intended = (
            live(sparsify.build("terngrad", sigma=sigma), 2, 3, given(values), [shape])[0].updates
            for sigma in ("about_mean", "about_zero")
        )
        assert not torch.stack(published).any()
        assert (torch.stack(intended) == 3).all()


def test_terngrad_clips_to_so_many_sigma() -> None:
    values = [100.0] + [0.0] * 99  # sigma = 10
    for clip, sent in ((2.5, 25.0), (float("inf"), 100.0)):
        update = live(sparsify.build("terngrad", clip=clip), 1, 1, given(values), [(100,)])[0].updates[0]
        assert update.tolist() == [sent] + [0.0] * 99
