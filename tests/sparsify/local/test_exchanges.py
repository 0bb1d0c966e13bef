"""The exchange of a fragment: at once, and in few messages, to the bit what one after the other gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, CountingComm, virtual
from sparsify.core.grouping import group_consecutive_indices
from sparsify.kernels import native_unavailable_reason
from sparsify.local import fused_exchange, packed_messages
from sparsify.local.strategy import LocalSteps
from tests.sparsify.local.rounds import INNER, step_randomly, wrapped

pytestmark = pytest.mark.skipif(bool(native_unavailable_reason()), reason=str(native_unavailable_reason()))
EVERY, STEPS = 2, 8


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Linear(64, 192), nn.Linear(67, 71), nn.LayerNorm(50), nn.Conv2d(3, 8, 5), nn.Linear(13, 1)
    model = nn.ModuleList(parts).to(dtype)
    return model.to(memory_format=torch.channels_last)


def lived(
    strategy: LocalSteps,
    size: int,
    dtype: torch.dtype = torch.float32,
    is_watched: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[bool]]:
    """Return each worker's parameters, anchor and residual at the end, as (n,).

    Also return which exchanges were at once.
    """
    were = list[bool]()

    def noted(*those: Any) -> Any:
        report = original(*those)
        were.append(report is not None)
        return report

    def body(comm: Comm) -> Tensor:
        model = model_of(dtype)
        optimizer = wrapped(INNER.sgd, model, strategy, comm, **options)
        (fragment,) = optimizer.fragments
        fragment.on_average = (lambda average: None) if is_watched else None
        draws = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            step_randomly(model, optimizer, draws)
        held = [*fragment.flat_parameters(), *fragment.anchor, *fragment.engine.residuals().values()]
        return torch.cat([piece.reshape(-1).double() for piece in held])

    original = fused_exchange.try_fused_exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsify.local.fragments.try_fused_exchange", noted)
        return virtual.run(size, body), were


@pytest.mark.parametrize(
    ("size", "choices"),
    [
        (1, {}),
        (3, {}),
        (3, {"scope": "global"}),
        (1, {"scope": 0.02}),
        (3, {"average": "senders", "clip": True}),
        (3, {"code": "as_is", "decay": 1.0}),
    ],
    ids=str,
)
def test_it_is_the_same_as_one_after_the_other(size: int, choices: dict[str, Any]) -> None:
    strategy = sparsify.sparseloco(every=EVERY, density=0.05, **choices)
    ours, were = lived(strategy, size)
    assert were == [True] * (size * STEPS // EVERY)
    watched, never = lived(strategy, size, is_watched=True)
    assert never == []
    plain, refused = lived(strategy, size, select="torch")
    assert not any(refused)
    for mine, theirs, eager in zip(ours, watched, plain, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, eager)


def test_a_rate_is_rounded_as_by_torch() -> None:
    """Up to how torch's own add rounds, once or twice, which depends on its build."""
    strategy = sparsify.sparseloco(every=EVERY, lr=0.7)
    ours, _ = lived(strategy, 2)
    watched, _ = lived(strategy, 2, is_watched=True)
    torch.testing.assert_close(ours, watched, rtol=1e-5, atol=1e-6)


def test_top_k_and_other_types_go_one_after_the_other() -> None:
    for strategy, dtype in (
        (LocalSteps(EVERY, sparsify.topk(density=0.05)), torch.float32),
        (sparsify.sparseloco(every=EVERY), torch.float64),
        (sparsify.sparseloco(every=EVERY), torch.bfloat16),
    ):
        assert not any(lived(strategy, 2, dtype)[1])
    for strategy in (sparsify.sparseloco(every=EVERY, momentum=0.9), sparsify.localsgd(every=EVERY)):
        assert lived(strategy, 2)[1] == []


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
    optimizer = wrapped(inner, model, sparsify.build(name, every=2, **settings), counting)
    own = torch.Generator().manual_seed(1 + comm.rank)
    before = 0
    for _ in range(6):
        before = counting.collectives
        step_randomly(model, optimizer, own)
    return [*model.parameters()], counting.collectives - before


@pytest.mark.parametrize(("name", "settings"), WAYS)
def test_together_tensors_become_what_they_become_one_by_one(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    together = virtual.run(3, lambda comm: trained(comm, name, settings))
    monkeypatch.setattr(packed_messages, "MAX_MESSAGE_BYTES", 1)
    apart = virtual.run(3, lambda comm: trained(comm, name, settings))
    for (ours, few), (theirs, many) in zip(together, apart, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert few <= many
    if name != "sparseloco":  # whose message was one in both
        assert together[0][1] < apart[0][1]


def test_two_tensors_travel_in_as_many_messages_as_one() -> None:
    def collectives(comm: Comm) -> list[int]:
        found = []
        for bias in (False, True):
            counting = CountingComm(comm)
            model = nn.Linear(3, 2, bias=bias)
            optimizer = wrapped(INNER.sgd, model, sparsify.diloco(every=1), counting)
            before = counting.collectives
            step_randomly(model, optimizer, torch.Generator())
            found.append(counting.collectives - before)
        return found

    for one, two in virtual.run(2, collectives):
        assert one == two


def test_a_message_holds_as_many_tensors_as_fit() -> None:
    assert group_consecutive_indices([5, 5, 4, 20, 1, 9, 1], 10) == [[0, 1], [2], [3], [4, 5], [6]]
    assert group_consecutive_indices([], 10) == []
