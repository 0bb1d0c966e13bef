from __future__ import annotations

from experiments.commands._ship import consolidate
from experiments.commands._ship import ship as shipped
from experiments.config.folders import Folders

GROUP = "results"


def collect(*, ship: bool = False) -> int:
    """All valid runs into tables: runs, steps, epochs, spans (results/records/*.parquet).

    Args:
        ship: also the complete figures' runs into results/shipped, which the repository carries; and draw
            those figures again.
    """
    folders = Folders()
    for line in consolidate(folders):
        print(line)
    if ship:
        for line in shipped(folders):
            print(line)
    return 0
