from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import tables
from analysis.comparison import Comparison
from analysis.pictures import captions, style
from analysis.records.configs import run_key, select_distinguishing_leaves
from analysis.records.files import write_atomic
from analysis.records.frames import Frames, empty_frames
from analysis.records.schema import DIVERGED, DONE
from experiments.commands import new
from experiments.commands._arguments import Filters, parse_own_words
from experiments.commands._messages import say
from experiments.commands._run_table import filter_runs, load_all_runs, parse_run_configs
from experiments.commands._terminal import print_table
from experiments.config import compose
from experiments.config.folders import ResultFolders
from sparsify.ranges import quote

GROUP = "results"
AXES = ("x", "y", "by", "ref")


def compare(words: Filters, *, save: str | None = None) -> int:
    """Draw a quantity over a setting, with intervals: `compare sweep=thesis x=method.density y=val_top1`.

    Args:
        words: filters of the runs, as for `list`; x=, the setting along the axis; y=, a column of
            docs/records.md (val_top1, test_top1, val_loss, step_s, samples_per_s, wire_bytes, ...; by default
            val_top1, or val_loss where nothing is classified); by=, the setting that has a line for each of
            its values (method.name by default); ref=, a value of by= with which the others are compared, seed
            by seed.
        save: write a figure's file of this name, such as thesis_density, which is yours to change and which
            `reproduce` makes.
    """
    axes, filters = parse_own_words(words, dict.fromkeys(AXES, str))
    folders = ResultFolders()
    runs = filter_runs(load_all_runs(folders), filters)
    is_whole = runs["state"].isin((DONE, DIVERGED))
    for run, state in runs.loc[~is_whole, ["run_id", "state"]].itertuples(index=False):
        say(f"left out {run}: it is {state}; `why` tells more")
    runs = runs[is_whole].reset_index(drop=True)
    if not len(runs):
        names = [word for word in filters if "=" not in word]
        hint = (
            f"to compare two runs: `why {' --against '.join(map(quote, names))}`" if len(names) == 2 else ""
        )
        raise ValueError(f"no whole run is meant by all these words; {hint or '`list` shows what there is'}")
    by = axes.get("by") or "method.name"
    x_setting = axes.get("x") or _find_only_axis(runs, by)
    comparison = Comparison(x_setting, axes.get("y") or _quality_column(runs), by, axes.get("ref"))
    frames = empty_frames()._replace(runs=runs)
    table = comparison.table(frames)
    figure_file = None if save is None else _save_figure_file(save, comparison, runs)
    print_table(table)
    for path in _write_files(comparison, frames, folders, _file_stem(filters, comparison)):
        say(str(path))
    if figure_file is not None:
        say(f"{figure_file} is yours now: `{new.next_commands('figure', figure_file.stem)[1]}` draws it")
    return 0


def _save_figure_file(name: str, comparison: Comparison, runs: pd.DataFrame) -> Path:
    """Write the file of a figure that compares these runs, whoever makes them; return its path."""
    axes = {axis: getattr(comparison, axis) for axis in AXES if getattr(comparison, axis) is not None}
    order = [leaf for leaf in (comparison.by, comparison.x, "seed") if leaf in runs]
    ordered = runs.sort_values(order, kind="stable", na_position="first")
    if ordered["group"].notna().any():
        raise ValueError("of runs whose variants take turns no figure can be saved; choose ordinary runs")
    words = [
        compose.rebuild_recorded_run({"": config}, run_key(config)).to_words()
        for config in parse_run_configs(ordered)
    ]
    return new.write_new_file(
        "figure", name, new.render_comparison_figure(name, comparison.title, words, axes)
    )


def _quality_column(runs: pd.DataFrame) -> str:
    """Return the column that tells how good a training is: the loss only where no accuracy is recorded."""
    has_top1, has_loss = (name in runs and runs[name].notna().any() for name in ("val_top1", "val_loss"))
    return "val_loss" if has_loss and not has_top1 else "val_top1"


def _find_only_axis(runs: pd.DataFrame, by: str) -> str:
    """Return the one leaf in which the runs differ besides `by` and the seed; refuse none and several."""
    leaves = [
        leaf for leaf in select_distinguishing_leaves(parse_run_configs(runs)) if leaf not in (by, "seed")
    ]
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        hint = f"The runs differ in {', '.join(leaves)}: say x=, as x={leaves[0]}"
    else:
        hint = f"The runs differ in nothing but {by} and the seed: x={by} has a place for each of its values"
    raise ValueError(f"compare over what? {hint}; `why RUN --against RUN` compares two runs")


def _write_files(comparison: Comparison, frames: Frames, folders: ResultFolders, name: str) -> list[Path]:
    """Write picture, table and page of a comparison, and return their paths."""
    table = comparison.table(frames)
    style.save_png_pdf_svg(comparison.picture(frames), folders.figures, name)
    tables.write_table_files(
        [table], folders.figures, name, captions.describe_scale(frames), captions.scale_label(frames)
    )
    parts = (
        f"# {comparison.title}",
        f"![{name}]({name}.png)",
        comparison.caption(frames),
        table.to_markdown(),
    )
    write_atomic(folders.figures / f"{name}.md", "\n\n".join(parts))
    return sorted(folders.figures.glob(f"{name}.*"))


def _file_stem(filters: Sequence[str], comparison: Comparison) -> str:
    """Return a name of letters, digits, - and _ alone: compare-sweep-thesis-val_top1-over-density."""
    words = ["compare", *filters, comparison.y, "over", comparison.x.removeprefix("method.")]
    return re.sub(r"[^\w]+", "-", "-".join(words)).strip("-")[:120]
