"""Fixtures that tests of records share: runs of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.frames import Frames
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def frames(store: Store) -> Frames:
    configs = synthetic.config("dense"), synthetic.config("topk"), synthetic.learning_config("topk", epochs=3)
    return synthetic.frames_with(store.root, *configs)
