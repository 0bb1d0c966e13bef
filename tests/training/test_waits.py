"""Number of times that training makes the host wait, counted as tests/sparsify/test_steady.py does."""

from __future__ import annotations

import pytest

from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from tests.sparsify import laws
from tests.training.digits import trainer
from tests.training.waits import watched

SIZE = 2


@pytest.mark.parametrize(
    ("mode", "name", "waits"),
    [
        ("production", "dense", 0),
        ("production", "topk", 0),
        ("production", "topk layer", 0),
        ("serialised", "topk layer", 1),  # a NaN must not reach a residual
        ("as_published", "topk", 1),  # the loss
    ],
)
def test_within_a_window_nothing_waits_but_what_the_mode_is_for(
    mode: str, name: str, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many more waits of each rank for every step more, in one window."""
    kind, _, scope = name.partition(" ")
    method = laws.build(kind, 0.01, scope or "global")

    def waits_of(steps: int) -> int:
        def body(comm: virtual.VirtualComm) -> None:
            trainer(comm, PhaseTimer(mode, comm.now_s), method, steps=steps).run()

        with watched(monkeypatch, large=10**9) as watch:
            watch.on = True
            virtual.run(SIZE, body)
        return len(watch.waits)

    assert waits_of(8) - waits_of(3) == 5 * SIZE * waits
