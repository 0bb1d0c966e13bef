from __future__ import annotations

import gzip
import json
from pathlib import Path

from analysis.records import parquet
from analysis.records.files import write_atomic
from analysis.records.frames import Frames
from analysis.trace import trace as trace_of
from experiments.commands._draw import runs_of
from experiments.commands._words import RunName
from experiments.config.folders import Folders
from sparsify.ranges import quoted

GROUP = "results"


def trace(run: RunName, *, out: str | None = None) -> int:
    """A run's recorded spans as a timeline for Perfetto (ui.perfetto.dev) and chrome://tracing.

    Args:
        run: part of the run's name, of this checkout or of what is shipped.
        out: the file to write, compressed where its name ends in .gz; by default the run's name with
            .trace.json in this folder.
    """
    name, frames = _recorded(run, Folders())
    path = Path(out or f"{name}.trace.json")
    text = json.dumps(trace_of(frames, list(frames.runs["key"]), name), allow_nan=False)
    write_atomic(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    print(path)
    return 0


def _recorded(word: str, folders: Folders) -> tuple[str, Frames]:
    """The one run that a word names, and its frames.

    Raises:
        ValueError: none or several, or it has no valid attempt.
    """
    shipped = parquet.read_parquet(folders.shipped)
    own, carried = set(folders.store.runs()), set(shipped.runs["run_id"])
    matching = sorted(name for name in own | carried if word in name)
    if len(matching) != 1:
        listing = ", ".join(matching or sorted(own | carried)) or "none yet"
        raise ValueError(f"{len(matching)} runs match {quoted(word)}; there are: {listing}")
    (name,) = matching
    if name in own and (valid := folders.store.newest_valid(name)):
        return name, parquet.cached(valid, folders.records)[0]
    if name not in carried:
        raise ValueError(f"{name} has no valid attempt: `python -m experiments why {name}` says why")
    return name, runs_of(shipped, [name])
