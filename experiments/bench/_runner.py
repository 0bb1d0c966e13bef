"""The runner of all benchmarks: it measures cases in turn, records them, and resumes what was interrupted.

A record is a line of JSON for each measured row: when, on which machine, with which code, of which case, and
its numbers. A line before the rows of an invocation says how and where they were measured. The module needs
no torch, so that records can be read and drawn without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import signal
import statistics
import string
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.records.files import DamagedFileError, write_atomic
from analysis.records.log import read_json_lines
from experiments.bench._targets import BenchmarkTarget
from experiments.config import code_version
from experiments.config.folders import ResultFolders
from sparsify.ranges import describe_unknown

Record = dict[str, Any]

SCHEMA = 1  # of the records; others are not read
MIN_SAMPLES_FOR_PERCENTILES = 20  # with fewer, a spread is from the smallest to the largest
WRONG = "wrong"  # the field of a row that failed a check: a sentence


def is_measured_by_this_code(rows: Sequence[Record]) -> bool:
    """Tell whether the present code has measured these rows of a case."""
    return bool(rows[0]["code"] == code_version.code_digest())


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark with its options: the cases, how a case is measured, and how its rows are shown."""

    machine: Record  # the machine and the code, recorded in every row (`_timing.describe_machine_and_code`)
    description: str = ""  # printed first
    cases: Sequence[Record]  # in values of JSON
    # Of every case, in values of JSON; rows of other settings are not used again.
    settings: Record = field(default_factory=dict)
    measure: Callable[[Record], Iterable[Record]]  # returns the rows of a case
    header: str = ""  # of the table, with | between columns
    row_format: str = ""  # of a row of the table, with the formats of its fields
    case_title: Callable[[Record], str] | None = None  # of a case's own table; without, all share a table
    format_rows: Callable[[list[Record]], str] | None = None  # what is printed of a case, instead of a table
    summarise: Callable[[list[Record]], Record] = lambda rows: {}  # the result, which is printed last
    targets: Callable[[Record], Sequence[BenchmarkTarget]] = lambda result: ()  # of a result
    # Tells whether the newest rows of a case need not be measured again.
    is_settled: Callable[[Sequence[Record]], bool] = is_measured_by_this_code
    draw: Callable[[Path, Path], Path] | None = None  # draws a file of records into a folder

    def case_digest(self, name: str, case: Record) -> str:
        """Return 16 digits of a hash of all that makes rows comparable, but for the code."""
        content = [name, self.machine.get("torch"), self.settings, case]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def store_path(self, name: str, results_folder: Path) -> Path:
        """Return the file of this device's records."""
        return results_folder / "bench" / f"{name}-{device_slug(self.machine)}.jsonl"

    def format_case(self, case: Record, rows: list[Record]) -> str:
        """Return what is printed of a case."""
        lines = [f"\n### {self.case_title(case)}\n"] if self.case_title else []
        if self.format_rows:
            return "\n".join([*lines, self.format_rows(rows)])
        lines += [format_table_header(self.header)] if self.case_title else []
        return "\n".join([*lines, *(format_table_row(f"| {self.row_format} |", row) for row in rows)])

    def run(self, name: str, *, force: bool = False, ship: bool = False, minutes: float | None = None) -> int:
        """Measure the cases that are due, record them, print all cases, and return the exit code.

        Args:
            name: of the benchmark.
            force: measure again what is settled.
            ship: copy the newest rows into results/shipped.
            minutes: after which no case is begun.
        """
        start_s = time.monotonic()
        folders = ResultFolders()
        machine = self.machine
        store = self.store_path(name, folders.results)
        store.parent.mkdir(parents=True, exist_ok=True)
        stored_rows = read_newest_rows_by_key(store)
        invocation = {"schema": SCHEMA, "kind": "invocation", "bench": name, **machine, **self.settings}
        code = code_version.code_digest()
        shared_fields = {field: value for field, value in machine.items() if field != "provenance"}
        unwritten = [invocation]
        rows = list[Record]()
        waiting = list[Record]()
        num_reused = 0
        versions = f", torch {machine['torch']}" if "torch" in machine else ""
        print(f"{machine['name']}{versions}{self.description and f'; {self.description}'}\n")
        if self.header and not self.case_title:
            print(format_table_header(self.header))
        for case in self.cases:
            key = self.case_digest(name, case)
            if key in stored_rows and not force and self.is_settled(stored_rows[key]):
                case_rows = stored_rows[key]
                num_reused += 1
            elif minutes is not None and time.monotonic() - start_s >= 60 * minutes:
                waiting.append(case)
                continue
            else:
                with sigterm_as_keyboard_interrupt():
                    header = {"schema": SCHEMA, "kind": "row", "bench": name, "key": key, "code": code}
                    case_rows = [{**header, **shared_fields, **case, **row} for row in self.measure(case)]
                earlier_text = store.read_text() if store.exists() else ""
                write_atomic(store, earlier_text + encode_json_lines([*unwritten, *case_rows]))
                unwritten = []
            rows += case_rows
            print(self.format_case(case, case_rows), flush=True)
        print(*(f"{', '.join(map(str, case.values()))}: waits" for case in waiting), f"\n{store}", sep="\n")
        if num_reused:
            print(
                f"{num_reused} of {len(self.cases)} were measured before; --force or FORCE=1 measures again"
            )
        if self.draw and rows:
            print(self.draw(store, folders.figures))
        if ship:
            print(*(f"shipped {path}" for path in self.ship_newest_rows(name, folders)), sep="\n")
        faults = [row[WRONG] for row in rows if row.get(WRONG)]
        for fault in faults:
            print(f"WRONG: {fault}")
        result = {"bench": name, "device": machine["name"], **(self.summarise(rows) if rows else {})}
        for target in self.targets(result) if rows else ():
            print(target.verdict_sentence(result))
        print(json.dumps(result))
        return 1 if faults else 0

    def ship_newest_rows(self, name: str, folders: ResultFolders) -> list[Path]:
        """Copy the newest rows and invocations into results/shipped, draw them, and return the files."""
        store = self.store_path(name, folders.results)
        target = self.store_path(name, folders.shipped)
        rows = [row for case_rows in read_newest_rows_by_key(store).values() for row in case_rows]
        times = {row["at"] for row in rows}
        lines = read_json_lines(store)[0]
        invocations = [line for line in lines if line.get("kind") == "invocation" and line["at"] in times]
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, encode_json_lines([*invocations, *rows]))
        return [target, *([self.draw(target, folders.shipped / "figures")] if self.draw else [])]


def check_known_names(kind: str, names: Iterable[str], known_names: Iterable[str]) -> None:
    """Refuse names that are not known; the error names the nearest known one."""
    for name in names:
        if name not in known_names:
            raise ValueError(describe_unknown(kind, name, [*known_names]))


@contextmanager
def sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in the block, as Ctrl-C does."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def format_table_header(columns: str) -> str:
    """Return the first two lines of a table: the first column at the left, all others at the right."""
    return f"| {columns} |\n|---|{'---:|' * columns.count(' | ')}"


def format_table_row(row_format: str, row: Record) -> str:
    """Return a row's fields in this format; of a row that was not measured, the reason."""
    if row.get("why"):
        first, *other_columns = row_format.split(" | ")
        row_format = " | ".join([first, "{why}", *("" for _ in other_columns[1:])]) + " |"
    return RowFormatter().vformat(row_format, (), defaultdict(lambda: None, row))


class RowFormatter(string.Formatter):
    """A formatter of fields of rows.

    A spread is written as its median and its range, a list as its smallest to its largest value, an absent
    field as nothing.
    """

    def get_field(self, name: str, args: Sequence[Any], row: Mapping[str, Any]) -> tuple[Any, str]:
        """Return a field of the row, or a field inside it; None where there is none."""
        first, _, inner = name.rstrip("]").partition("[")
        value = row[first]
        return (value[inner] if inner and value is not None else value), first

    def format_field(self, value: Any, form: str) -> str:
        if value is None:
            return ""
        if isinstance(value, dict):
            return f"{value['median']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"
        if isinstance(value, list):
            return " to ".join(dict.fromkeys(f"{bound:{form}}" for bound in value))
        return format(value, form)


def device_slug(machine: Record) -> str:
    """Return a device's part of file names, without the host's name, since results are to be shared."""
    name = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", machine["name"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", name))
    return f"cpu-{slug}" if machine["device"] == "cpu" else slug


def find_device_stores(benchmark: str, folders: ResultFolders) -> list[Path]:
    """Return each device's records of a benchmark: this checkout's, or else the shipped ones."""
    store_by_name = {
        path.name: path
        for folder in (folders.shipped, folders.results)
        for path in sorted((folder / "bench").glob(f"{benchmark}-*.jsonl"))
    }
    return [store for _, store in sorted(store_by_name.items())]


def read_newest_rows_by_key(records_file: Path) -> dict[str, list[Record]]:
    """Return the newest rows of each case, by the case's key; none if there is no file.

    Rows without a key, as older code wrote them, and damaged rows are left out.
    """
    rows_by_key = dict[str, list[Record]]()
    for row in read_json_lines(records_file)[0] if records_file.exists() else ():
        is_named = isinstance(row.get("key"), str) and isinstance(row.get("at"), str)
        if row.get("schema") == SCHEMA and row.get("kind") == "row" and is_named:
            rows = rows_by_key.setdefault(row["key"], [])
            if rows and rows[0]["at"] != row["at"]:
                rows.clear()
            rows.append(row)
    return rows_by_key


def read_newest_rows_with_numbers(records_file: Path, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the newest rows whose fields are numbers of at least 0, the first of them above 0.

    A file that can't be read has none.
    """
    with contextlib.suppress(DamagedFileError):
        for rows in read_newest_rows_by_key(records_file).values():
            for row in rows:
                numbers = [row.get(field) for field in fields]
                if all(isinstance(number, int | float) and number >= 0 for number in numbers) and numbers[0]:
                    yield row


def encode_json_lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def summarise_median_and_range(values: Sequence[float]) -> Record:
    """Return the median of these values and the range in which they lie."""
    low = min(values)
    high = max(values)
    spread = "min to max"
    if len(values) >= MIN_SAMPLES_FOR_PERCENTILES:
        low, *_, high = statistics.quantiles(values, n=20, method="inclusive")
        spread = "5 to 95 %"
    numbers = {"median": statistics.median(values), "low": low, "high": high}
    return {name: round_to_significant_digits(number) for name, number in numbers.items()} | {
        "n": len(values),
        "spread": spread,
    }


def summarise_turn_times(ms_by_turn: Mapping[int, float] | None, factor: float = 1) -> Record | None:
    """Return the spread of a call's times, times a factor; None where there are none."""
    return summarise_median_and_range([factor * ms for ms in ms_by_turn.values()]) if ms_by_turn else None


def round_to_significant_digits(value: float, digits: int = 5) -> float:
    """Round to significant digits; what is not positive stays."""
    return round(value, digits - 1 - math.floor(math.log10(value))) if value > 0 else value


def summarise_turn_ratios(
    numerator: Mapping[int, float] | None, denominator: Mapping[int, float] | None
) -> Record | None:
    """Return the spread of the ratios of two calls' times within each turn; None where no turn has both."""
    if numerator is None or denominator is None:
        return None
    ratios = [numerator[turn] / denominator[turn] for turn in numerator if denominator.get(turn)]
    return summarise_median_and_range(ratios) if ratios else None
