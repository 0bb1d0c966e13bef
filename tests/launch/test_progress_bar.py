"""What is said of how long runs will take."""

from __future__ import annotations

import pytest

from experiments.launch.progress_bar import _left


@pytest.mark.parametrize(
    ("steps", "total", "said"),
    [(0, 100, ""), (10, 100, ", about 9 min left"), (101, 100, ", until the ratios are known")],
)
def test_the_time_left_is_never_negative(steps: int, total: int, said: str) -> None:
    """Variants that take turns go on beyond their least number of rounds."""
    left = _left(steps, total, elapsed=60.0)
    assert left.startswith(said)
    assert "-" not in left
