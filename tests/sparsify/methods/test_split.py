"""What the exchanges share that split a bucket among owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsify.comm import virtual
from sparsify.methods.oktopk import SplitReduceBalance
from sparsify.methods.sparcml import SplitAllGather
from sparsify.types import BucketContext, Sparse
from tests.sparsify.laws import mass
from tests.sparsify.methods.replays import run


@pytest.mark.parametrize("value", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["sparcml", "oktopk"])
def test_rounding_on_the_way_stays_in_residuals(name: str, value: str) -> None:
    lived = run(name, 3, 6, density=0.05, value=value)
    torch.testing.assert_close(*mass(lived), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("exchange", [SplitReduceBalance(), SplitAllGather()], ids=["oktopk", "sparcml"])
def test_workers_that_selected_nothing_take_part(exchange: Any) -> None:
    """First nobody selects anything, then worker 1 only."""

    def body(comm: virtual.VirtualComm) -> list[list[float]]:
        state, totals = exchange.init(torch.zeros(50), BucketContext(0, comm.rank, 0)), []
        for chosen in (0, 5 * (comm.rank == 1)):
            part = Sparse(torch.arange(chosen) * 10, torch.ones(chosen))
            total = torch.zeros(50)
            for piece in exchange.exchange(part, 50, 5, comm, state).total:
                piece.add_to(total)
            totals.append(total.nonzero().flatten().tolist())
        return totals

    assert virtual.run(4, body) == [[[], [0, 10, 20, 30, 40]]] * 4
