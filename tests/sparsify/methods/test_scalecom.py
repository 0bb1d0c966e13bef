"""ScaleCom against its rule in numpy."""

from __future__ import annotations

import pytest
import torch

import sparsify
from sparsify import cost
from sparsify.kernels.vectorised import Vectorised
from sparsify.method import Sparsifier
from sparsify.methods import scalecom
from sparsify.types import Sparse
from tests.sparsify.methods.replays import SIZE, STEPS, N, follows, run, top


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_scalecom_follows_the_leaders_top_k(beta: float) -> None:
    k = int(0.05 * N)
    lived = run("scalecom", density=0.05, beta=beta)
    follows(lived, lambda acc, step: [top(acc[step % SIZE], k)] * SIZE, beta)
    expected = cost.broadcast(4 * k, SIZE).sent_bytes + cost.all_reduce(8 * k, SIZE).sent_bytes
    assert lived[0].wire_bytes == [expected] * STEPS
    assert lived[0].host_syncs == [0] * STEPS


def test_only_the_leader_runs_a_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """In kljp's CLT-k all workers do, and all but one throw it away."""
    calls: list[int] = []

    original = Vectorised.topk

    def counted(kernel: Vectorised, acc: torch.Tensor, grad: None, k: int) -> Sparse:
        calls.append(k)
        return original(kernel, acc, grad, k)

    monkeypatch.setattr(Vectorised, "topk", counted)
    run("scalecom", density=0.05)
    assert len(calls) == STEPS


def test_scalecom_is_plain_error_feedback_unless_asked() -> None:
    assert sparsify.defaults("scalecom")["beta"] == 1.0
    assert isinstance(scalecom.scalecom(), Sparsifier)
    assert not scalecom.scalecom().broken_laws()
    assert scalecom.scalecom(beta=0.1).broken_laws()
