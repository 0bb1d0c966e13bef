from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.comparison import Comparison
from analysis.files import write_atomic
from analysis.frames import Frames, empty
from analysis.leaves import varying
from analysis.style import save as save_picture
from experiments.commands._listing import configs_of, every_run, filtered
from experiments.commands._make import say
from experiments.commands._terminal import show
from experiments.commands._words import Filters
from experiments.config.folders import Folders

GROUP = "results"
AXES = ("x", "y", "by", "ref")


def compare(words: Filters) -> int:
    """A quantity over a setting, with intervals: compare sweep=thesis x=method.density y=val_top1

    Args:
        words: which runs, as for `list`; x=, the setting along the axis; y=, a column of docs/records.md
            (val_top1, test_top1, val_loss, step_s, samples_per_s, wire_bytes, ...; val_top1 by default); by=,
            the setting that has a line each (method.name by default); ref=, a value of it that the others are
            compared with, seed by seed.
    """
    axes = {name: _given(words, name) for name in AXES}
    filters = [word for word in words if word.partition("=")[0] not in AXES]
    folders = Folders()
    runs = filtered(every_run(folders), filters)
    runs = runs[runs["state"] == "ok"].reset_index(drop=True)
    if not len(runs):
        raise ValueError("no whole run is meant by these words; `list` shows what there is")
    by = axes["by"] or "method.name"
    compared = Comparison(axes["x"] or _only_axis(runs, by), axes["y"] or "val_top1", by, axes["ref"])
    frames = empty()._replace(runs=runs)
    show(compared.table(frames))
    for path in _written(compared, frames, folders, _file_name(filters, compared)):
        say(str(path))
    return 0


def _given(words: Sequence[str], name: str) -> str | None:
    given = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return given[-1] if given else None


def _only_axis(runs: pd.DataFrame, by: str) -> str:
    """What the runs differ in besides `by` and the seed.

    Raises:
        ValueError: nothing, or several things.
    """
    found = [leaf for leaf in varying(configs_of(runs)) if leaf not in (by, "seed")]
    if len(found) == 1:
        return found[0]
    differing = ", ".join(found) if found else f"nothing but {by} and the seed"
    raise ValueError(f"compare over what? The runs differ in {differing}: say x=, as x=method.density")


def _written(compared: Comparison, frames: Frames, folders: Folders, name: str) -> list[Path]:
    """The picture and the table, in every form."""
    picture, table = save_picture(compared.picture(frames), folders.figures, name), compared.table(frames)
    page = f"# {compared.title}\n\n![{name}]({name}.png)\n\n{compared.caption(frames)}\n\n{table.markdown()}"
    texts = {".csv": table.csv(), ".tex": table.tex(), ".md": page}
    for suffix, text in texts.items():
        write_atomic(folders.figures / f"{name}{suffix}", text)
    return sorted({*folders.figures.glob(f"{name}.*"), picture})


def _file_name(filters: Sequence[str], compared: Comparison) -> str:
    """Of letters, digits, - and _ alone: compare-sweep-thesis-val_top1-over-density."""
    words = ["compare", *filters, compared.y, "over", compared.x.removeprefix("method.")]
    return re.sub(r"[^\w]+", "-", "-".join(words)).strip("-")[:120]
