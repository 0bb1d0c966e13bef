"""The exchange of a fragment at once: to the bit the one in which drift, average and outer step follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.kernels import trouble_with_native
from sparsify.local import at_once
from sparsify.local.strategy import Local
from tests.sparsify.local.rounds import INNER, step_randomly, wrapped

pytestmark = pytest.mark.skipif(bool(trouble_with_native()), reason=str(trouble_with_native()))
EVERY, STEPS = 2, 8


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Linear(64, 192), nn.Linear(67, 71), nn.LayerNorm(50), nn.Conv2d(3, 8, 5), nn.Linear(13, 1)
    model = nn.ModuleList(parts).to(dtype)
    return model.to(memory_format=torch.channels_last)


def lived(
    strategy: Local, size: int, dtype: torch.dtype = torch.float32, is_watched: bool = False, **options: Any
) -> tuple[list[Tensor], list[bool]]:
    """Of each worker parameters, anchor and residual at the end, as (n,); and was each exchange at once?"""
    were = list[bool]()

    def noted(*those: Any) -> Any:
        report = original(*those)
        were.append(report is not None)
        return report

    def body(comm: Comm) -> Tensor:
        model = model_of(dtype)
        optimiser = wrapped(INNER.sgd, model, strategy, comm, **options)
        (fragment,) = optimiser.fragments
        fragment.watch = (lambda average: None) if is_watched else None
        draws = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            step_randomly(model, optimiser, draws)
        held = [*fragment.own(), *fragment.anchor, *fragment.engine.residuals().values()]
        return torch.cat([piece.reshape(-1).double() for piece in held])

    original = at_once.moved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsify.local.fragments.moved", noted)
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
        (Local(EVERY, sparsify.topk(density=0.05)), torch.float32),
        (sparsify.sparseloco(every=EVERY), torch.float64),
        (sparsify.sparseloco(every=EVERY), torch.bfloat16),
    ):
        assert not any(lived(strategy, 2, dtype)[1])
    for strategy in (sparsify.sparseloco(every=EVERY, momentum=0.9), sparsify.localsgd(every=EVERY)):
        assert lived(strategy, 2)[1] == []
