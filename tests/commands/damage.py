"""Damaged results folders: every kind of damage, then every command that reads.

    python -m tests.commands.damage [N] [WORD ...]   all of it, or N kinds of damage, or those named by a word

What must hold: a command ends within seconds, with exit code 0, 1 or 2 and no traceback; `collect` uses every
attempt that is whole, and names each that it leaves out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args, get_origin
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct, structs

from analysis.records import parquet, schema
from analysis.records.configs import flatten, measured_config, run_id, run_key
from analysis.records.files import PART
from analysis.records.frames import empty
from analysis.records.store import Attempt
from analysis.records.visible import visible
from experiments import figures
from experiments.__main__ import main as command_line
from experiments.commands import report, reproduce, run
from experiments.config import compose
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.plan import PlannedRun
from experiments.figures.runs import LAUNCHES, configs_of, launched
from experiments.launch.bad_nodes import LEDGER
from tests.analysis import synthetic
from tests.analysis.broken_lines import BROKEN

DEADLINE_S = 60  # of one command
MEMORY = 3 * 2**30  # bytes that a command may ask for; a log may have one
ITEM, PROFILE = "fig1", "smoke"  # two runs, drawn in half a second
ON_SLURM = ["method=topk", "task=cnn_digits", "profile=smoke", "cluster=devcluster", "container=none"]
SWEEP = "runs-001"


@dataclass(frozen=True)
class Results:
    """A folder of results in which the attempts of two runs, the victims, are to be damaged alike."""

    root: Path

    @property
    def folders(self) -> Folders:
        return Folders(self.root)

    @property
    def victims(self) -> list[Attempt]:
        """A figure's run, and one of a sweep."""
        store = self.folders.store
        return [Attempt(store.root / run_id(config) / "001") for config in (_of_figure()[1], _of_sweep())]

    @property
    def bystander(self) -> Attempt:
        """The figure's other run."""
        return Attempt(self.folders.store.root / run_id(_of_figure()[0]) / "001")

    @property
    def index(self) -> Path:
        return self.folders.index / f"{ITEM}-{PROFILE}.json"

    @property
    def cached(self) -> list[Path]:
        """The folders of the victims' own tables."""
        found = (self.folders.records / "attempts").glob("*")
        return [path for path in found if any(path.name.startswith(v.run_id) for v in self.victims)]


def _of_figure() -> list[Config]:
    return configs_of(ITEM, PROFILE)


def _of_sweep() -> Config:
    return compose.resolve(ON_SLURM)


def make(root: Path) -> Results:
    """Whole records, their tables and pictures, a sweep, and the notes of its jobs."""
    results = Results(root)
    folders = results.folders
    for config in (*_of_figure(), _of_sweep()):
        synthetic.made(folders.store, config).update(
            started="2026-01-01T00:00:00Z", ended="2026-01-01T00:01:00Z"
        )
    runs = [attempt.run_id for attempt in results.victims]
    for attempt in results.victims:
        attempt.update(resumed=[{"step": 3, "at": "2026-01-01T00:00:00Z", "host": "n1"}])
        attempt.update(sweep=SWEEP, array=f"{SWEEP}-a0:0", why=None, failure=None)
        attempt.note_job(schema.JobNote("12_0"))
        start = folders.launch(attempt) / "start-12_0-0"
        start.mkdir(parents=True)
        (start / "progress.json").write_text('{"step": 3, "steps": 8}')
        (folders.launch(attempt) / "worker0_log.err").write_text("a line\n")
    sweep = folders.sweeps / SWEEP
    (sweep / "a0").mkdir(parents=True)
    (sweep / "a0" / "12_0_0_log.out").write_text("a line\n")
    array = {
        "name": f"{SWEEP}-a0", "folder": "a0", "shape": "1 node", "nodes": 1, "time_min": 10,
        "jobs": [{"id": "12_0", "runs": runs}],
    }  # fmt: skip
    record = {"name": SWEEP, "words": ON_SLURM, "created": "2026-01-01T00:00:00Z", "arrays": [array]}
    (sweep / "sweep.json").write_text(json.dumps({**record, "slurm_conf": None}))
    for words in (["collect"], ["reproduce", ITEM, f"profile={PROFILE}"], ["report", "--drawn"]):
        ended = carry_out(results, words)
        assert ended.code == 0, (words, ended)
    return results


# --- kinds of damage
# ------------------------------------------------------------------------------------------
Damage = Callable[[Results], None]


def _dotted(of: Any) -> list[str]:
    """Every field of a file's schema, also those of the objects within it."""
    found = list[str]()
    for info in structs.fields(of):
        found.append(info.name)
        inner = [kind for kind in (info.type, *get_args(info.type)) if isinstance(kind, type(Struct))]
        if inner and get_origin(info.type) not in (list, dict):
            found += [f"{info.name}.{below}" for below in _dotted(inner[0])]
    return found


VALUES: dict[str, Any] = {
    "null": None, "true": True, "-1": -1, "1.5": 1.5, "2**70": 2**70, "10**400": 10**400, "inf": float("inf"),
    "nan": float("nan"), "text": "x", "nothing": "", "surrogate": "\ud800", "escape": "\x1b[2J\n\0", "[]": [],
    "[5]": [5], "{}": {}, "{x: 5}": {"x": 5}, "{x: 2**70}": {"x": 2**70}, "5": 5, "0": 0, "long": "x" * 5_000,
    "a day": "2026-01-01", "an offset": "2026-01-01T00:00:00+02:00", "a fraction": "2026-01-01T00:00:00.5Z",
    "year 1": "0001-01-01T00:00:00+14:00", "year 9999": "9999-12-31T23:59:59-14:00",
    "a path": "../../etc/passwd", "above": "..",
}  # fmt: skip
FEW = ("null", "-1", "2**70", "nan", "text", "[5]", "{x: 5}")
CONTENTS: dict[str, bytes] = {
    "empty": b"", "NUL": b"\0", "NULs": bytes(4096), "not UTF-8": b'{"state": "\xff\xfe"}',
    "UTF-16": '{"state": "ok"}'.encode("utf-16"), "5": b"5", "null": b"null", "true": b"true",
    "text": b'"text"', "[]": b"[]", "{}": b"{}", "[{}]": b"[{}]", "NaN": b"NaN",
    "nested lists": b"[" * 100_000, "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many digits": b'{"state": ' + b"9" * 10_000 + b"}", "HTML": b"<html>quota exceeded</html>",
    "escapes": b"\x1b[2J\x1b]0;x\x07\r\xc2\x9b2J\xe2\x80\xae\n", "escape": b'{"id": "\\u001b[2J"}',
}  # fmt: skip


def _huge(path: Path, content: bytes) -> None:
    path.touch()
    os.truncate(path, 64 * 2**30)


def _forbidden(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0)


SPECIAL: dict[str, Callable[[Path, bytes], object]] = {  # in place of a file, of which this was the content
    "missing": lambda path, content: None,
    "half": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "byte order mark": lambda path, content: path.write_bytes(b"\xef\xbb\xbf" + content),
    "garbage after it": lambda path, content: path.write_bytes(content + b"garbage"),
    "FIFO": lambda path, content: os.mkfifo(path),
    "folder": lambda path, content: path.mkdir(),
    "/dev/zero": lambda path, content: path.symlink_to("/dev/zero"),
    "link to itself": lambda path, content: path.symlink_to(path.name),
    "dangling link": lambda path, content: path.symlink_to("nowhere"),
    "64 GiB": _huge,
    "no permission": _forbidden,
}


def _special(name: str, path: Path) -> None:
    """Put something else where a file belongs."""
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    SPECIAL[name](path, content)


def _deep_folders(path: Path) -> None:
    """Make more folders in each other than Python calls functions in each other."""
    path.mkdir()
    chain = "/".join(["d"] * 1_100)
    subprocess.run(["mkdir", "-p", chain], cwd=path, check=True)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(path.parent, os.O_RDONLY)  # a socket's own path may be too long
        server.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)


# Making folders that deep takes a second: they are put where something walks into folders, or removes them.
DEEP = "deep folders"
WITH_DEEP = ("a record", "tables", "a page")
ODD: dict[str, Callable[[Path], object]] = {  # what may lie in a folder beside what belongs there
    "file": lambda path: path.write_bytes(b"\xff\0"),
    "folder": Path.mkdir,
    DEEP: _deep_folders,
    "folder of a name that is no text": lambda path: (path / os.fsdecode(b"\xff")).mkdir(parents=True),
    "FIFO": os.mkfifo,
    "socket": _socket,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to its folder": lambda path: path.symlink_to("."),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


def _beside(places: Sequence[str], name: str, results: Results) -> None:
    """Put this thing beside what belongs there, in each of these places of BESIDE that is still free."""
    for path in (path for place in places for path in BESIDE[place](results)):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            ODD[name](path)


def _put(tree: Any, dotted: Sequence[str], value: Any) -> None:
    *above, name = dotted
    for part in above:
        tree = tree[int(part)] if isinstance(tree, list) else tree.setdefault(part, {})
    at: Any = int(name) if isinstance(tree, list) else name
    if value is KeyError:
        del tree[at]
    else:
        tree[at] = value


def _change(path: Path, dotted: Sequence[str], value: Any) -> None:
    """Another value of one leaf of a JSON file."""
    content = json.loads(path.read_text())
    _put(content, dotted, value)
    path.write_text(json.dumps(content))


def _change_line(attempt: Attempt, number: int, line: Callable[[str], str]) -> None:
    """Another line in a rank's log, and a manifest that says that it belongs there."""
    path = attempt.rank_path(0)
    lines = path.read_text().splitlines()
    lines[number] = line(lines[number])
    path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogateescape"))
    _sign(attempt)


def _replace_line(raw: bytes, attempt: Attempt) -> None:
    """Put these bytes in place of a line, and a manifest beside them that says that they belong there."""
    path = attempt.rank_path(0)
    lines = path.read_bytes().splitlines()
    lines[2] = raw
    path.write_bytes(b"\n".join([*lines, b""]))
    _sign(attempt)


def _sign(attempt: Attempt) -> None:
    manifest = json.loads((attempt.path / "run.json").read_text())
    manifest["files"] = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for path in sorted(attempt.path.glob("rank*.jsonl"))
    }
    (attempt.path / "run.json").write_text(json.dumps(manifest))


FILES: dict[str, Callable[[Results], list[Path]]] = {
    "run.json": lambda results: [attempt.path / "run.json" for attempt in results.victims],
    "config.json": lambda results: [attempt.path / "config.json" for attempt in results.victims],
    "rank0.jsonl": lambda results: [attempt.rank_path(0) for attempt in results.victims],
    "job.json": lambda results: [attempt.path / "job.json" for attempt in results.victims],
    "progress.json": lambda results: [*results.folders.scratch.glob("*/start-*/progress.json")],
    "sweep.json": lambda results: [results.folders.sweeps / SWEEP / "sweep.json"],
    "index": lambda results: [results.index],
    "cached steps": lambda results: [path / "steps.parquet" for path in results.cached],
    "cached spans": lambda results: [path / "spans.parquet" for path in results.cached],
    "collected runs": lambda results: [results.folders.records / "runs.parquet"],
    "collected steps": lambda results: [results.folders.records / "steps.parquet"],
    "a log": lambda results: [
        *results.folders.scratch.glob("*/*.err"), *results.folders.sweeps.glob("*/a0/*.out")
    ],
    "picture": lambda results: [results.folders.figures / f"{ITEM}-{PROFILE}.png"],
    "page": lambda results: [results.folders.figures / f"{ITEM}-{PROFILE}.md"],
}  # fmt: skip
BESIDE: dict[str, Callable[[Results], list[Path]]] = {
    "a run": lambda results: [results.folders.store.root / "notes"],
    "an attempt": lambda results: [attempt.path.parent / "002" for attempt in results.victims],
    "a log": lambda results: [attempt.path / "rank2.jsonl" for attempt in results.victims],
    "a manifest": lambda results: [attempt.path / ".run.json.part" for attempt in results.victims],
    "a record": lambda results: [attempt.path / "own" / "notes" for attempt in results.victims],
    "a checkpoint": lambda results: [attempt.checkpoints / "3" for attempt in results.victims],
    "tables": lambda results: [results.folders.records / f".runs{PART}"],
    "a listing": lambda results: [results.folders.records / "listed"],
    "cached tables": lambda results: [results.folders.records / "attempts" / "notes"],
    "an index": lambda results: [results.folders.index / "notes.json"],
    "a sweep's index": lambda results: [results.folders.sweep_index / "notes.json"],
    "a picture": lambda results: [results.folders.figures / "notes.png"],
    "a sweep": lambda results: [results.folders.sweeps / "notes"],
    "a sweep's file": lambda results: [results.folders.sweeps / "notes" / "sweep.json"],
    "a job's log": lambda results: [results.folders.sweeps / SWEEP / "a0" / "12_0_1_log.out"],
    "a launch": lambda results: [results.folders.scratch / "notes"],
    "a ledger": lambda results: [results.folders.scratch / LEDGER],
    "a start": lambda results: [results.folders.launch(run) / "start-12_0-1" for run in results.victims],
    "a note of progress": lambda results: [
        results.folders.launch(run) / "start-12_0-1" / "progress.json" for run in results.victims
    ],
    "a worker's log": lambda results: [
        results.folders.launch(run) / "worker1_log.err" for run in results.victims
    ],
    "a benchmark": lambda results: [results.root / "bench" / "methods-notes.jsonl"],
    "a report's row": lambda results: [results.folders.report / "kept" / "runs-here.json"],
    "a page": lambda results: [results.folders.report / "data" / "run" / "notes.js"],
}
MANIFEST = (
    *_dotted(schema.Manifest), "files.rank0.jsonl", "files.rank0.jsonl.bytes", "files.rank0.jsonl.sha256",
    "provenance.versions.torch", "provenance.clocks_mhz", "resumed.0", "resumed.0.step", "resumed.0.at",
)  # fmt: skip
FOLDERS: dict[str, Callable[[Results], list[Path]]] = {
    "runs": lambda results: [results.folders.store.root],
    "a run": lambda results: [attempt.path.parent for attempt in results.victims],
    "an attempt": lambda results: [attempt.path for attempt in results.victims],
    "records": lambda results: [results.folders.records],
    "cached": lambda results: results.cached,
    "indices": lambda results: [results.folders.index],
    "figures": lambda results: [results.folders.figures],
    "sweeps": lambda results: [results.folders.sweeps],
    "launch": lambda results: [results.folders.scratch],
    "results": lambda results: [results.root],
}
CONFIG = sorted(
    {
        ".".join(leaf.split(".")[:depth])
        for config in (_of_figure()[1], _of_sweep())
        for leaf in ("unknown", *flatten(measured_config(config)))
        for depth in (1, 2, 3)
    }
)
LINE = ("kind", *_dotted(schema.StepLine), "phases.forward", "phases.\ud800", "unknown")
EPOCH: dict[str, Any] = {"kind": "epoch", "epoch": 1, "step": 8, "val_top1": 50.0, "val_loss": 1.0}
LOOK: dict[str, Any] = {
    "kind": "look", "step": 3, "what": "norms", "of": "all", "xs": [0.0, 1.0], "values": [1.0, 2.0]
}  # fmt: skip


def _on_files(of: Callable[[Results], list[Path]], act: Callable[[Path], object], results: Results) -> None:
    for path in of(results):
        act(path)


def _on_victims(act: Callable[[Attempt], object], results: Results) -> None:
    for attempt in results.victims:
        act(attempt)


def _replace_folder(name: str, path: Path) -> None:
    shutil.rmtree(path)
    if name == "empty":
        path.mkdir()
    else:
        _special(name, path)


def _with_line(dotted: str, value: Any, text: str) -> str:
    content = json.loads(text)
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # it has no such leaf
        _put(content, dotted.split("."), value)
    return json.dumps(content)


def _and(line: str, lines: list[str]) -> list[str]:
    return [*lines, line]


def _split(dotted: str) -> list[str]:
    """At dots, but not at that of a file's name."""
    return dotted.replace("rank0.jsonl", "rank0/jsonl").replace(".", " ").replace("/", ".").split(" ")


def _change_leaf(dotted: str, value: Any, attempt: Attempt) -> None:
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # it has no such leaf
        _change(attempt.path / "run.json", _split(dotted), value)


def _all_lines(write: Callable[[list[str]], list[str]], attempt: Attempt) -> None:
    path = attempt.rank_path(0)
    path.write_text("".join(line + "\n" for line in write(path.read_text().splitlines())))
    _sign(attempt)


def _copy_run(name: str, attempt: Attempt) -> None:
    """A second folder, named by hand."""
    target = attempt.path.parent if name.isdigit() or name == "²" else attempt.path.parent.parent
    shutil.copytree(attempt.path, target / name if target == attempt.path.parent else target / name / "001")


def _rename_rank(name: str, attempt: Attempt) -> None:
    shutil.copyfile(attempt.rank_path(0), attempt.path / name)
    _sign(attempt)


def _other_columns(
    write: Callable[[Any], Any], of: Callable[[Results], list[Path]], results: Results
) -> None:
    """Tables that another version of the code may have left."""
    for folder in of(results):
        for name in ("runs", "steps", "epochs", "spans"):
            table = pq.read_table(folder / f"{name}.parquet")
            pq.write_table(pa.table(write(table)), folder / f"{name}.parquet")


def _with_cells(column: str, value: str, table: Any) -> Any:
    """The table with this text in each row of a column, where it has that."""
    if column not in table.column_names:
        return table
    texts = pa.array([value] * len(table), pa.string())
    return table.set_column(table.column_names.index(column), column, texts)


IN_SWEEP = (
    "name", "created", "slurm_conf", "arrays", "arrays.0", "arrays.0.nodes", "arrays.0.jobs",
    "arrays.0.jobs.0", "arrays.0.jobs.0.id", "arrays.0.jobs.0.runs", "arrays.0.jobs.0.runs.0",
)  # fmt: skip
ALL_LINES: dict[str, Callable[[list[str]], list[str]]] = {
    "none": lambda lines: [],
    "a step twice": lambda lines: [*lines, lines[-1]],
    "a step missing": lambda lines: [*lines[:3], *lines[4:]],
    "backwards": lambda lines: lines[::-1],
    "the last missing": lambda lines: lines[:-1],
    "half a line more": lambda lines: [*lines, lines[-1][:20]],
}
COLUMNS: dict[str, Callable[[Any], Any]] = {
    "none": lambda table: {},
    "others": lambda table: {"a": [1, 2]},
    "one less": lambda table: table.drop_columns(table.column_names[-1:]),
    "text": lambda table: {name: ["x"] * len(table) for name in table.column_names},
    "null": lambda table: {name: [None] * len(table) for name in table.column_names},
    "other names": lambda table: table.rename_columns([f"{name}!" for name in table.column_names]),
    "three million rows": lambda table: {name: pa.nulls(3_000_000) for name in table.column_names},
    "configs that are lists": partial(_with_cells, "config_json", "[1]"),
    "configs that are nested": partial(_with_cells, "config_json", "[" * 50_000),
    "configs that are no JSON": partial(_with_cells, "config_json", "{x"),
    "ends without a zone": partial(_with_cells, "ended", "0001-01-01"),
    "runs outside of the folder": partial(_with_cells, "run_id", "../../../../../etc"),
    "pandas' words": lambda table: table.replace_schema_metadata({"pandas": "[]"}),
}


def kinds() -> dict[str, Damage]:
    """Every kind of damage, by a name that says what it does."""
    found: dict[str, Damage] = {"none": lambda results: None}
    for what, of in FILES.items():
        for name, content in CONTENTS.items():
            found[f"{what}: {name}"] = partial(_on_files, of, partial(_write, content))
        for name in SPECIAL:
            if name != "no permission" or os.geteuid():
                found[f"{what}: {name}"] = partial(_on_files, of, partial(_special, name))
    for dotted in MANIFEST:
        for name, value in {"missing": KeyError, **VALUES}.items():
            act = partial(_change_leaf, dotted, value)
            found[f"run.json {dotted}: {name}"] = partial(_on_victims, act)
    for dotted in CONFIG:
        for name, value in {"missing": KeyError, **VALUES}.items():
            if name in FEW:
                change = partial(_change_config, dotted, value)
                found[f"config.json {dotted}: {name}"] = partial(_on_victims, change)
            found[f"config.json and its key, {dotted}: {name}"] = partial(
                _change_config_and_key, dotted, value
            )
    for kind, line in (("epoch", EPOCH), ("look", LOOK)):
        for dotted in (*line, *_dotted(schema.EpochLine if kind == "epoch" else schema.LookLine)):
            for name, value in {"missing": KeyError, **VALUES}.items():
                damaged_line = _with_line(dotted, value, json.dumps(line))
                add = partial(_all_lines, partial(_and, damaged_line))
                found[f"a line of {kind}, {dotted}: {name}"] = partial(_on_victims, add)
    for name, values in (("fewer", [1.0]), ("more", [1.0] * 3), ("nothing", [])):
        text = json.dumps(LOOK | {"values": values})
        found[f"a line of look, values: {name}"] = partial(
            _on_victims, partial(_all_lines, partial(_and, text))
        )
    for name, raw in BROKEN.items():
        found[f"a line: {name}"] = partial(_on_victims, partial(_replace_line, raw))
    for name in ODD:
        places = [place for place in BESIDE if name != DEEP or place in WITH_DEEP]
        for place in places:
            found[f"beside {place}: {name}"] = partial(_beside, [place], name)
        found[f"beside everything: {name}"] = partial(_beside, [*{*places} - {"a log"}], name)
    for dotted in LINE:
        for name, value in {"missing": KeyError, **VALUES}.items():
            act = partial(_change_line, number=2, line=partial(_with_line, dotted, value))
            found[f"a line's {dotted!a}: {name}"] = partial(_on_victims, act)
    for name, write in ALL_LINES.items():
        found[f"lines: {name}"] = partial(_on_victims, partial(_all_lines, write))
    for name in ("copy of a run", "000", "002", "1" * 300, "²", "٣"):
        if len(name) < 255:
            found[f"a copy named {name!a}"] = partial(_on_victims, partial(_copy_run, name))
    for name in ("rank7.jsonl", "rankx.jsonl", "rank².jsonl", "rank.jsonl", "rank01.jsonl"):
        found[f"a log named {name!a}"] = partial(_on_victims, partial(_rename_rank, name))
    for what, of in FOLDERS.items():
        for name in ("empty", "missing", "FIFO", "dangling link", "link to itself", "/dev/zero"):
            found[f"{what} as a folder: {name}"] = partial(_on_files, of, partial(_replace_folder, name))
    for name, columns in COLUMNS.items():
        for what in ("cached", "records"):
            found[f"columns, {what}: {name}"] = partial(_other_columns, columns, FOLDERS[what])
    for dotted in IN_SWEEP:
        for name in FEW:
            found[f"sweep.json {dotted}: {name}"] = partial(_change_sweep, dotted, VALUES[name])
    return found


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _change_config(dotted: str, value: Any, attempt: Attempt) -> None:
    _change(attempt.path / "config.json", dotted.split("."), value)


def _change_config_and_key(dotted: str, value: Any, results: Results) -> None:
    """A config that is not what was written, where all that names its run says that it is."""
    notes = [results.folders.sweeps / SWEEP / "sweep.json", results.index]
    for attempt in results.victims:
        path = attempt.path / "config.json"
        config = json.loads(path.read_text())
        try:
            _put(config, dotted.split("."), value)
            name, key = run_id(config), run_key(config)
            (attempt.path.parent.parent / name).mkdir()
        except (LookupError, TypeError, AttributeError, ValueError, OSError):
            continue  # it has no such leaf, no id can be made of it, or no folder of such a name
        path.write_text(json.dumps(config))
        _change(attempt.path / "run.json", ["key"], key)
        _change(attempt.path / "run.json", ["run_id"], name)
        attempt.path.rename(attempt.path.parent.parent / name / attempt.path.name)
        attempt.path.parent.rmdir()
        for note in notes:
            note.write_text(note.read_text().replace(json.dumps(attempt.run_id), json.dumps(name)))


def _change_sweep(dotted: str, value: Any, results: Results) -> None:
    _change(results.folders.sweeps / SWEEP / "sweep.json", dotted.split("."), value)


# --- commands
# -------------------------------------------------------------------------------------------------
def commands() -> dict[str, list[str]]:
    """Every command that reads, with words that mean the victims."""
    first, second = (run_id(config) for config in (_of_figure()[1], _of_sweep()))
    return {
        "collect": ["collect"],
        "figures": ["figures", ITEM],
        "status": ["status"],
        "status RUN": ["status", second],
        "why": ["why", first],
        "why --against": ["why", first, "--against", second],
        "list": ["list"],
        "compare": ["compare", "cluster=local", "x=method.sampling", "y=step_s"],
        "logs": ["logs", second],
        "plan": ["plan", *ON_SLURM],
        "cancel": ["cancel", SWEEP],
        "run": ["run", *_words_of_figure()],
        "reproduce": ["reproduce", ITEM, f"profile={PROFILE}"],
        "trace": ["trace", first],
        "run again": ["run", f"again={second}"],
        "report": ["report", "--drawn"],
    }


# Commands that go on without a record, and damage that leaves all other records as they were.
OF_ALL = ("collect", "figures", "status", "list", "compare", "plan", "run", "reproduce", "report")
OF_ONE_RECORD = (
    "run.json", "config.json", "rank0.jsonl", "job.json", "progress.json", "cached ", "a line", "lines:",
    "a copy named", "a log named", "a log:", "a run as a folder", "an attempt as a folder", "beside ",
)  # fmt: skip


def _words_of_figure() -> list[str]:
    return launched(figures.load(ITEM).runs(PROFILE), LAUNCHES[PROFILE])[1].words()


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # None: it did not
    out: str
    err: str
    error: str = ""  # what it let escape
    took_s: float = 0.0

    @property
    def fault(self) -> str:
        """What is wrong with that; empty where nothing is."""
        if self.error:
            return self.error
        if "Traceback" in self.out + self.err:
            return "Traceback"
        if self.out + self.err != visible(self.out + self.err):
            return "obeyed by a terminal"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        return "no word" if self.code and not (self.out + self.err).strip() else ""


class Hangs(BaseException):
    """A command took longer than DEADLINE_S."""


def _measured(planned: Sequence[PlannedRun], folders: Folders, *_: object, **__: object) -> None:
    """In place of measuring, which takes seconds: invented records."""
    for wanted in planned:
        synthetic.made(folders.store, wanted.config)


def carry_out(results: Results, words: Sequence[str]) -> Ended:
    """A command in this process, where there is no SLURM, and where runs are not measured but invented."""
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    code, error = None, ""
    only = {ITEM: figures.items()[ITEM]}
    if words[0] == "trace":  # which writes into the folder that one is in
        words = [*words, "--out", str(results.root.parent / "trace.json")]
    surroundings = {"SPARSIFY_RESULTS": str(results.root), "PATH": "/nowhere", "FORCE": ""}
    with (
        mock.patch.dict(os.environ, surroundings),
        mock.patch.object(run, "carry_out", _measured),
        mock.patch.object(reproduce, "carry_out", _measured),
        mock.patch.object(report.Shipped, "frames", empty()),  # hundreds of runs, which are whole
        mock.patch.object(figures, "items", return_value=only),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _deadline(),
        _bounded(),
    ):
        try:
            code = command_line(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Hangs:
            error = "hangs"
        except BaseException as escaped:
            where = traceback.extract_tb(escaped.__traceback__)[-1]
            error = (
                f"{type(escaped).__name__}: {str(escaped)[:80]} ({Path(where.filename).name}:{where.lineno})"
            )
    return Ended(code, out.getvalue(), err.getvalue(), error, time.monotonic() - began)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """What reads a device to its end gets no memory, instead of all that there is."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:  # pytest has one
        yield
        return

    def late(*_: object) -> None:
        raise Hangs

    signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def unjust(results: Results, collected: Ended) -> str:
    """What is wrong with what `collect` made of a folder; empty where nothing is."""
    if collected.code != 0:
        return "" if "experiments: " in collected.err else "collect says nothing"
    there = set(parquet.read_parquet(results.folders.records).runs["run_id"])
    said = collected.out + collected.err
    if results.bystander.path.is_dir() and results.bystander.run_id not in there:
        return "a whole record was not used"
    lost = [a.run_id for a in results.victims if a.path.parent.is_dir() and a.run_id not in there]
    unnamed = [run for run in lost if run not in said]
    return f"{len(unnamed)} records left out and not named" if unnamed else ""


def stopped(kind: str, name: str, ended: Ended) -> str:
    """Return what is wrong where a record's damage ends a command that others would have sufficed for; empty
    where nothing is.
    """
    is_of_one = kind.startswith(OF_ONE_RECORD)
    if name == "compare" and kind.startswith("config.json and its key"):
        is_of_one = False  # it is a record of something else, which may not compare
    return f"stopped: {ended.err.strip()[-200:]}" if ended.code and is_of_one and name in OF_ALL else ""


def damaged(base: Results, into: Path, damage: Damage) -> Results:
    """A copy of these results, damaged."""
    shutil.copytree(base.root, into, symlinks=True)
    results = Results(into)
    damage(results)
    return results


def main(words: Sequence[str]) -> int:
    names = [word for word in words if not word.isdigit()]
    every = {k: d for k, d in kinds().items() if not names or any(name in k for name in names)}
    if most := [int(word) for word in words if word.isdigit()]:
        every = {k: every[k] for k in random.Random(0).sample(sorted(every), min(most[0], len(every)))}
    faults, cases, longest = Counter[str](), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        base = make(Path(folder) / "whole")
        for number, (kind, damage) in enumerate(every.items()):
            if number % 20 == 0:
                print(f"{number} of {len(every)} kinds, {cases} cases", file=sys.stderr, flush=True)
            for name, call in commands().items():
                results = damaged(base, Path(folder) / f"{number}", damage)
                ended = carry_out(results, call)
                fault = ended.fault or stopped(kind, name, ended)
                fault = fault or (unjust(results, ended) if name == "collect" else "")
                cases, longest = cases + 1, max(longest, ended.took_s)
                if fault:
                    faults[name] += 1
                    print(f"{kind} | {name} | {fault}", flush=True)
                subprocess.run(["rm", "-rf", str(results.root)], check=True)  # however deep it is
    print(f"{len(every)} kinds of damage, {cases} cases, the longest {longest:.1f} s; faults: {dict(faults)}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
