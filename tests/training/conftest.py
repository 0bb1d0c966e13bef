"""Fixtures that tests of training share: votes at every step."""

from __future__ import annotations

import pytest

from experiments.training import stop_signal


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes are not rationed by the clock: what happens is the same on every machine."""
    monkeypatch.setattr(stop_signal, "VOTE_INTERVAL_S", 0.0)
