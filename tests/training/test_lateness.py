"""Workers that come late on purpose: what is drawn, and what becomes of it on the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.training.loop import published_lateness_s, seconds_late
from experiments.training.settings import LatenessSettings
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from tests.config.refusals import check_refusals
from tests.sparsify import laws
from tests.sparsify.worker_functions import late_and_wait, on_processes
from tests.training.digits import Lines, trainer, weights

EVERY = LatenessSettings("lognormal", 0.02, 0.5)
LATE_MS = 40.0


def of_all(steps: int, size: int, seed: int = 3, **changes: Any) -> np.ndarray:
    """Return (steps, size) seconds, asked for in an order that no run would."""
    seconds = np.empty((steps, size))
    for rank in range(size):
        for step in range(steps):
            seconds[step, rank] = seconds_late(replace(EVERY, **changes), seed, step, rank, size)
    return seconds


def test_what_is_drawn_depends_on_seed_step_and_rank_alone() -> None:
    drawn = of_all(50, 4)
    assert (drawn == of_all(50, 4)).all()
    assert (drawn != of_all(50, 4, seed=4)).all()
    assert len(np.unique(drawn)) == drawn.size


def test_draws_are_of_the_distribution_that_was_asked_for() -> None:
    drawn = of_all(400, 4)
    assert np.median(drawn) == pytest.approx(0.02, rel=0.1)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.1)
    uniform = of_all(400, 4, draw="uniform", spread=0.0)
    assert (uniform.min(), uniform.max()) == (pytest.approx(0, abs=1e-3), pytest.approx(0.02, abs=1e-3))
    assert (of_all(3, 2, draw="constant") == 0.02).all()
    one = of_all(20, 4, rank=1)  # alone is late
    assert (one[:, 1] > 0).all()
    assert not one[:, [0, 2, 3]].any()


@pytest.mark.parametrize("size", [8, 16])
def test_workers_are_as_late_as_in_the_published_iterations(size: int) -> None:
    """Eight together are one of its rows, in another order; the range is the logs' 32 ms, by their facts."""
    drawn = of_all(300, size, draw="published")
    rows = {tuple(row) for row in np.sort(published_lateness_s(), axis=1)}
    for eight in np.split(drawn, size // 8, axis=1):
        assert {tuple(row) for row in np.sort(eight, axis=1)} <= rows
        assert np.ptp(eight, axis=1).mean() == pytest.approx(0.0321, rel=0.1)
    assert len(np.unique(drawn.argmax(axis=1))) == size  # anybody may be the last
    of_all(1, 3, draw="published")  # fewer than eight are some of them


def trained(mode: str, late: LatenessSettings) -> list[tuple[torch.Tensor, Lines, float]]:
    """Weights, the log and the time lived of three virtual ranks after four steps."""

    def body(comm: virtual.VirtualComm) -> tuple[torch.Tensor, Lines, float]:
        log, began = Lines(), comm.now_s()
        topk, timer = laws.build("topk", 0.1, "global"), PhaseTimer(mode, comm.now_s)
        return weights(trainer(comm, timer, topk, log, steps=4, late=late)), log, comm.now_s() - began

    return virtual.run(3, body)


def test_lateness_changes_no_number_and_costs_a_virtual_rank_no_time() -> None:
    """Lateness of 1,000 s, beside which computing is nothing, is in its phase, and in the others' wait."""
    late = trained("serialised", LatenessSettings("constant", 1000.0, rank=1))
    plain = trained("serialised", LatenessSettings())
    for rank, (end, log, lived) in enumerate(late):
        assert torch.equal(end, plain[rank][0])
        assert lived == pytest.approx(4000, rel=0.05)  # all wait for rank 1 in each step
        assert log.seconds("late") == pytest.approx([1000.0 * (rank == 1)] * 4, abs=1.0)
        assert log.seconds("wait") == pytest.approx([1000.0 * (rank != 1)] * 4, abs=1.0)


def test_a_process_really_comes_late(tmp_path: Path) -> None:
    """Rank 1 sleeps; rank 0 waits for as long in communication."""
    first, second = on_processes(late_and_wait, 2, tmp_path)
    late_s = float(second["late"])
    assert late_s >= LATE_MS / 1e3
    assert float(first["late"]) < 0.01
    assert float(first["wait"]) - float(second["wait"]) == pytest.approx(late_s, rel=0.5)


def test_settings_without_effect_are_refused() -> None:
    check_refusals(
        {
            "late.draw=uniform": "late.s=0: late.draw=uniform needs it",
            ("late.draw=lognormal", "late.s=1"): "late.spread=0: late.draw=lognormal needs it",
            "late.s=0.1": "late.s=0.1: late.draw=none makes no use of it",
            "late.rank=0": "late.rank=0: late.draw=none is not of one worker",
            ("late.draw=published", "late.rank=0"): "late.draw=published is not of one worker",
            ("late.draw=constant", "late.s=1", "late.rank=2"): "late.rank=2: there are workers=2",
            "late.draw=gamma": "uniform",
            ("late.draw=constant", "late.s=-1"): "late.s=-1 is out of range",
        }
    )
