"""The records of the benchmark of selections: a file for each device, a line for each row and invocation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from analysis.files import read_lines, write_atomic
from analysis.schemas import BenchStart, BenchTimed, BenchUnmade
from analysis.style import Look

Record = dict[str, Any]

SCHEMA = 1  # of the records; others are not read
DENSITY, NORMAL, LARGE_N = 0.001, "normal", 25_600_000  # the standard case
# The rows, in the order of tables and legend.
LOOKS = {
    "add": Look("in-place add (the floor)", "#000000", "", ""),
    "copy": Look("copy of 12n bytes", "#777777", "", ""),
    "fused": Look("fused, exact", "#D55E00", "o", ""),
    "fallback": Look("fused, guess always wrong", "#CC79A7", "h", ""),
    "numpy": Look("numpy, exact", "#E69F00", "D", ""),
    "threshold": Look("fused, threshold given", "#F0A35E", "v", ""),
    "eager": Look("torch.topk, exact", "#0072B2", "s", ""),
    "eager_hugepages": Look("torch.topk in huge pages", "#5AA9E6", "d", ""),
    "sort": Look("torch.sort, exact", "#332288", "P", ""),
    "compile": Look("torch.compile, threshold given", "#56B4E9", "<", ""),
    "dgc": Look("DGC's sample, about k", "#009E73", "^", ""),
    "gaussiank": Look("Gaussian-k as published, about k", "#999933", "X", ""),
    "paper_kernel": Look("one thread block, exact", "#882255", "*", ""),
}


def floor_of(rows: Sequence[Record]) -> str:
    """The row that no step can be faster than: the in-place add; in older records, the copy."""
    return "add" if any(row.get("over_add") for row in rows) else "copy"


def stem(row: Record) -> str:
    """The files of a device."""
    words = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", row["name"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", words))
    return f"select-{'cpu-' if row['device'] == 'cpu' else ''}{slug}"


def read(path: Path, say: Callable[[str], None] = print) -> tuple[list[Record], list[Record]]:
    """The newest row of each case, and the invocations; a row with times replaces one without. Says how many
    lines are left out because they are no such records.

    Raises:
        Damaged: it is no file of records.
    """
    lines, broken = read_lines(path)
    ours = [record for record in lines if record.get("schema") == SCHEMA]
    records = [record for record in ours if _fits(record)]
    if damaged := broken + len(ours) - len(records):
        say(f"left out {damaged} lines of {path}: they are not as they were written")
    newest: dict[tuple[Any, ...], Record] = {}
    for row in records:
        if row["kind"] == "row":
            case = (row["n"], row["density"], row["distribution"], row["row"])
            if "median_ms" in row or "median_ms" not in newest.get(case, {}):
                newest[case] = row
    return list(newest.values()), [record for record in records if record["kind"] == "invocation"]


def _fits(record: Record) -> bool:
    schema: type[Any] = BenchTimed if "median_ms" in record else BenchUnmade
    try:
        convert(record, BenchStart if record.get("kind") == "invocation" else schema)
    except ValidationError:
        return False
    return record.get("kind") == "invocation" or (record.get("kind") == "row" and record["row"] in LOOKS)


def append(path: Path, records: Sequence[Record]) -> None:
    """More lines at the end of a file, which is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    write_atomic(path, before + text_of(records))


def text_of(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
