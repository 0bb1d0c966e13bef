"""The benchmark of links: the fit, what it writes. No test asserts a time."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from experiments.bench import link
from experiments.bench.link import fit_link
from sparsify.cost import CollectiveCost, Link
from tests.bench.conftest import RunBench, lines_of

NUMBERS = {"alpha_s": 1e-4, "beta_s_per_byte": 8e-9}
TRUE = Link(**NUMBERS)
COSTS = [CollectiveCost(messages, size) for messages in (2, 6) for size in (2**10, 2**16, 2**22)]


def noisy(spread: float) -> list[list[float]]:
    """Return 21 times of each of these costs, around what they take over the link."""
    draws = np.random.default_rng(1)
    return [list(TRUE.transfer_seconds(cost) * draws.lognormal(0, spread, 21)) for cost in COSTS]


def test_a_fit_finds_the_link_behind_exact_times_and_intervals_hold_that_behind_noisy_ones() -> None:
    exact, found = fit_link(COSTS, noisy(0.0)), fit_link(COSTS, noisy(0.1))
    for name, true in NUMBERS.items():
        interval = getattr(found, name)
        assert getattr(exact, name)[:3] == pytest.approx((true,) * 3)
        assert interval.low < true < interval.high
    assert exact.residuals == pytest.approx([0.0] * len(COSTS), abs=1e-9)
    assert max(map(abs, found.residuals)) < 0.1


def test_small_messages_count_as_much_as_large_ones() -> None:
    """In a fit of absolute errors, 4 MiB would decide alone."""
    times = noisy(0.0)
    for cost, seconds in zip(COSTS, times, strict=True):
        if cost.sent_bytes < 2**12:
            seconds[:] = [2 * each for each in seconds]
    assert fit_link(COSTS, times).alpha_s.value > 1.3 * TRUE.alpha_s


def test_no_number_of_a_link_is_negative() -> None:
    found = fit_link(COSTS, [[1.0 / (1 + at)] for at in range(len(COSTS))])
    assert found.alpha_s.value >= 0
    assert found.beta_s_per_byte.value >= 0


def test_loopback_is_measured_and_every_sample_recorded(bench: RunBench, tmp_path: Path) -> None:
    last = bench("link", "--largest", "5000", "--repeats", "3")
    *kinds, _ = last["fits"]
    _, *rows = lines_of(tmp_path, "link")
    assert [(row["message"], row["size"]) for row in rows] == [*product(kinds, (1024, 4096))]
    assert {len(row["seconds"]) for row in rows} == {3}


def test_a_link_file_is_one_that_simulations_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LINK_FOLDER", tmp_path / "link")
    text = link.write_link_file("office", fit_link(COSTS, noisy(0.0)), "here").read_text()
    assert text.startswith("# @package cluster.link\n")
    assert yaml.safe_load(text) == pytest.approx(NUMBERS)
