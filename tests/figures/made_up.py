"""Make up frames of records, as runs leave them, and find the verdicts on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.claims import Verdict
from analysis.records.frames import Frames, build_runs_table, empty_frames, order_and_type_columns
from experiments import figures
from experiments.config.run import Run

Row = Mapping[str, Any]
PROFILES = ("smoke", "laptop", "paper")
TABLES = ("runs", "steps", "epochs", "spans")
PLAIN = {"seed": 0, "simulated": False, "timing.warmup_steps": 0, "provenance_json": "{}"}
# Of variants that took turns until their ratio was known.
TURNS = {
    "alternate.block_steps": 2,
    "alternate.limit_min": 1,
    "alternated.half_width": 0.04,
    "alternated.stopped": "half-width",
}


def settings_of(words: str) -> Row:
    """Return the settings that words of the command line mean."""
    return Run.coerce(words.split()).settings


class RecordBuilder:
    """Made-up rows of records; `shared` are settings of all runs."""

    def __init__(self, *shared: Row) -> None:
        self.shared = dict(PLAIN)
        for settings in shared:
            self.shared |= settings
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}

    def add_run(
        self,
        key: str,
        settings: Row,
        *ranks: Iterable[Row],
        block_steps: int = 1,
        first_block: int = 1,
        **tables: Iterable[Row],
    ) -> None:
        """Add a run: its settings, the steps of each rank, and its rows of epochs or spans.

        Args:
            ranks: rows of steps; without a `step_s`, a step takes what its parts take together.
            block_steps: steps of a turn.
            first_block: number of the first turn; those of turn 0 are no measurement.
        """
        self.rows["runs"].append({"key": key, "run_id": key, **self.shared, **settings})
        for rank, steps in enumerate(ranks):
            for step, row in enumerate(steps):
                place = {"key": key, "rank": rank, "step": step, "epoch": 0}
                block = first_block + step // block_steps
                step_s = sum(took for name, took in row.items() if name.endswith("_s"))
                self.rows["steps"].append({**place, "block": block, "step_s": step_s, **row})
        for name, rows in tables.items():
            self.rows[name] += [{"key": key, **row} for row in rows]

    def frames(self) -> Frames:
        """Return all tables, with the columns and types of records."""
        tables = {name: order_and_type_columns(name, pd.DataFrame(self.rows[name])) for name in TABLES[1:]}
        return empty_frames()._replace(runs=build_runs_table(self.rows["runs"]), **tables)


def verdict(item: str, frames: Frames, begins: str) -> Verdict:
    """Return the verdict on the first claim whose text begins so."""
    return next(
        verdict for verdict in figures.load(item).judge(frames) if verdict.claim.text.startswith(begins)
    )


def page(item: str, frames: Frames, profile: str = "laptop") -> str:
    """Return an item's page in Markdown, with the verdicts on these frames."""
    has_numbers = len(frames.runs) > 0 or profile == figures.PUBLISHED
    figure = figures.load(item)
    return figure.markdown_page(
        frames, profile, figure.judge(frames), figure.tables(frames) if has_numbers else []
    )
