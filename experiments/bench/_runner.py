"""One runner for all benchmarks: cases are measured in turn, recorded, and where it was stopped it goes on.

A record is a line of JSON for each measured row: when, on which machine, with which code, of which case, and
its numbers. A line before them says how and where they were measured. Without torch, so that records can be
read and drawn without it.
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

import jinja2

from analysis.records.files import DamagedFileError, write_atomic
from analysis.records.log import read_objects
from experiments.config import code_version
from experiments.config.folders import Folders

Record = dict[str, Any]

SCHEMA = 1  # of the records; others are not read
PERCENTILES_FROM = 20  # repetitions; of fewer, the spread is from the smallest to the largest
WRONG = "wrong"  # the field of a row that must not be: a sentence


class Stopped(KeyboardInterrupt):
    """A case was told to end; `rows` are what is known of it."""

    def __init__(self, rows: list[Record]) -> None:
        super().__init__()
        self.rows = rows


def measured_before(rows: Sequence[Record]) -> bool:
    """Tell whether this very code has measured it."""
    return bool(rows[0]["code"] == code_version.digest())


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark, as its options have it."""

    about: Record  # the machine and the code, in every row (`_timing.facts`)
    head: str = ""  # printed first
    cases: Sequence[Record]  # what is measured, in values of JSON
    # How it is measured, in values of JSON; of another setting nothing is used again.
    setting: Record = field(default_factory=dict)
    measure: Callable[[Record], Iterable[Record]]  # the rows of a case
    heading: str = ""  # of the table, with | between columns
    row: str = ""  # of it, with the formats of a row's fields
    title: Callable[[Record], str] | None = None  # of a case's own table; without, one has all cases
    text: Callable[[list[Record]], str] | None = None  # printed of a case's rows, in place of a table
    last: Callable[[list[Record]], Record] = (
        lambda rows: {}
    )  # of all rows, in the object that is printed last
    end: Callable[[Record], Sequence[str]] = lambda line: ()  # of that object, said before it
    # Are the newest rows of a case good enough not to measure it again?
    settled: Callable[[Sequence[Record]], bool] = measured_before
    # Why a case is not begun in this call, given the seconds that are left; empty where it is.
    waits: Callable[[Record, float], str] = lambda case, left_s: "" if left_s > 0 else "waits"
    draw: Callable[[Path, Path], Path] | None = None  # a file of records, into a folder
    public: Callable[[Record], Record] = lambda row: row  # a row as it is shipped
    not_shipped: str = ""  # why its rows are not to be shipped, if so
    fails: Callable[[list[Record]], bool] = lambda rows: any(row.get(WRONG) for row in rows)
    folder: str = ""  # of the records, and of what is drawn, below the results

    def key(self, name: str, case: Record) -> str:
        """16 digits of a hash over all that makes rows comparable, but for the code."""
        what = [name, self.about.get("torch"), self.setting, case]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def places(self, name: str, results: Path) -> tuple[Path, Path]:
        """The file of this device's records, and the folder of what is drawn from it."""
        if self.folder:
            return results / self.folder / "records.jsonl", results / self.folder
        return results / "bench" / f"{stem(name, self.about)}.jsonl", results / "figures"


def run(
    name: str, bench: Bench, *, force: bool = False, ship: bool = False, minutes: float | None = None
) -> int:
    """Measure the cases that are due, print all of them, and return the exit code.

    Args:
        force: measure again what is settled.
        ship: copy the newest rows into results/shipped.
        minutes: of this call; what does not fit waits for the next one.
    """
    if ship and bench.not_shipped:
        raise ValueError(f"--ship: {bench.not_shipped}")
    folders, began = Folders(), time.monotonic()
    store, drawn_in = bench.places(name, folders.results)
    store.parent.mkdir(parents=True, exist_ok=True)
    earlier, rows, waiting, stood, is_told = newest(store), list[Record](), dict[str, str](), 0, False
    code = code_version.digest()
    start = {"schema": SCHEMA, "kind": "invocation", "bench": name, **bench.about, **bench.setting}
    due = [start]  # lines to be recorded before the next rows
    versions = f", torch {bench.about['torch']}" if "torch" in bench.about else ""
    print(f"{bench.about['name']}{versions}{bench.head and f'; {bench.head}'}\n")
    if bench.heading and not bench.title:
        print(heading(bench.heading))
    for case in bench.cases:
        key = bench.key(name, case)
        left_s = math.inf if minutes is None else 60 * minutes - (time.monotonic() - began)
        if key in earlier and not force and bench.settled(earlier[key]):
            stood, found = stood + 1, earlier[key]
        elif note := bench.waits(case, left_s):
            waiting[", ".join(map(str, case.values()))] = note
            continue
        else:
            try:
                with ended_by_sigterm():
                    found = list(bench.measure(case))
            except Stopped as stop:
                found, is_told = stop.rows, True
            row = {"schema": SCHEMA, "kind": "row", "bench": name, "key": key, "code": code, **bench.about}
            row.pop("provenance", None)
            found = [{**row, **case, **each} for each in found]
            write_atomic(store, (store.read_text() if store.exists() else "") + text_of([*due, *found]))
            due = []
        rows += found
        print(shown(bench, case, found), flush=True)
        if is_told:
            break
    print(*(f"{case}: {note}" for case, note in waiting.items()), f"\n{store}", sep="\n")
    if stood:
        print(f"{stood} of {len(bench.cases)} were measured before; --force or FORCE=1 measures again")
    if bench.draw and rows:
        print(bench.draw(store, drawn_in))
    if ship:
        print(*(f"shipped {path}" for path in shipped(name, bench, folders)), sep="\n")
    print(*(f"WRONG: {row[WRONG]}\n" for row in rows if row.get(WRONG)), sep="", end="")
    line = {"bench": name, "device": bench.about["name"], **(bench.last(rows) if rows else {})}
    print(*bench.end(line), json.dumps(line), sep="\n")
    if is_told:
        raise KeyboardInterrupt
    return 1 if bench.fails(rows) else 0


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends as Ctrl-C does, with what is finished kept."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def shown(bench: Bench, case: Record, rows: list[Record]) -> str:
    lines = [f"\n### {bench.title(case)}\n"] if bench.title else []
    if bench.text:
        return "\n".join([*lines, bench.text(rows)])
    lines += [heading(bench.heading)] if bench.title else []
    return "\n".join([*lines, *(formatted(f"| {bench.row} |", row) for row in rows)])


def heading(names: str) -> str:
    """The first two lines of a table: the first column at the left, all others at the right."""
    return f"| {names} |\n|---|{'---:|' * names.count(' | ')}"


def formatted(form: str, row: Record) -> str:
    """A row's fields; why it was not measured, where it was not."""
    if row.get("why"):
        first, *others = form.split(" | ")
        form = " | ".join([first, "{why}", *("" for _ in others[1:])]) + " |"
    return Cells().vformat(form, (), defaultdict(lambda: None, row))


class Cells(string.Formatter):
    """Formats of a row's fields: a spread is its median, and where the values lie; a list is from its least
    to its most; what there is not, nothing.
    """

    def get_field(self, name: str, args: Sequence[Any], row: Mapping[str, Any]) -> tuple[Any, str]:
        """A row's field, or a field of that; None where there is none."""
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


def stem(name: str, about: Record) -> str:
    """The name of a device's files; without the host's name, because results are meant to be shared."""
    words = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", about["name"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", words))
    return f"{name}-{'cpu-' if about['device'] == 'cpu' else ''}{slug}"


def newest_stores(name: str, folders: Folders) -> list[Path]:
    """Every device's records of a benchmark: this checkout's where there are any, else the shipped ones."""
    stores = {
        path.name: path
        for folder in (folders.shipped, folders.results)
        for path in sorted((folder / "bench").glob(f"{name}-*.jsonl"))
    }
    return [store for _, store in sorted(stores.items())]


def newest(store: Path) -> dict[str, list[Record]]:
    """The rows of each case that were measured last, by its key. Older records have none, and damaged rows
    are passed over.
    """
    found: dict[str, list[Record]] = {}
    for row in read_objects(store)[0] if store.exists() else ():
        is_named = isinstance(row.get("key"), str) and isinstance(row.get("at"), str)
        if row.get("schema") == SCHEMA and row.get("kind") == "row" and is_named:
            same = found.get(row["key"], [])
            found[row["key"]] = [*same, row] if same and same[0]["at"] == row["at"] else [row]
    return found


def numbered(store: Path, names: Sequence[str]) -> Iterator[Record]:
    """The newest rows of a store that have these numbers, of which the first is not 0; a store that can't be
    read has none.
    """
    with contextlib.suppress(DamagedFileError):
        for row in (row for of_case in newest(store).values() for row in of_case):
            numbers = [row.get(name) for name in names]
            if all(isinstance(number, int | float) and number >= 0 for number in numbers) and numbers[0]:
                yield row


def text_of(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def shipped(name: str, bench: Bench, folders: Folders) -> list[Path]:
    """The newest rows of all cases, the lines that say how they were measured, and what is drawn of them,
    into what the repository carries.
    """
    (store, _), (target, drawn_in) = (
        bench.places(name, results) for results in (folders.results, folders.shipped)
    )
    rows = [row for of_case in newest(store).values() for row in of_case]
    used = {row["at"] for row in rows}
    lines = read_objects(store)[0]
    starts = [line for line in lines if line.get("kind") == "invocation" and line["at"] in used]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text_of([*starts, *map(bench.public, rows)]))
    return [target, *([bench.draw(target, drawn_in)] if bench.draw else [])]


def rendered(template: str, filters: Mapping[str, Callable[..., str]], **content: Any) -> str:
    """A page, by a template of this folder."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    pages.filters |= filters
    return pages.get_template(template).render(content)


def spread(values: Sequence[float]) -> Record:
    """Median, and where the values lie."""
    low, high, words = min(values), max(values), "min to max"
    if len(values) >= PERCENTILES_FROM:
        low, *_, high = statistics.quantiles(values, n=20, method="inclusive")
        words = "5 to 95 %"
    found = {"median": statistics.median(values), "low": low, "high": high}
    return {name: rounded(value) for name, value in found.items()} | {"n": len(values), "spread": words}


def rounded(value: float) -> float:
    """Five digits."""
    return round(value, 4 - math.floor(math.log10(value))) if value > 0 else value


def ratio(above: Mapping[int, float] | None, below: Mapping[int, float] | None) -> Record | None:
    """Two rows' times, by repetition, as ratios within each repetition in which both ran."""
    if above is None or below is None:
        return None
    both = [above[turn] / below[turn] for turn in above if below.get(turn)]
    return spread(both) if both else None
