from __future__ import annotations

from experiments.commands._ship import consolidate, ship
from experiments.config.folders import Folders
from sparsify.ranges import shown


def collect(words: list[str], options: set[str]) -> int:
    """All valid runs into Parquet tables: runs, steps, epochs, spans."""
    if words:
        raise ValueError(f"collect takes no words, got {shown(' '.join(words))}")
    folders = Folders()
    for line in consolidate(folders):
        print(line)
    if "--ship" in options:
        for line in ship(folders):
            print(line)
    return 0
