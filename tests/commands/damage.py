"""Damaged results folders: every kind of damage, then every command that reads.

What must hold: a command ends within seconds, with exit code 0, 1 or 2 and no traceback; `collect` uses every
attempt that is whole, and names each that it leaves out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from analysis.records.frames import empty_frames
from analysis.records.terminal_escapes import escape_controls
from experiments import figures
from experiments.__main__ import main as command_line
from experiments.commands import report, reproduce, run
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.figures.runs import LAUNCH_SEEDS, repeat_alternating_runs, required_configs
from tests.analysis import synthetic
from tests.analysis.broken_lines import BROKEN

DEADLINE_S = 60  # of one command
MEMORY = 3 * 2**30  # bytes that a command may ask for; a log may have one
ITEM = "fig1"  # two runs, drawn in half a second
PROFILE = "smoke"
ON_SLURM = ["method=topk", "task=cnn_digits", "profile=smoke", "cluster=devcluster", "container=none"]
SWEEP = "runs-001"
CONFIGS = [*required_configs(figures.load(ITEM), PROFILE), compose.resolve(ON_SLURM)]
# A figure's two runs, and one of a sweep. What is damaged belongs to the victims, to both of them alike.
BYSTANDER, *VICTIMS = (run_id(config) for config in CONFIGS)


def make(root: Path) -> ResultFolders:
    """Make whole records, their tables and pictures, a sweep, and the notes of its jobs."""
    folders = ResultFolders(root)
    day = {"started": "2026-01-01T00:00:00Z", "ended": "2026-01-01T00:01:00Z"}
    for config in CONFIGS:
        attempt = synthetic.made(folders.store, config)
        attempt.update_manifest(**day)
        if attempt.run_id in VICTIMS:
            resumed = [{"step": 3, "at": day["started"], "host": "n1"}]
            attempt.update_manifest(
                resumed=resumed, sweep=SWEEP, array=f"{SWEEP}-a0:0", why=None, failure=None
            )
            attempt.store_slurm_job(schema.SlurmJobRecord("12_0"))
            _write(
                folders.launch_folder(attempt) / "start-12_0-0" / "progress.json", '{"step": 3, "steps": 8}'
            )
            _write(folders.launch_folder(attempt) / "worker0_log.err", "a line\n")
    array = {
        "name": f"{SWEEP}-a0", "folder": "a0", "shape": "1 node", "nodes": 1, "time_min": 10,
        "jobs": [{"id": "12_0", "runs": VICTIMS}],
    }  # fmt: skip
    sweep = {
        "name": SWEEP,
        "words": ON_SLURM,
        "created": day["started"],
        "arrays": [array],
        "slurm_conf": None,
    }
    _write(folders.sweeps / SWEEP / "sweep.json", json.dumps(sweep))
    _write(folders.sweeps / SWEEP / "a0" / "12_0_0_log.out", "a line\n")
    for name in ("collect", "reproduce", "report"):
        ended = carry_out(folders, COMMANDS[name])
        assert ended.code == 0, (name, ended)
    return folders


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- kinds of damage
# ------------------------------------------------------------------------------------------
Damage = Callable[[ResultFolders], None]

# Paths in a results folder: {run} is each victim, * anything.
ATTEMPT = "runs/{run}/001"
LOG = "runs/{run}/001/rank0.jsonl"
FILES = {
    "run.json": "runs/{run}/001/run.json",
    "config.json": "runs/{run}/001/config.json",
    "rank0.jsonl": LOG,
    "job.json": "runs/{run}/001/job.json",
    "progress.json": "launch/*/start-*/progress.json",
    "sweep.json": f"sweeps/{SWEEP}/sweep.json",
    "index": f"records/figures/{ITEM}-{PROFILE}.json",
    "cached steps": "records/cache/*/*/steps.parquet",
    "cached rows": "records/cache/*/*/rows.msgpack",
    "collected runs": "records/runs.parquet",
    "collected steps": "records/steps.parquet",
    "a log": "launch/*/*.err",
    "a job's log": "sweeps/*/a0/*.out",
    "picture": f"figures/{ITEM}-{PROFILE}.png",
    "page": f"figures/{ITEM}-{PROFILE}.md",
}
FOLDERS = {
    "runs": "runs",
    "a run": "runs/{run}",
    "an attempt": ATTEMPT,
    "records": "records",
    "cached": "records/cache/*/*",
    "indices": "records/figures",
    "figures": "figures",
    "sweeps": "sweeps",
    "launch": "launch",
    "results": ".",
}
DEEP_BESIDE = (  # where something walks into folders, or removes them
    "runs/{run}/001/own/notes", "records/.runs.part", "report/data/run/notes.js",
)  # fmt: skip
BESIDE = (  # where nothing is, or something else
    *DEEP_BESIDE, "runs/notes", "runs/{run}/002", "runs/{run}/001/.run.json.part",
    "runs/{run}/001/checkpoints/3", "records/cache", "records/cache/notes", "records/figures/notes.json",
    "records/sweeps/notes.json", "figures/notes.png", "sweeps/notes", "sweeps/notes/sweep.json",
    f"sweeps/{SWEEP}/a0/12_0_1_log.out", "launch/notes", "launch/node-failures.jsonl",
    "launch/{run}-001/start-12_0-1", "launch/{run}-001/start-12_0-1/progress.json",
    "launch/{run}-001/worker1_log.err", "bench/methods-notes.jsonl", "report/kept/runs-here.json",
)  # fmt: skip


def paths(folders: ResultFolders, template: str) -> list[Path]:
    """Return the paths that a template means in a results folder."""
    found = list[Path]()
    for run_name in VICTIMS:
        name = template.format(run=run_name)
        found += folders.results.glob(name) if "*" in name else [folders.results / name]
    return [*dict.fromkeys(found)]


VALUES: dict[str, Any] = {
    "missing": KeyError,
    "null": None, "true": True, "-1": -1, "1.5": 1.5, "10**400": 10**400, "inf": float("inf"),
    "nan": float("nan"), "text": "x", "nothing": "", "surrogate": "\ud800", "escape": "\x1b[2J\n\0",
    "[5]": [5], "{}": {}, "{x: 2**70}": {"x": 2**70}, "0": 0, "long": "x" * 5_000,
    "a day": "2026-01-01", "an offset": "2026-01-01T00:00:00+02:00", "a fraction": "2026-01-01T00:00:00.5Z",
    "year 1": "0001-01-01T00:00:00+14:00", "year 9999": "9999-12-31T23:59:59-14:00",
    "a path": "../../etc/passwd", "above": "..", "fewer": [1.0], "more": [1.0, 1.0, 1.0],
}  # fmt: skip
CONTENTS: dict[str, bytes] = {
    "empty": b"", "NULs": bytes(4096), "not UTF-8": b'{"state": "\xff\xfe"}',
    "UTF-16": '{"state": "ok"}'.encode("utf-16"), "5": b"5", "null": b"null", "{}": b"{}", "[{}]": b"[{}]",
    "nested lists": b"[" * 100_000, "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many digits": b'{"state": ' + b"9" * 10_000 + b"}",
    "escapes": b"\x1b[2J\x1b]0;x\x07\r\xc2\x9b2J\xe2\x80\xae\n", "escape": b'{"id": "\\u001b[2J"}',
}  # fmt: skip


def _huge(path: Path, content: bytes) -> None:
    path.touch()
    os.truncate(path, 64 * 2**30)


CHANGES: dict[str, Callable[[Path, bytes], object]] = {  # in place of a file, of which this was the content
    "missing": lambda path, content: None,
    "half": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "garbage after it": lambda path, content: path.write_bytes(content + b"garbage"),
    "64 GiB": _huge,
}


def _deep_folders(path: Path) -> None:
    """Make more folders in each other than Python calls functions in each other."""
    path.mkdir()
    subprocess.run(["mkdir", "-p", "d/" * 1_100], cwd=path, check=True)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(path.parent, os.O_RDONLY)  # a socket's own path may be too long
        server.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)


DEEP = "deep folders"  # making them takes a second
THINGS: dict[str, Callable[[Path], object]] = {  # what may lie in place of what belongs there, or beside it
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
INSTEAD = ("folder", "FIFO", "/dev/zero", "link to itself", "dangling link")


def _replace(path: Path, word: str) -> None:
    """Put something else where a file or a folder belongs."""
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if word in CONTENTS:
        path.write_bytes(CONTENTS[word])
    elif word in THINGS:
        THINGS[word](path)
    else:
        CHANGES[word](path, content)


def _add_thing(path: Path, word: str) -> None:
    with contextlib.suppress(OSError):  # another thing is there
        path.parent.mkdir(parents=True, exist_ok=True)
        THINGS[word](path)


def _split(dotted: str) -> list[str]:
    return re.split(r"\.(?!jsonl)", dotted)


def put(tree: Any, dotted: str, value: Any) -> None:
    """Give a leaf of a JSON object another value, or remove it."""
    *above, name = _split(dotted)
    for part in above:
        tree = tree[int(part)] if isinstance(tree, list) else tree.setdefault(part, {})
    place: Any = int(name) if isinstance(tree, list) else name
    if value is KeyError:
        del tree[place]
    else:
        tree[place] = value


def _with_leaf(text: str, dotted: str, word: str) -> str:
    content = json.loads(text)
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # it has no such leaf
        put(content, dotted, VALUES[word])
    return json.dumps(content)


def _change_leaf(dotted: str, path: Path, word: str) -> None:
    path.write_text(_with_leaf(path.read_text(), dotted, word))


def _change_config_and_key(dotted: str, path: Path, word: str) -> None:
    """Write a config that is not what was written, where all that names its run says that it is."""
    attempt = path.parent
    config = json.loads(path.read_text())
    try:
        put(config, dotted, VALUES[word])
        name = run_id(config)
        key = run_key(config)
        (attempt.parent.parent / name).mkdir()
    except (LookupError, TypeError, AttributeError, ValueError, OSError):
        return  # it has no such leaf, no id can be made of it, or no folder of such a name
    path.write_text(json.dumps(config))
    manifest = attempt / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"key": key, "run_id": name}))
    attempt.rename(attempt.parent.parent / name / attempt.name)
    attempt.parent.rmdir()
    root = attempt.parent.parent.parent
    for note in (root / FILES["sweep.json"], root / FILES["index"]):
        note.write_text(note.read_text().replace(json.dumps(attempt.parent.name), json.dumps(name)))


Lines = list[str]


def _write_lines(path: Path, lines: Lines) -> None:
    """Change the lines of a rank's log, and let the manifest say that they belong there."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    _sign(path)


def _edit_log(path: Path, word: str) -> None:
    _write_lines(path, LINES[word](path.read_text().splitlines()))


def _break_line(path: Path, word: str) -> None:
    first, *rest = path.read_text().splitlines()
    _write_lines(path, [first, BROKEN[word].decode(errors="surrogateescape"), *rest[1:]])


def _change_line(dotted: str, path: Path, word: str) -> None:
    first, line, *rest = path.read_text().splitlines()
    _write_lines(path, [first, _with_leaf(line, dotted, word), *rest])


def _append_line(line: str, dotted: str, path: Path, word: str) -> None:
    _write_lines(path, [*path.read_text().splitlines(), _with_leaf(line, dotted, word)])


def _sign(log: Path) -> None:
    manifest = log.with_name("run.json")
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for path in sorted(log.parent.glob("rank*.jsonl"))
    }
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": files}))


COPIES = ("../../copy of a run/001", "../000", "../002", "../²", "../٣")
LOGS = ("rank7.jsonl", "rankx.jsonl", "rank².jsonl", "rank.jsonl", "rank01.jsonl")


def _copy_attempt(path: Path, word: str) -> None:
    shutil.copytree(path, path / word)


def _copy_log(path: Path, word: str) -> None:
    shutil.copyfile(path, path.with_name(word))
    _sign(path)


def _change_columns(path: Path, word: str) -> None:
    """Write tables that another version of the code may have left."""
    for table in path.glob("*.parquet"):
        pq.write_table(pa.table(COLUMNS[word](pq.read_table(table))), table)


def _with_cells(column: str, value: str, table: Any) -> Any:
    """Return the table with this text in each row of a column, where it has that."""
    if column not in table.column_names:
        return table
    texts = pa.array([value] * len(table), pa.string())
    return table.set_column(table.column_names.index(column), column, texts)


def _leaves(struct: Any) -> list[str]:
    """Return every field of a file's schema, also those of the objects within it."""
    found = list[str]()
    for info in structs.fields(struct):
        found.append(info.name)
        inner = [kind for kind in (info.type, *get_args(info.type)) if isinstance(kind, type(Struct))]
        if inner and get_origin(info.type) not in (list, dict):
            found += [f"{info.name}.{below}" for below in _leaves(inner[0])]
    return found


MANIFEST = (
    *_leaves(schema.Manifest), "files.rank0.jsonl", "files.rank0.jsonl.bytes", "files.rank0.jsonl.sha256",
    "provenance.versions.torch", "provenance.clocks_mhz", "resumed.0", "resumed.0.step", "resumed.0.at",
)  # fmt: skip
CONFIG = {
    ".".join(leaf.split(".")[:depth])
    for config in CONFIGS
    for leaf in ("unknown", *flatten(measured_config(config)))
    for depth in (1, 2, 3)
}
IN_SWEEP = (
    "name", "created", "slurm_conf", "arrays", "arrays.0", "arrays.0.nodes", "arrays.0.jobs",
    "arrays.0.jobs.0", "arrays.0.jobs.0.id", "arrays.0.jobs.0.runs", "arrays.0.jobs.0.runs.0",
)  # fmt: skip
LINE = ("kind", *_leaves(schema.StepLine), "phases.forward", "phases.\ud800", "unknown")
EPOCH = '{"kind": "epoch", "epoch": 1, "step": 8, "val_top1": 50.0, "val_loss": 1.0}'
LOOK = '{"kind": "look", "step": 3, "what": "norms", "of": "all", "xs": [0.0, 1.0], "values": [1.0, 2.0]}'
LINES: dict[str, Callable[[Lines], Lines]] = {
    "none": lambda lines: [],
    "a step twice": lambda lines: [*lines, lines[-1]],
    "a step missing": lambda lines: [*lines[:3], *lines[4:]],
    "half a line more": lambda lines: [*lines, lines[-1][:20]],
}
COLUMNS: dict[str, Callable[[Any], Any]] = {
    "others": lambda table: {"a": [1, 2]},
    "text": lambda table: {name: ["x"] * len(table) for name in table.column_names},
    "three million rows": lambda table: {name: pa.nulls(3_000_000) for name in table.column_names},
    "pandas' words": lambda table: table.replace_schema_metadata({"pandas": "[]"}),
    "configs that are lists": partial(_with_cells, "config_json", "[1]"),
    "configs that are nested": partial(_with_cells, "config_json", "[" * 50_000),
    "configs that are no JSON": partial(_with_cells, "config_json", "{x"),
    "ends without a zone": partial(_with_cells, "ended", "0001-01-01"),
    "runs outside of the folder": partial(_with_cells, "run_id", "../../../../../etc"),
}


# Of JSON objects: a label, their file, what changes a leaf of one, and its leaves.
OBJECTS: tuple[tuple[str, str, Callable[..., None], Iterable[str]], ...] = (
    ("run.json", FILES["run.json"], _change_leaf, MANIFEST),
    ("config.json", FILES["config.json"], _change_leaf, CONFIG),
    ("config.json and its key,", FILES["config.json"], _change_config_and_key, CONFIG),
    ("sweep.json", FILES["sweep.json"], _change_leaf, IN_SWEEP),
    ("a line's", LOG, _change_line, LINE),
    ("a line of epoch,", LOG, partial(_append_line, EPOCH), ("kind", *_leaves(schema.EpochLine))),
    (
        "a line of look,",
        LOG,
        partial(_append_line, LOOK),
        ("kind", *_leaves(schema.SelectionObservationLine)),
    ),
)


def kinds() -> dict[str, Damage]:
    """Return every kind of damage, by a name that says what it does."""
    found: dict[str, Damage] = {"none": lambda folders: None}

    def add(label: str, templates: Sequence[str], act: Callable[..., object], words: Iterable[str]) -> None:
        for word in words:
            found[f"{label}: {word}"] = partial(_act_on, templates, act, word)

    for what, template in FILES.items():
        add(what, [template], _replace, (*CONTENTS, *CHANGES, *INSTEAD))
    for what, template in FOLDERS.items():
        add(f"{what} as a folder", [template], _replace, ("missing", *INSTEAD))
    for label, template, change, leaves in OBJECTS:
        for dotted in leaves:
            add(f"{label} {dotted}", [template], partial(change, dotted), VALUES)
    for thing in THINGS:
        add("beside everything", DEEP_BESIDE if thing == DEEP else BESIDE, _add_thing, [thing])
    add("a line", [LOG], _break_line, BROKEN)
    add("lines", [LOG], _edit_log, LINES)
    add("a copy", [ATTEMPT], _copy_attempt, COPIES)
    add("a log named", [LOG], _copy_log, LOGS)
    for what in ("cached", "records"):
        add(f"columns, {what}", [FOLDERS[what]], _change_columns, COLUMNS)
    return found


def _act_on(
    templates: Sequence[str], act: Callable[..., object], word: object, folders: ResultFolders
) -> None:
    for template in templates:
        for path in paths(folders, template):
            act(path=path, word=word)


# --- commands
# -------------------------------------------------------------------------------------------------
FIRST, SECOND = VICTIMS
COMMANDS = {  # every command that reads, with words that mean the victims
    "collect": ["collect"],
    "figures": ["figures", ITEM],
    "status": ["status"],
    "status RUN": ["status", SECOND],
    "why": ["why", FIRST],
    "why --against": ["why", FIRST, "--against", SECOND],
    "list": ["list"],
    "compare": ["compare", "cluster=local", "x=method.sampling", "y=step_s"],
    "logs": ["logs", SECOND],
    "plan": ["plan", *ON_SLURM],
    "cancel": ["cancel", SWEEP],
    "run": [
        "run",
        *repeat_alternating_runs(figures.load(ITEM).runs(PROFILE), LAUNCH_SEEDS[PROFILE])[1].to_words(),
    ],
    "reproduce": ["reproduce", ITEM, f"profile={PROFILE}"],
    "trace": ["trace", FIRST],
    "run again": ["run", f"again={SECOND}"],
    "report": ["report", "--drawn"],
}
# Commands that go on without a record, and damage that leaves all other records as they were.
OF_ALL = ("collect", "figures", "status", "list", "compare", "plan", "run", "reproduce", "report")
OF_ONE_RECORD = (
    "run.json", "config.json", "rank0.jsonl", "job.json", "progress.json", "cached ", "a line", "lines:",
    "a copy:", "a log named", "a log:", "a job's log:", "a run as a folder",
    "an attempt as a folder", "beside ",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """End of a command: exit code, output and time."""

    code: int | None  # None: it let something escape
    said: str
    error: str
    took_s: float

    @property
    def fault(self) -> str:
        """Return what is wrong with that; empty where nothing is."""
        faults = {
            self.error: bool(self.error),
            "Traceback": "Traceback" in self.said,
            "obeyed by a terminal": self.said != escape_controls(self.said),
            f"exit code {self.code}": self.code not in (0, 1, 2),
            "no word": bool(self.code) and not self.said.strip(),
            f"took {self.took_s:.0f} s": self.took_s > DEADLINE_S,
        }
        return ", ".join(fault for fault, holds in faults.items() if holds)


def _invent(planned: Sequence[PlannedRun], folders: ResultFolders, *_: object, **__: object) -> None:
    """Invent records instead of measuring, which takes seconds."""
    for wanted in planned:
        synthetic.made(folders.store, wanted.config)


def carry_out(folders: ResultFolders, words: Sequence[str]) -> Ended:
    """Carry out a command in this process, where there is no SLURM, and where runs are not measured."""
    said = io.StringIO()
    code = None
    error = ""
    began = time.monotonic()
    if words[0] == "trace":  # which writes into the folder that one is in
        words = [*words, "--out", str(folders.results.parent / "trace.json")]
    surroundings = {"SPARSIFY_RESULTS": str(folders.results), "PATH": "/nowhere", "FORCE": ""}
    with (
        mock.patch.dict(os.environ, surroundings),
        mock.patch.object(run, "execute_runs", _invent),
        mock.patch.object(reproduce, "execute_runs", _invent),
        mock.patch.object(
            report.ShippedRecords, "frames", empty_frames()
        ),  # hundreds of runs, which are whole
        mock.patch.object(figures, "files_by_item", return_value={ITEM: figures.files_by_item()[ITEM]}),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        _bounded(),
    ):
        try:
            code = command_line(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            error = traceback.format_exc()
    return Ended(code, said.getvalue(), error, time.monotonic() - began)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Give no memory, instead of all that there is, to what reads a device to its end."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def find_fault(kind: str, folders: ResultFolders, name: str) -> str:
    """Carry out a command on results with this damage; return what is wrong, empty where nothing is."""
    ended = carry_out(folders, COMMANDS[name])
    is_of_one = kind.startswith(OF_ONE_RECORD)
    if name == "compare" and kind.startswith("config.json and its key"):
        is_of_one = False  # it is a record of something else, which may not compare
    if ended.code and is_of_one and name in OF_ALL:
        return f"stopped by a record that others do without: {ended}"
    return ended.fault or (_find_loss(folders, ended) if name == "collect" else "")


def _find_loss(folders: ResultFolders, collected: Ended) -> str:
    """Return what `collect` left out and did not name; empty where there is nothing."""
    if collected.code != 0:
        return "" if "experiments: " in collected.said else "collect says nothing"
    there = set(parquet.read_parquet(folders.records).runs["run_id"])
    stored = {name for name in (BYSTANDER, *VICTIMS) if (folders.store.root / name).is_dir()}
    unnamed = {name for name in stored - there if name == BYSTANDER or name not in collected.said}
    return f"left out and not named: {unnamed}" if unnamed else ""


def damage_copy(whole: ResultFolders, into: Path, damage: Damage) -> ResultFolders:
    """Damage a copy of these results."""
    shutil.copytree(whole.results, into, symlinks=True)
    folders = ResultFolders(into)
    damage(folders)
    return folders
