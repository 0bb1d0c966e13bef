"""Hard threshold: constants, Strom's words, and what they leave in the residual."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparsify import cost
from sparsify.methods import hardthreshold
from sparsify.types import Sparse
from tests.sparsify.methods.replays import SIZE, STEPS, N, count, follows, run


def test_hard_threshold_sends_what_reaches_lambda() -> None:
    k = int(0.05 * N)
    lived = run("hardthreshold", density=0.05)
    follows(lived, lambda acc, step: [np.flatnonzero(np.abs(a) >= 1 / (2 * math.sqrt(k))) for a in acc])
    assert lived[0].host_syncs == [2] * STEPS


def test_stroms_words_send_tau_and_keep_the_rest() -> None:
    tau = 0.75
    lived = run("hardthreshold", density=0.05, threshold=tau, send="strom")
    follows(
        lived,
        lambda acc, step: [np.flatnonzero(np.abs(a) >= tau) for a in acc],
        send=lambda values: tau * np.sign(values),
    )
    longest = max(rank.selected[0] for rank in lived)
    assert lived[0].wire_bytes[0] == cost.gather_uneven(4 * longest, SIZE).sent_bytes


def test_lambda_for_resnet_18_is_the_published_one() -> None:
    """4.73e-3 in kljp's run.sh, at density 0.001 of 11,173,962 parameters."""
    assert hardthreshold.threshold_for(None, int(0.001 * 11_173_962)) == pytest.approx(4.73e-3, abs=5e-6)


def test_gradients_that_are_all_negative_are_selected_by_magnitude() -> None:
    """GRACE lowers the threshold to the largest signed element: here it would select all."""
    acc = -torch.tensor([0.1, 0.2, 0.3, 0.9])
    assert count(hardthreshold.HardThreshold(0.5), acc, 1) == 1


def test_a_threshold_above_everything_sends_only_the_lengths() -> None:
    for send in ("values", "strom"):
        lived = run("hardthreshold", density=0.05, threshold=1e6, send=send)
        assert {count for rank in lived for count in rank.selected} == {0}
        assert set(lived[0].wire_bytes) == {8 * (SIZE - 1)}
        assert not torch.stack(lived[0].updates).any()


def test_words_hold_31_bits_of_index_and_a_sign() -> None:
    part = Sparse(torch.tensor([0, 5, 2**31 - 1, 0]), torch.tensor([1.0, -2.0, -3.0, -4.0]))
    written = hardthreshold.words(part, 2**31)
    assert written.dtype == torch.int32
    read = hardthreshold.signed(written, 0.5, torch.float64)
    assert read.indices.tolist() == part.indices.tolist()
    assert read.values.tolist() == [0.5, -0.5, -0.5, -0.5]
    with pytest.raises(ValueError, match="needs wider indices than Strom's 31 bits"):
        hardthreshold.words(part, 2**31 + 1)
