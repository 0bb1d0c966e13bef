from __future__ import annotations

from experiments.commands._report import write_report
from experiments.config.folders import Folders

GROUP = "results"


def report(*, drawn: bool = False) -> int:
    """Pages on every figure, verdict and run, to read in a browser; needs no torch (make report).

    From stored records, this checkout's first. Pictures that are not there yet, or are older than their
    records, are drawn.

    Args:
        drawn: draw none, and show the pictures that are there: in seconds.
    """
    print(write_report(Folders(), draws=not drawn))
    return 0
