"""The page of the benchmark of peers: times, bytes and losses, drawn from its records without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct

from analysis import plots
from analysis.pictures.captions import join_with_and
from analysis.records.schema import Finite, WholeNumber
from analysis.stats import estimate_mean
from analysis.tables import Table
from experiments.bench._compared_rows import DDP, PEER_ROWS
from experiments.bench._page_pictures import STEP_MARGIN_INCHES, STEP_ROW_INCHES, cpu_over_ddp_panel
from experiments.bench._pages import (
    BenchmarkPageDrawer,
    BenchmarkRow,
    Columns,
    Positive,
    Spread,
    StepInvocation,
)
from experiments.bench._runner import Record

PARTS = ("time", "bytes", "loss")


class PeerRow(BenchmarkRow, frozen=True, kw_only=True):
    """A variant of a training; `why` is the reason where it was not run, or has no number."""

    task: str
    workers: WholeNumber
    every: WholeNumber
    rank: WholeNumber
    outer_lr: Positive
    outer_momentum: Finite
    package: str  # with its version
    why: str | None = None


class TimedPeerRow(PeerRow, frozen=True, kw_only=True):
    """The time of a step, the mean of a round's."""

    cpu_ms: Spread
    wall_ms: Spread
    cpu_over_ddp: Spread
    wall_over_ddp: Spread


class PeerBytesRow(PeerRow, frozen=True, kw_only=True):
    """The bytes that a worker sends in a step, the mean of all workers and of whole rounds."""

    sent_bytes: Positive  # by the interface
    sent_over_ddp: Positive
    reported_bytes: Finite | None = None  # by the variant itself


class PeerLossRow(PeerRow, frozen=True, kw_only=True):
    """The validation loss at the end of a training."""

    steps: WholeNumber
    seed: WholeNumber
    loss: Finite
    loss_minus_ddp: Finite | None = None


SCHEMA_BY_PART: dict[str, type[Struct]] = {
    "time": TimedPeerRow,
    "bytes": PeerBytesRow,
    "loss": PeerLossRow,
}
COLUMNS_BY_PART: dict[str, Columns] = {
    "time": {
        "variant": "row", "package": "package", "CPU time": "cpu_ms", "wall time": "wall_ms",
        "CPU time / ddp": "cpu_over_ddp", "wall time / ddp": "wall_over_ddp",
    },
    "bytes": {
        "variant": "row", "package": "package", "bytes sent": "sent_bytes", "sent / ddp": "sent_over_ddp",
        "bytes in last_report": "reported_bytes",
    },
    "loss": {
        "variant": "row", "package": "package", "loss": "loss", "loss - ddp": "loss_minus_ddp",
    },
}  # fmt: skip


def peer_row_schema(record: Record) -> type[Struct]:
    return PeerRow if record.get("why") else SCHEMA_BY_PART.get(str(record.get("part")), PeerRow)


def peer_case_sort_key(row: Record) -> tuple[Any, ...]:
    part_and_task = PARTS.index(row["part"]), row["task"]
    return *part_and_task, row["workers"], row["every"], row.get("steps", 0), row.get("seed", 0)


def peer_case_title(case: Record) -> str:
    """Return the title of a case, which for losses is one seed."""
    place = f"{case['task']}, {case['workers']} workers"
    if case["part"] == "time":
        return f"Time of a step: {place}"
    if case["part"] == "bytes":
        return f"Bytes that a worker sends in a step: {place}"
    return f"Validation loss after {case['steps']} steps: {place}, seed {case['seed']}"


def draw_peer_ratios(rows: Sequence[Record]) -> plots.Figure:
    """Draw CPU times over plain DDP's, a panel for each task, of the fewest workers that were timed."""
    timed = [row for row in rows if row.get("cpu_over_ddp") and row["row"] != DDP]
    fewest_workers = min((row["workers"] for row in timed), default=1)
    timed = [row for row in timed if row["workers"] == fewest_workers]
    timed.sort(key=lambda row: row["task"])
    names = [name for name in PEER_ROWS if any(row["row"] == name for row in timed)] or [*PEER_ROWS]
    panels = [
        cpu_over_ddp_panel([*of_task], names, title=f"{task}, {fewest_workers} workers")
        for task, of_task in groupby(timed, lambda row: row["task"])
    ] or [cpu_over_ddp_panel([], names, title="no step was timed")]
    height = STEP_MARGIN_INCHES + STEP_ROW_INCHES * max(len(names), 3)
    return plots.compose_figure(panels, height, sharey=True)


def summarise_losses(rows: Sequence[Record]) -> list[Record]:
    """Return for each variant its mean loss over the seeds of a case, and the mean difference to plain DDP.

    Differences are paired by seed. Intervals are Student's, at 95 %.
    """
    summaries = list[Record]()
    for name in PEER_ROWS:
        ended = [row for row in rows if row["row"] == name and not row.get("why")]
        differences = [row["loss_minus_ddp"] for row in ended if row["loss_minus_ddp"] is not None]
        if ended:
            summaries.append({
                "variant": name,
                "package": ended[-1]["package"],
                "loss": estimate_mean([row["loss"] for row in ended]),
                "loss - ddp": estimate_mean(differences) if differences and name != DDP else None,
                "seeds": len(ended),
            })  # fmt: skip
    return summaries


def format_loss_tables(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the title and the table, over all seeds, of each task, number of workers and number of steps."""
    loss_rows = sorted((row for row in rows if row["part"] == "loss"), key=peer_case_sort_key)
    tables = list[tuple[str, str]]()
    for _, group in groupby(loss_rows, lambda row: peer_case_sort_key(row)[:-1]):
        of_case = [*group]
        title = peer_case_title(of_case[0]).rpartition(", ")[0]
        missing = sorted({f"{row['row']}: {row['why']}" for row in of_case if row.get("why")})
        summaries = summarise_losses(of_case)
        note = "; ".join(missing)
        table = Table.from_rows("", summaries, note=note).to_markdown() if summaries else f"{note}\n"
        tables.append((title, table))
    return tables


def peer_page_content(rows: Sequence[Record]) -> Mapping[str, Any]:
    """Return the tables of losses, the packages, and what each row of the page is, in words."""
    names = {row["row"] for row in rows}
    return {
        "case_title": peer_case_title,
        "losses": format_loss_tables(rows),
        "packages": join_with_and(sorted({row["package"] for row in rows})),
        "descriptions": {name: row["what"] for name, row in PEER_ROWS.items() if name in names},
    }


PEERS_PAGE = BenchmarkPageDrawer(
    "peers", [*PEER_ROWS], StepInvocation, peer_row_schema, peer_case_sort_key,
    lambda row: COLUMNS_BY_PART[row["part"]], draw_peer_ratios, peer_page_content,
)  # fmt: skip
