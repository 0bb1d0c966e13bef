"""The table of tasks: families and what differs, and files beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.tasks import REGISTRY
from experiments.tasks._presets import PRESETS
from sparsify.spec import REQUIRED, Registry


def test_a_preset_leaves_no_setting_open() -> None:
    for name in PRESETS:
        assert REQUIRED not in map(str, REGISTRY.defaults(name).values()), name


def test_a_file_stands_in_for_a_row_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "lenet5_mnist.py").write_text('def lenet5_mnist(lr: float = 2.0):\n    "Mine."\n')
    tasks = Registry("task", "nowhere", tmp_path, table=PRESETS)
    assert tasks.names() == sorted(PRESETS)
    assert tasks.defaults("lenet5_mnist") == {"lr": 2.0}
    assert tasks.summary("lenet5_mnist") == "Mine."
    with pytest.raises(ValueError, match="'fnn3_mnist' has no 'width'"):
        tasks.build("fnn3_mnist", {"width": 3})
