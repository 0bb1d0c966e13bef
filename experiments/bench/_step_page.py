"""The benchmark of whole steps as a picture and a page, drawn from its records, without torch.

A file for each device. The picture is no item of experiments/figures, which are drawn from runs; `python -m
experiments figures` draws both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import yaml
from msgspec import Meta, Struct, ValidationError, convert

from analysis import plots
from analysis.pictures import marks
from analysis.pictures.numbers import format_number
from analysis.pictures.style import MethodStyle
from analysis.records.schema import Finite, WholeNumber
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.bench._pages import Page, Say, dated, distinct, of_schema
from experiments.bench._runner import Record, rendered

ABOUT = yaml.safe_load(Path(__file__).with_name("step_ways.yaml").read_text())
LOOKS = {name: MethodStyle(*way["look"]) for name, way in ABOUT.items()}
DDP = "ddp"  # the way that the others are divided by
TITLES = {"linears": "linear layers of 64 x 64", "resnet50": "ResNet-50", "vgg16": "VGG-16"}
ADD_BYTES = 12  # of an element of the in-place add: two numbers read, one written
AROUND = {
    "add": "the in-place add: acc += grad",
    "aggregate": "`distribute(topk)`: check and averaging",
    "around": "the same with `zero_grad`, and with gradients accumulated by autograd",
}
UNITS = {"CPU time": "ms", "wall time": "ms"}
ROW_HEIGHT, AROUND_ROWS = 0.19, 0.75  # inches: of a way; of title and axis


class StepSpread(Struct, frozen=True):
    """A number over launches."""

    median: Annotated[float, Meta(gt=0, lt=1e12)]
    low: Finite
    high: Finite
    n: WholeNumber


class StepStart(Struct, frozen=True):
    """A line of the benchmark of whole steps: one invocation."""

    at: datetime
    launches: WholeNumber
    layers: WholeNumber


class StepRow(Struct, frozen=True):
    """A line of it: what stands in each row of a case."""

    at: datetime
    name: str
    torch: str
    part: str
    network: str
    workers: WholeNumber
    row: str
    density: Finite
    layers: WholeNumber | None = None  # of linear ones
    commit: str | None = None
    dirty: str | None = None


class StepTimed(StepRow, frozen=True, kw_only=True):
    """A way of training, timed."""

    batch: WholeNumber
    shape: list[int]
    turns: WholeNumber
    cpu_ms: StepSpread
    wall_ms: StepSpread
    cpu_over_ddp: StepSpread
    wall_over_ddp: StepSpread


class StepCounted(StepRow, frozen=True, kw_only=True):
    """A way of training, counted."""

    collectives: WholeNumber
    ddp_buckets: WholeNumber
    operations: WholeNumber | None = None
    around_search: WholeNumber | None = None


class StepAround(StepRow, frozen=True, kw_only=True):
    """A step without a network, timed."""

    n: Annotated[int, Meta(ge=1, le=2**53)]
    turns: WholeNumber
    cpu_ms: StepSpread
    wall_ms: StepSpread
    cpu_over_add: StepSpread
    wall_over_add: StepSpread
    candidates_over_k: StepSpread | None = None
    bytes_by_time: StepSpread | None = None
    bytes_per_element: Finite | None = None


PARTS: dict[str, tuple[type[Any], Sequence[str]]] = {
    "time": (StepTimed, [*ABOUT]), "counts": (StepCounted, [*ABOUT]), "around": (StepAround, [*AROUND]),
}  # fmt: skip


def read(path: Path, say: Say = print) -> tuple[list[Record], list[Record]]:
    """The newest row of each case, and the invocations; `of_schema` refuses and leaves out."""
    rows, starts = of_schema(path, _fits, say)
    return list({(*place(row), row["row"]): row for row in rows}.values()), starts


def _fits(record: Record) -> bool:
    schema, rows = PARTS.get(str(record.get("part")), (StepRow, ()))
    is_start = record.get("kind") == "invocation"
    try:
        convert(record, StepStart if is_start else schema)
    except ValidationError:
        return False
    return is_start or (record.get("kind") == "row" and record["row"] in rows)


def place(row: Record) -> tuple[int, int, str, int]:
    """Where the case of a row stands on the page."""
    known = [*TITLES]
    at = known.index(row["network"]) if row["network"] in known else len(known)
    return [*PARTS].index(row["part"]), at, row["network"], row["workers"]


def draw(rows: Sequence[Record]) -> plots.Figure:
    """A panel for each network that was timed, of the fewest workers; a row for each way but DDP itself."""
    timed = [row for row in rows if row["part"] == "time" and row["row"] != DDP]
    least = min((row["workers"] for row in timed), default=1)
    timed = [row for row in timed if row["workers"] == least]
    names = [name for name in LOOKS if any(row["row"] == name for row in timed)]
    panels = [
        ratios([*own], names, title=network) for network, own in groupby(sorted(timed, key=place), called)
    ]
    if not panels:
        panels = [ratios([], [*LOOKS], title="no step was timed")]
    return plots.compose_figure(panels, AROUND_ROWS + ROW_HEIGHT * max(len(names), 3), sharey=True)


@plots.panel_maker
def ratios(axes: plots.Axes, /, rows: Sequence[Record], names: Sequence[str], **words: Any) -> None:
    """A dot with its interval and its number for each way, and a line at 1."""
    for row in rows:
        look = LOOKS[row["row"]]
        found = value(row["cpu_over_ddp"])
        told = found._replace(value=float(f"{found.value:.3g}"))  # there is little room
        marks.draw_dot(axes, names.index(row["row"]), told, look.marker, look.colour)
    axes.axvline(1, color=LOOKS[DDP].colour, linestyle="--", linewidth=0.8, zorder=1)
    plots.set_row_labels(axes, [LOOKS[name].label for name in names])
    marks.set_factor_axis(axes)
    plots.finish_axes(axes, xlabel="CPU time / plain DDP", **words)


def value(spread: Record) -> Estimate:
    return Estimate(spread["median"], spread["low"], spread["high"], spread["n"])


def called(row: Record) -> str:
    """The network of a row, in words."""
    name = TITLES.get(str(row["network"]), str(row["network"]))
    return f"{row['layers']} {name}" if row.get("layers") else name


def title(case: Record) -> str:
    workers = f"{case['workers']} worker{'s' if case['workers'] > 1 else ''}"
    network = called(case)
    if case["part"] == "time":
        shape = " x ".join(map(str, case["shape"]))
        return f"Whole steps: {network}, batch {case['batch']} of {shape}, {workers}"
    if case["part"] == "counts":
        return f"Counts of one step: {network}, {workers}"
    return f"Around the search: {network}'s shapes, no network, one worker, density {case['density']:g}"


def table(rows: Iterable[Record]) -> str:
    """The rows of one case as Markdown."""
    found = list(rows)
    units = UNITS if found[0]["part"] != "counts" else {}
    return Table("", pd.DataFrame([cells(row) for row in found]), units).markdown()


def cells(row: Record) -> dict[str, Estimate | float | str | None]:
    if row["part"] == "counts":
        return {
            "way": row["row"],
            "collectives": row["collectives"],
            "DDP's buckets": row["ddp_buckets"],
            "tensor operations": row.get("operations"),
            "around the search": row.get("around_search"),
        }
    base = DDP if row["part"] == "time" else "add"
    found: dict[str, Estimate | float | str | None] = {
        "way" if row["part"] == "time" else "what": row["row"],
        "CPU time": value(row["cpu_ms"]),
        "wall time": value(row["wall_ms"]),
        f"CPU time / {base}": value(row[f"cpu_over_{base}"]),
        f"wall time / {base}": value(row[f"wall_over_{base}"]),
    }
    if row["part"] == "around":
        kept, like = row.get("candidates_over_k"), row.get("bytes_by_time")
        found |= {
            "candidates / k": value(kept) if kept else None,
            "bytes per element": row.get("bytes_per_element"),
            "as many by time": value(like) if like else None,
        }
    return found


def page(rows: Sequence[Record], starts: Sequence[Record], name: str) -> str:
    """Picture, how it was measured, a table for each case, what the rows are."""
    told = dated(rows)
    order = [*ABOUT, *AROUND]
    in_order = sorted(told, key=lambda row: (place(row), order.index(row["row"])))
    at = {row["at"] for row in rows}
    return rendered(
        "step.md.jinja",
        {"number": format_number, "table": table, "title": title, "listed": distinct},
        name=name, rows=told, ways=ABOUT, around=AROUND,
        cases=[[*own] for _, own in groupby(in_order, place)],
        starts=[each for each in starts if each["at"] in at],
        used=[way for way in order if any(row["row"] == way for row in told)],
    )  # fmt: skip


PAGE = Page("step", read, draw, page)
