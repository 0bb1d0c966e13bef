"""Pages of benchmarks: a picture and tables, drawn from the records of a device without torch.

These pictures are no items of experiments/figures, which are drawn from runs; `python -m experiments figures`
draws both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import jinja2
from msgspec import Meta, Struct, ValidationError, convert

from analysis import plots
from analysis.pictures import style
from analysis.pictures.captions import join_with_and
from analysis.pictures.numbers import format_number, format_with_interval
from analysis.records.files import DamagedFileError, write_atomic
from analysis.records.log import read_json_lines
from analysis.records.schema import Finite, WholeNumber
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.bench import _page_pictures as pictures
from experiments.bench._compared_rows import (
    AROUND_ROWS,
    PAGE_SIZES,
    README_CASE,
    SELECT_ROWS,
    STANDARD_SELECTION_CASE,
    STEP_ROWS,
    FusedCase,
    PageSize,
)
from experiments.bench._runner import SCHEMA, Record, find_device_stores
from experiments.bench._targets import to_estimate
from experiments.config.folders import ResultFolders

Say = Callable[[str], None]
Positive = Annotated[float, Meta(gt=0, lt=1e12)]
UnitFraction = Annotated[float, Meta(ge=0, le=1)]
ElementCount = Annotated[int, Meta(ge=1, le=2**53)]


class Spread(Struct, frozen=True):
    """A median and the range of its samples."""

    median: Positive
    low: Finite
    high: Finite
    n: WholeNumber


class Share(Struct, frozen=True):
    """A median of shares and the range of its samples."""

    median: UnitFraction
    low: UnitFraction
    high: UnitFraction
    n: WholeNumber


class BenchmarkInvocation(Struct, frozen=True):
    """Call of a benchmark."""

    at: datetime


class SelectInvocation(BenchmarkInvocation, frozen=True):
    """Call of the benchmark of selections."""

    flush_bytes: WholeNumber


class StepInvocation(BenchmarkInvocation, frozen=True):
    """Call of the benchmark of whole steps."""

    launches: WholeNumber


class BenchmarkRow(Struct, frozen=True, kw_only=True):
    """The fields of each row of a case."""

    at: datetime
    name: str
    torch: str
    row: str
    density: Annotated[float, Meta(gt=0, le=1)]
    commit: str | None = None
    dirty: str | None = None


class SelectRow(BenchmarkRow, frozen=True, kw_only=True):
    """A selection by one row; `why` is the reason where it was not timed."""

    device: str
    n: ElementCount
    distribution: str
    k: WholeNumber
    source: str
    what: str
    why: str | None


class TimedSelectRow(SelectRow, frozen=True, kw_only=True):
    """A selection that was timed."""

    why: str | None = None
    repeats: WholeNumber
    median_ms: Positive
    low_ms: Finite
    high_ms: Finite
    spread: str
    host_syncs: Finite
    bytes_words: str
    kernel: str | None = None
    cpu_ms: Spread | None = None
    over_add: Spread | None = None
    over_copy: Spread | None = None
    eager_over: Spread | None = None
    eager_hugepages_over: Spread | None = None
    bytes_per_element: Finite | None = None
    fallback_rate: Finite | None = None
    selected_over_k: Finite | None = None


class StepRow(BenchmarkRow, frozen=True, kw_only=True):
    """A row of the benchmark of whole steps."""

    network: str
    workers: WholeNumber
    layers: WholeNumber | None = None  # of linear ones


class TimedStepRow(StepRow, frozen=True, kw_only=True):
    """A training step, timed."""

    batch: WholeNumber
    shape: list[int]
    turns: WholeNumber
    cpu_ms: Spread
    wall_ms: Spread
    cpu_over_ddp: Spread
    wall_over_ddp: Spread


class StepCountsRow(StepRow, frozen=True, kw_only=True):
    """The counts of a training step."""

    collectives: WholeNumber
    ddp_buckets: WholeNumber
    operations: WholeNumber | None = None
    around_search: WholeNumber | None = None


class AroundSearchRow(StepRow, frozen=True, kw_only=True):
    """A step without a network, timed."""

    n: ElementCount
    turns: WholeNumber
    cpu_ms: Spread
    wall_ms: Spread
    cpu_over_add: Spread
    wall_over_add: Spread
    candidates_over_k: Spread | None = None
    bytes_by_time: Spread | None = None
    bytes_per_element: Finite | None = None


class FusedInvocation(BenchmarkInvocation, frozen=True):
    """Call of the benchmark of the fused selection over torch.topk."""

    launches: WholeNumber
    flush_bytes: WholeNumber


class FusedRow(BenchmarkRow, frozen=True, kw_only=True):
    """A case of the fused selection over torch.topk; `why` is the reason where it was not timed."""

    gradient: str
    n: ElementCount
    pages: PageSize
    why: str | None


class TimedFusedRow(FusedRow, frozen=True, kw_only=True):
    """A case that was timed in some launches."""

    why: str | None = None
    source: str
    torch_ms: Spread
    fused_ms: Spread
    ratio: Spread
    wall_ratio: Spread
    residual_huge_share: Share
    malloc_huge_share: Share
    turns: list[WholeNumber]


Cell = Estimate | float | str | None
Columns = Mapping[str, str | Callable[[Record], Cell]]  # a table's column -> a row's field, or its cell


def row_name_with_kernel(row: Record) -> str:
    return f"{row['row']} ({row['kernel']})" if row.get("kernel") else str(row["row"])


def step_time_ms(row: Record) -> Estimate:
    return Estimate(row["median_ms"], row["low_ms"], row["high_ms"], row["repeats"])


def traffic_gb_per_s(row: Record) -> float | None:
    nbytes = row["bytes_per_element"]
    return None if nbytes is None else 1e-6 * nbytes * row["n"] / row["median_ms"]


def fallback_percent(row: Record) -> float | None:
    return None if row["fallback_rate"] is None else 100 * row["fallback_rate"]


def median_percent(row: Record, field: str) -> float:
    return 100 * float(row[field]["median"])


SELECT_COLUMNS: Columns = {
    "row": row_name_with_kernel, "time of a step": step_time_ms, "CPU time": "cpu_ms",
    "repetitions": "repeats", "/ add": "over_add", "/ copy": "over_copy", "eager / it": "eager_over",
    "eager in huge pages / it": "eager_hugepages_over", "bytes per element": "bytes_per_element",
    "speed": traffic_gb_per_s, "fallbacks": fallback_percent, "host syncs": "host_syncs",
    "sent / k": "selected_over_k",
}  # fmt: skip
STEP_COLUMNS: dict[str, Columns] = {
    "time": {
        "way": "row", "CPU time": "cpu_ms", "wall time": "wall_ms", "CPU time / ddp": "cpu_over_ddp",
        "wall time / ddp": "wall_over_ddp",
    },
    "counts": {
        "way": "row", "collectives": "collectives", "DDP's buckets": "ddp_buckets",
        "tensor operations": "operations", "around the search": "around_search",
    },
    "around": {
        "what": "row", "CPU time": "cpu_ms", "wall time": "wall_ms", "CPU time / add": "cpu_over_add",
        "wall time / add": "wall_over_add", "candidates / k": "candidates_over_k",
        "bytes per element": "bytes_per_element", "as many by time": "bytes_by_time",
    },
}  # fmt: skip
STEP_SCHEMAS: dict[str, type[Struct]] = {
    "time": TimedStepRow,
    "counts": StepCountsRow,
    "around": AroundSearchRow,
}
UNITS = {
    "time of a step": "ms", "CPU time": "ms", "wall time": "ms", "fallbacks": "%", "speed": "GB/s",
    "torch.topk": "ms", "fused": "ms", "huge pages of the residual": "%", "of malloc": "%",
}  # fmt: skip


FUSED_COLUMNS: Columns = {
    "gradient": "gradient", "n": "n", "density": "density", "pages": "pages", "torch.topk": "torch_ms",
    "fused": "fused_ms", "torch.topk / fused": "ratio", "in wall time": "wall_ratio",
    "huge pages of the residual": partial(median_percent, field="residual_huge_share"),
    "of malloc": partial(median_percent, field="malloc_huge_share"),
}  # fmt: skip


@dataclass(frozen=True)
class BenchmarkPageDrawer:
    """A drawer of a benchmark's records: for each device a picture and a page in Markdown."""

    benchmark: str
    row_names: Sequence[str]  # in the order of tables
    invocation_schema: type[Struct]
    row_schema: Callable[[Record], type[Struct]]
    case_sort_key: Callable[[Record], tuple[Any, ...]]  # where the case of a row stands on the page
    columns: Callable[[Record], Columns]  # of the table of a row's case
    draw_picture: Callable[[Sequence[Record]], plots.Figure]
    page_content: Callable[[Sequence[Record]], Mapping[str, Any]]  # what the template is given besides

    def draw_every_device(self, folders: ResultFolders, say: Say = print) -> list[Path]:
        """Draw every device's records, this checkout's or else the shipped ones, and return the pictures.

        Says which records had to be left out.
        """
        picture_paths = []
        for store in find_device_stores(self.benchmark, folders):
            try:
                picture_paths.append(self.draw_device(store, folders.figures, say))
            except DamagedFileError as damage:
                say(f"left out: {damage}")
        return picture_paths

    def draw_device(self, store: Path, folder: Path, say: Say = print) -> Path:
        """Draw one device's records into a folder, picture and page, and return the picture's path.

        Raises:
            DamagedFileError: the file has no such records.
        """
        rows, invocations = self.read_rows_and_invocations(store, say)
        if not rows:
            raise DamagedFileError(store, "has no row of a case")
        folder.mkdir(parents=True, exist_ok=True)
        picture = style.save_png_pdf_svg(self.draw_picture(rows), folder, store.stem)
        write_atomic(folder / f"{store.stem}.md", self.render_markdown(rows, invocations, store.stem))
        return picture

    def read_rows_and_invocations(self, store: Path, say: Say = print) -> tuple[list[Record], list[Record]]:
        """Return the newest row of each case, where possible one with times, and all invocations.

        Leaves out damaged lines, and says how many.

        Raises:
            DamagedFileError: it is no file of records.
        """
        lines, num_broken = read_json_lines(store)
        records = [line for line in lines if line.get("schema") == SCHEMA]
        valid = [record for record in records if self.is_valid_record(record)]
        num_damaged = num_broken + len(records) - len(valid)
        if num_damaged:
            say(f"left out {num_damaged} lines of {store}: they are not as they were written")
        newest = dict[tuple[Any, ...], Record]()
        for row in valid:
            if row["kind"] == "row":
                key = (*self.case_sort_key(row), row["row"])
                if not row.get("why") or newest.get(key, row).get("why"):
                    newest[key] = row
        return [*newest.values()], [record for record in valid if record["kind"] == "invocation"]

    def is_valid_record(self, record: Record) -> bool:
        """Tell whether a record has the fields of a row or an invocation."""
        kind = record.get("kind")
        try:
            convert(record, self.invocation_schema if kind == "invocation" else self.row_schema(record))
        except ValidationError:
            return False
        return kind == "invocation" or (kind == "row" and record["row"] in self.row_names)

    def render_markdown(self, rows: Sequence[Record], invocations: Sequence[Record], name: str) -> str:
        """Return the page: the picture, the conditions, a table for each case, descriptions of the rows."""
        rows_with_day = [
            row | {
                "day": row["at"][:10],
                "commit": (row["commit"] or "unknown")[:7] + (" with changes" if row["dirty"] else ""),
            }
            for row in rows
        ]  # fmt: skip
        ordered = sorted(rows_with_day, key=lambda row: self.row_names.index(row["row"]))
        ordered.sort(key=self.case_sort_key)
        times = {row["at"] for row in rows}
        filters: dict[str, Callable[..., Any]] = {
            "number": format_number, "ratio": format_spread, "table": self.format_case_table,
            "listed": join_distinct_values, "listed_mib": join_distinct_mib, "title": step_case_title,
        }  # fmt: skip
        return render_template(
            f"{self.benchmark}.md.jinja", filters, name=name, rows=rows_with_day,
            cases=[[*case_rows] for _, case_rows in groupby(ordered, self.case_sort_key)],
            starts=[invocation for invocation in invocations if invocation["at"] in times],
            **self.page_content(rows_with_day),
        )  # fmt: skip

    def format_case_table(self, rows: Iterable[Record]) -> str:
        """Return the rows of a case as Markdown; below them, why some were not run."""
        cells = list[Record]()
        names_by_reason = dict[str, list[str]]()
        for row in rows:
            if row.get("why"):
                names_by_reason.setdefault(row["why"], []).append(row["row"])
                continue
            cells.append({column: make_cell(row, source) for column, source in self.columns(row).items()})
        note = "; ".join(f"{join_with_and(names)} not run: {why}" for why, names in names_by_reason.items())
        if not cells:
            return f"{note}\n"
        units = {column: unit for column, unit in UNITS.items() if column in cells[0]}
        return Table.from_rows("", cells, units, note).to_markdown()


def make_cell(row: Record, source: str | Callable[[Record], Cell]) -> Cell:
    """Return the cell of a column: of a spread, the estimate."""
    value = row.get(source) if isinstance(source, str) else source(row)
    return to_estimate(value) if isinstance(value, dict) else value


def format_spread(spread: Record) -> str:
    return format_with_interval(to_estimate(spread))


def join_distinct_values(rows: Iterable[Record], field: str) -> str:
    """Return the values of a field, in words."""
    return join_with_and(sorted({row[field] for row in rows if field in row}))


def join_distinct_mib(rows: Iterable[Record], field: str) -> str:
    """Return the values of a field of bytes, in words."""
    return join_with_and(f"{nbytes >> 20} MiB" for nbytes in sorted({row[field] for row in rows}))


def render_template(template: str, filters: Mapping[str, Callable[..., Any]], **content: Any) -> str:
    """Return a page, by a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= filters
    return environment.get_template(template).render(content)


def selection_row_schema(record: Record) -> type[Struct]:
    return TimedSelectRow if "median_ms" in record else SelectRow


def selection_case_sort_key(row: Record) -> tuple[Any, ...]:
    distribution = row["distribution"]
    return distribution != STANDARD_SELECTION_CASE.distribution, distribution, row["n"], row["density"]


def selection_page_content(rows: Sequence[Record]) -> Mapping[str, Any]:
    """Return the floor, the rows that the first sentence compares, and all rows by name."""
    standard = {
        row["row"]: row
        for row in rows
        if (row["n"], row["density"], row["distribution"]) == STANDARD_SELECTION_CASE
    }
    rows_by_name = {name: [row for row in rows if row["row"] == name] for name in SELECT_ROWS}
    compared_rows = [standard[name] for name in ("fused", "numpy") if name in standard]
    return {
        "floor": pictures.floor_row_name(rows),
        "gains": [row for row in compared_rows if row.get("eager_over")],
        "by_row": [named_rows for named_rows in rows_by_name.values() if named_rows],
    }


def step_row_schema(record: Record) -> type[Struct]:
    return STEP_SCHEMAS.get(str(record.get("part")), StepRow)


def step_case_sort_key(row: Record) -> tuple[Any, ...]:
    return [*STEP_COLUMNS].index(row["part"]), *pictures.network_sort_key(row["network"]), row["workers"]


def step_case_title(case: Record) -> str:
    """Return the title of a case of the benchmark of whole steps."""
    workers = f"{case['workers']} worker{'s' if case['workers'] > 1 else ''}"
    network = pictures.network_title(case)
    if case["part"] == "time":
        shape = " x ".join(map(str, case["shape"]))
        return f"Whole steps: {network}, batch {case['batch']} of {shape}, {workers}"
    if case["part"] == "counts":
        return f"Counts of one step: {network}, {workers}"
    return f"Around the search: {network}'s shapes, no network, one worker, density {case['density']:g}"


def step_page_content(rows: Sequence[Record]) -> Mapping[str, Any]:
    """Return what each row of the page is, in words."""
    descriptions = {name: row["what"] for name, row in STEP_ROWS.items()} | AROUND_ROWS
    names = {row["row"] for row in rows}
    return {"descriptions": {name: words for name, words in descriptions.items() if name in names}}


def fused_row_schema(record: Record) -> type[Struct]:
    return TimedFusedRow if "ratio" in record else FusedRow


def fused_case_sort_key(row: Record) -> tuple[Any, ...]:
    gradient = row["gradient"]
    return gradient != "normal", gradient, row["n"], row["density"], PAGE_SIZES.index(row["pages"])


def fused_page_content(rows: Sequence[Record]) -> Mapping[str, Any]:
    """Return the rows of the README's case: with any size of pages, and with its own."""
    timed = [row for row in rows if row.get("ratio")]
    same_but_pages = [
        row
        for row in timed
        if FusedCase(row["gradient"], row["n"], row["density"], README_CASE.pages) == README_CASE
    ]
    return {"readme_rows": sorted(same_but_pages, key=fused_case_sort_key), "readme_pages": README_CASE.pages}


FUSED_PAGE = BenchmarkPageDrawer(
    "fused", ["fused"], FusedInvocation, fused_row_schema, fused_case_sort_key, lambda row: FUSED_COLUMNS,
    pictures.draw_fused_ratios, fused_page_content,
)  # fmt: skip
SELECT_PAGE = BenchmarkPageDrawer(
    "select", [*SELECT_ROWS], SelectInvocation, selection_row_schema, selection_case_sort_key,
    lambda row: SELECT_COLUMNS, pictures.draw_selection_ratios, selection_page_content,
)  # fmt: skip
STEP_PAGE = BenchmarkPageDrawer(
    "step", [*STEP_ROWS, *AROUND_ROWS], StepInvocation, step_row_schema, step_case_sort_key,
    lambda row: STEP_COLUMNS[row["part"]], pictures.draw_step_ratios, step_page_content,
)  # fmt: skip
