"""Locks that another process holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records import locks
from analysis.records.locks import Lock


def test_a_wait_for_a_lock_tells_once_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "TELL_S", 0.0)
    monkeypatch.setattr(locks, "POLL_S", 0.001)
    path = tmp_path / "run.lock"
    said = list[str]()
    with Lock(path) as held:
        assert held.acquire(say=said.append)
        assert not said
        assert not Lock(path).acquire(patience_s=0.01, say=said.append)
    (line,) = said
    assert line.startswith("waiting for process ")
    assert line.endswith(f"which holds {path}")
