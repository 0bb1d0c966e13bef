"""Analysis, from records to frames, statistics, verdicts and figures; without torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # most of what imports this package does without pandas
    from analysis.records.frames import Frames

TABLES = ("runs", "steps", "epochs", "spans", "looks")


def load(results: Path | str | None = None, tables: Collection[str] = TABLES) -> Frames:
    """Return every run, own and shipped, as tidy frames: see `analysis.records.loading.load`."""
    from analysis.records import loading

    return loading.load(results, tables)
