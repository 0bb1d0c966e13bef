from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import tables
from analysis.comparison import Comparison
from analysis.pictures import captions, style
from analysis.records.configs import distinguishing_leaves, run_key
from analysis.records.files import write_atomic
from analysis.records.frames import Frames, empty_frames
from analysis.records.schema import DIVERGED, DONE
from experiments.commands import new
from experiments.commands._arguments import Filters, split_own_words
from experiments.commands._messages import say
from experiments.commands._run_table import filter_runs, load_runs, run_configs
from experiments.commands._terminal import print_table
from experiments.config import compose
from experiments.config.folders import ResultFolders

GROUP = "results"
AXES = ("x", "y", "by", "ref")


def compare(words: Filters, *, save: str | None = None) -> int:
    """A quantity over a setting, with intervals: compare sweep=thesis x=method.density y=val_top1

    Args:
        words: which runs, as for `list`; x=, the setting along the axis; y=, a column of docs/records.md
            (val_top1, test_top1, val_loss, step_s, samples_per_s, wire_bytes, ...; by default val_top1, or
            val_loss where nothing is classified); by=, the setting that has a line each (method.name by
            default); ref=, a value of it that the others are compared with, seed by seed.
        save: write a figure's file of this name, such as thesis_density, that is yours to change and that
            `reproduce` makes.
    """
    given, filters = split_own_words(words, dict.fromkeys(AXES, str))
    axes = {name: given.get(name) for name in AXES}
    folders = ResultFolders()
    runs = filter_runs(load_runs(folders), filters)
    whole = runs["state"].isin((DONE, DIVERGED))
    for run, state in runs.loc[~whole, ["run_id", "state"]].itertuples(index=False):
        say(f"left out {run}: it is {state}; `why` tells more")
    runs = runs[whole].reset_index(drop=True)
    if not len(runs):
        raise ValueError("no whole run is meant by these words; `list` shows what there is")
    by = axes["by"] or "method.name"
    compared = Comparison(axes["x"] or _only_axis(runs, by), axes["y"] or _quality(runs), by, axes["ref"])
    frames = empty_frames()._replace(runs=runs)
    table = compared.table(frames)
    path = None if save is None else _saved(save, compared, runs)
    print_table(table)
    for written in _written(compared, frames, folders, _file_name(filters, compared)):
        say(str(written))
    if path is not None:
        say(f"{path} is yours now: `{new.next_commands('figure', path.stem)[1]}` draws it")
    return 0


def _saved(name: str, compared: Comparison, runs: pd.DataFrame) -> Path:
    """The file of a figure that compares these runs, whoever makes them."""
    axes = {"x": compared.x, "y": compared.y, "by": compared.by, "ref": compared.ref}
    given = {axis: value for axis, value in axes.items() if value is not None}
    order = [leaf for leaf in (compared.by, compared.x, "seed") if leaf in runs]
    ordered = runs.sort_values(order, kind="stable", na_position="first")
    if ordered["group"].notna().any():
        raise ValueError("of runs whose variants take turns no figure can be saved; choose ordinary runs")
    wanted = [compose.recover_run({"": each}, run_key(each)).to_words() for each in run_configs(ordered)]
    return new.write("figure", name, new.figure(name, compared.title, wanted, given))


def _quality(runs: pd.DataFrame) -> str:
    """The column that tells how good a training is."""
    has = {name: name in runs and runs[name].notna().any() for name in ("val_top1", "val_loss")}
    return "val_loss" if has["val_loss"] and not has["val_top1"] else "val_top1"


def _only_axis(runs: pd.DataFrame, by: str) -> str:
    """The one leaf that the runs differ in besides `by` and the seed; none and several are refused."""
    found = [leaf for leaf in distinguishing_leaves(run_configs(runs)) if leaf not in (by, "seed")]
    if len(found) == 1:
        return found[0]
    differing = ", ".join(found) if found else f"nothing but {by} and the seed"
    raise ValueError(f"compare over what? The runs differ in {differing}: say x=, as x=method.density")


def _written(compared: Comparison, frames: Frames, folders: ResultFolders, name: str) -> list[Path]:
    table = compared.table(frames)
    style.save_figure(compared.picture(frames), folders.figures, name)
    tables.save_tables(
        [table], folders.figures, name, captions.describe_scale(frames), captions.scale_label(frames)
    )
    page = (
        f"# {compared.title}\n\n![{name}]({name}.png)\n\n{compared.caption(frames)}\n\n{table.to_markdown()}"
    )
    write_atomic(folders.figures / f"{name}.md", page)
    return sorted(folders.figures.glob(f"{name}.*"))


def _file_name(filters: Sequence[str], compared: Comparison) -> str:
    """A name of letters, digits, - and _ alone: compare-sweep-thesis-val_top1-over-density."""
    words = ["compare", *filters, compared.y, "over", compared.x.removeprefix("method.")]
    return re.sub(r"[^\w]+", "-", "-".join(words)).strip("-")[:120]
