"""Where the checkout is, and in it every folder of results."""

from __future__ import annotations

import os
from pathlib import Path

from analysis.records.store import Attempt, Store
from slurm import environment

ROOT = Path(__file__).parent.parent.parent


class ResultFolders:
    """The folders of results. `shipped` comes with the repository; the others are this checkout's own."""

    shipped = ROOT / "results" / "shipped"

    def __init__(self, results: Path | None = None) -> None:
        folder = results or os.path.realpath(
            environment.folder_from_variable("SPARSIFY_RESULTS") or ROOT / "results"
        )
        self.results = environment.require_utf8(Path(folder), "the folder of results (SPARSIFY_RESULTS)")
        self.store = Store(self.results / "runs")  # a folder for each run
        self.scratch = self.results / "launch"  # what launching needs, and no figure
        self.code = self.scratch / "code"  # a copy for each version that was submitted
        self.sweeps = self.results / "sweeps"  # what was submitted to SLURM
        self.records = self.results / "records"  # all valid runs as Parquet tables
        self.index = self.records / "figures"  # notes of the runs that each figure was drawn from
        self.sweep_index = self.records / "sweeps"  # and of those that each named sweep has asked for
        self.figures = self.results / "figures"
        self.report = self.results / "report"  # pages to read in a browser

    def launch_folder(self, attempt: Attempt) -> Path:
        """Return the folder of an attempt's orders, with a folder in it for each time it was started."""
        return self.scratch / f"{attempt.run_id}-{attempt.number:03d}"
