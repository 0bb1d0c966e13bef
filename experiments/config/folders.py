"""Where the checkout is, and in it every folder of results."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from analysis.records.store import Attempt, Store
from slurm import environment

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Folders:
    """The folders of results. `shipped` comes with the repository; the others are this checkout's own."""

    results: Path = field(
        default_factory=lambda: Path(
            os.path.realpath(environment.folder("SPARSIFY_RESULTS") or ROOT / "results")
        )
    )

    @property
    def store(self) -> Store:
        """The runs, one folder each."""
        return Store(self.results / "runs")

    @property
    def scratch(self) -> Path:
        """The folder of what launching needs, and no figure."""
        return self.results / "launch"

    def launch(self, attempt: Attempt) -> Path:
        """An attempt's orders, and a folder for each time it was started."""
        return self.scratch / f"{attempt.run_id}-{attempt.number:03d}"

    @property
    def sweeps(self) -> Path:
        """The folder of what was submitted to SLURM."""
        return self.results / "sweeps"

    @property
    def code(self) -> Path:
        """Copies of the code, one for each version that was submitted."""
        return self.scratch / "code"

    @property
    def records(self) -> Path:
        """All valid runs as Parquet tables."""
        return self.results / "records"

    @property
    def index(self) -> Path:
        """Notes of the runs that each figure was drawn from."""
        return self.records / "figures"

    @property
    def sweep_index(self) -> Path:
        """Notes of the runs that each named sweep has asked for."""
        return self.records / "sweeps"

    @property
    def figures(self) -> Path:
        return self.results / "figures"

    @property
    def report(self) -> Path:
        """Pages to read in a browser."""
        return self.results / "report"

    @property
    def shipped(self) -> Path:
        return ROOT / "results" / "shipped"
