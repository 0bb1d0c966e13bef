from __future__ import annotations

from experiments.commands._report import write_report
from experiments.config.folders import Folders

GROUP = "results"


def report() -> int:
    """Pages on every figure, verdict and run, to read in a browser; needs no torch (make report).

    From stored records, this checkout's first. Pictures that are older than their records are drawn again.
    """
    print(write_report(Folders()))
    return 0
