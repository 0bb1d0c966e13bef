"""Bands hold both machines, epoch by epoch."""

from __future__ import annotations

import numpy as np
import pytest

from analysis import published
from analysis.published.curves import by_machine


def test_a_band_reaches_from_one_machine_to_the_other() -> None:
    band = published.band("topk")
    machines = by_machine("topk")
    assert list(machines) == ["A100, NVLink", "V100, NVLink"]
    assert band["epoch"].to_list() == [*range(1, 139)]
    np.testing.assert_array_equal(band["low"], machines.min(axis=1))
    np.testing.assert_array_equal(band["high"], machines.max(axis=1))
    assert band["mean"].iloc[-1] == pytest.approx((91.515 + 90.872) / 2, abs=0.001)


def test_one_machine_is_no_band() -> None:
    band = published.band("randomk", "val_loss")
    assert band["low"].isna().all()
    assert band["mean"].iloc[-1] == pytest.approx(0.816, abs=0.001)


def test_4_workers_are_apart() -> None:
    assert len(published.band("dense", workers=4)) == 139
    assert len(published.band("randomk", workers=4)) == 0


def test_the_learning_rate_falls_twice() -> None:
    assert published.decays() == [82, 123]
