from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path

from analysis.records import parquet
from analysis.records.files import write_atomic
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames
from analysis.times.trace import build_perfetto_trace
from experiments.commands._arguments import RunName
from experiments.commands._drawing import select_rows_by_run_id
from experiments.commands._named_runs import match_one_name
from experiments.config.folders import ResultFolders

GROUP = "results"


def trace(run: RunName, *, out: str | None = None) -> int:
    """Write a run's recorded spans as a timeline for Perfetto (ui.perfetto.dev) and chrome://tracing.

    Args:
        run: part of the run's name; it may be a shipped run.
        out: the file to write, compressed where its name ends in .gz; by default the run's name with
            .trace.json in this folder.
    """
    name, frames = _load_run(run, ResultFolders())
    path = Path(out or f"{name}.trace.json")
    text = json.dumps(build_perfetto_trace(frames, list(frames.runs["key"]), name), allow_nan=False)
    write_atomic(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    print(path)
    return 0


def _load_run(word: str, folders: ResultFolders) -> tuple[str, Frames]:
    """Return the name and the frames of the run that a word names, this checkout's or a shipped one."""
    shipped = parquet.read_parquet(folders.shipped)
    own_names = set(folders.store.list_run_ids())
    shipped_names = set(shipped.runs["run_id"])
    name = match_one_name(word, [*sorted(own_names), *sorted(shipped_names - own_names)])
    if name in own_names:
        frames = load_newest_attempts_cached(folders.store, [name], folders.records).frames
        if len(frames.runs):
            return name, frames
    if name not in shipped_names:
        command = f"python -m experiments why {shlex.quote(name)}"  # a folder may have any name
        raise ValueError(f"{name} has no valid attempt: `{command}` says why")
    return name, select_rows_by_run_id(shipped, [name])
