"""A file of state is read only as it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.training.state_file import Faulty, read_state, write_state


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(Path.unlink, "is missing"), (shorter, "bytes instead of"), (changed, "was changed")],
)
def test_what_was_written_is_read_and_damage_is_told(
    tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "state.pt"
    written = write_state(path, {"weights": torch.arange(1000.0)})
    assert torch.equal(read_state(path, written)["weights"], torch.arange(1000.0))
    damage(path)
    with pytest.raises(Faulty, match=why):
        read_state(path, written)
