"""A fragment's tensors travel together: the same bits, in few messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, CountingComm, virtual
from sparsify.local import few_messages
from sparsify.local.few_messages import groups
from tests.sparsify.local.rounds import INNER, step_randomly, wrapped

# Their codes of four bits end within a byte, and off a float's place.
SIZES = [(7, 3), (5,), (), (64, 2), (1,)]
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("diloco", {}), ("localsgd", {}), ("muloco", {}), ("desloc", {}), ("sparseloco", {"density": 0.25}),
    ("streaming_diloco", {"fragments": 1, "delay": 0, "feedback": "gradient"}),
]  # fmt: skip


def trained(comm: Comm, name: str, settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return the parameters after three rounds of two steps, and the collectives of the last step."""
    drawn = torch.Generator().manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(size, generator=drawn)) for size in SIZES])
    counting = CountingComm(comm)
    inner = INNER.adamw if name == "desloc" else INNER.sgd
    optimiser = wrapped(inner, model, sparsify.build(name, every=2, **settings), counting)
    own = torch.Generator().manual_seed(1 + comm.rank)
    before = 0
    for _ in range(6):
        before = counting.collectives
        step_randomly(model, optimiser, own)
    return [*model.parameters()], counting.collectives - before


@pytest.mark.parametrize(("name", "settings"), WAYS)
def test_together_tensors_become_what_they_become_one_by_one(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    together = virtual.run(3, lambda comm: trained(comm, name, settings))
    monkeypatch.setattr(few_messages, "MOST_BYTES", 1)
    apart = virtual.run(3, lambda comm: trained(comm, name, settings))
    for (ours, few), (theirs, many) in zip(together, apart, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert few <= many
    if name != "sparseloco":  # whose message was one in both
        assert together[0][1] < apart[0][1]


def test_a_message_holds_as_many_tensors_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_messages, "MOST_BYTES", 10)
    assert list(groups([4, 4, 4, 20, 1, 9, 1])) == [[0, 1], [2], [3], [4, 5], [6]]
    assert list(groups([])) == []
