from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from msgspec import structs

from analysis.records import parquet, phases
from analysis.records.configs import flatten, label_configs
from analysis.records.files import DamagedFileError
from analysis.records.frames import Frames, rows_as_dicts, select_runs
from analysis.records.loading import OWN
from analysis.records.log import read_json_lines
from analysis.records.schema import EpochLine, LogLine, StepLine, field_descriptions_by_name
from analysis.records.store import Attempt
from experiments.commands._arguments import Filters
from experiments.commands._messages import iterate_with_progress, repeat_until_interrupted, say
from experiments.commands._run_table import KEY_DIGITS, filter_runs, load_all_runs, parse_run_configs
from experiments.config.folders import ResultFolders
from experiments.worker.errors import explain_import_error

GROUP = "results"
LINE_TYPES: dict[str, type[StepLine | EpochLine]] = {  # by the first word of a curve's name
    "step": StepLine,
    "epoch": EpochLine,
}


def export(words: Filters, *, out: str | None = None, follow: bool = False) -> int:
    """Write curves and settings of runs for TensorBoard: `export sweep=thesis --follow`.

    Args:
        words: filters of the runs, as for `list`.
        out: the folder of the event files; results/tensorboard by default.
        follow: go on until Ctrl-C, and add what runs that are under way measure meanwhile.
    """
    folders = ResultFolders()
    folder = Path(out) if out else folders.results / "tensorboard"
    exporter = TensorBoardExporter(folder, folders)
    num_runs = exporter.export_new_points_and_count_runs(words)
    if not num_runs:
        raise ValueError("no run is meant by these words; `list` shows what there is")
    say(f"`tensorboard --logdir {folder}` shows {num_runs} runs")
    if follow:
        repeat_until_interrupted(lambda: exporter.export_new_points_and_count_runs(words))
    exporter.close()
    return 0


class CurvePoint(NamedTuple):
    """Numbers of one step, by the names of their curves."""

    step: int
    since_start_s: float
    value_by_curve: dict[str, float]


class TensorBoardExporter:
    """A folder of event files for TensorBoard, one for each run or variant."""

    def __init__(self, folder: Path, folders: ResultFolders) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ValueError((explain_import_error(error) or ("", str(error)))[1]) from error
        self.folder = folder
        self.folders = folders
        self.writer_type = EventFileWriter
        self.event_type = event_pb2.Event
        self.summary_type = summary_pb2.Summary
        self.make_hparams = hparams_pb
        self.writer_by_key = dict[str, Any]()
        self.num_read_lines = dict[str, int]()  # of the log of each attempt, by its name
        self.first_start_s = dict[str, float]()  # of each attempt, by the clock of its worker

    def export_new_points_and_count_runs(self, filters: Sequence[str]) -> int:
        """Add new points of runs that fit these filters; return the number of all runs exported so far."""
        runs = filter_runs(load_all_runs(self.folders), filters)
        runs = runs[runs["config_json"].notna()]
        label_by_key = dict(zip(runs["key"], label_configs(parse_run_configs(runs)), strict=True))
        is_own = runs["source"].eq(OWN)
        own_runs = runs[is_own]
        for name in iterate_with_progress([*dict.fromkeys(own_runs["run_id"])], "runs"):
            rows = rows_as_dicts(own_runs[own_runs["run_id"] == name])
            row_by_variant = {row["key"].partition("/")[2]: row for row in rows}
            attempts = self.folders.store.list_attempts(name)
            if not attempts:  # they were removed meanwhile
                continue
            points_by_variant, num_lines = self._read_new_points(attempts[-1])
            if points_by_variant.keys() <= row_by_variant.keys():  # variants have rows once they have ended
                self.num_read_lines[attempts[-1].name] = num_lines
                for variant, points in points_by_variant.items():
                    row = row_by_variant[variant]
                    self._add_points(row, label_by_key[row["key"]], points)
        new_rows = [row for row in rows_as_dicts(runs[~is_own]) if row["key"] not in self.writer_by_key]
        if new_rows:
            shipped = parquet.read_parquet(self.folders.shipped)
            frames = select_runs(shipped, [row["key"] for row in new_rows])
            for row in iterate_with_progress(new_rows, "shipped runs"):
                self._add_points(row, label_by_key[row["key"]], [*_recorded_points(frames, row["key"])])
        return len(self.writer_by_key)

    def close(self) -> None:
        """Write the ends of all files."""
        for writer in self.writer_by_key.values():
            writer.close()

    def _read_new_points(self, attempt: Attempt) -> tuple[dict[str, list[CurvePoint]], int]:
        """Return what rank 0 has logged since the last call, by variant, and the number of its lines."""
        try:
            lines, _ = read_json_lines(attempt.rank_log_path(0), LogLine)
        except (FileNotFoundError, DamagedFileError):
            return {}, 0
        points_by_variant = defaultdict[str, list[CurvePoint]](list)
        for line in lines[self.num_read_lines.get(attempt.name, 0) :]:
            if isinstance(line, StepLine):
                at_s = line.start_s - self.first_start_s.setdefault(attempt.name, line.start_s)
                phases_s = {f"{phase}_s": seconds for phase, seconds in line.phases.items()}
                values = _curve_values("step", structs.asdict(line) | phases_s)
            elif isinstance(line, EpochLine):
                at_s = line.wall_s or 0.0
                values = _curve_values("epoch", structs.asdict(line))
            else:
                continue
            points_by_variant[line.variant or ""].append(CurvePoint(line.step, at_s, values))
        return points_by_variant, len(lines)

    def _add_points(self, row: Mapping[str, Any], label: str, points: Sequence[CurvePoint]) -> None:
        key = row["key"]
        started_s = pd.Timestamp(row["started"]).timestamp() if isinstance(row.get("started"), str) else 0.0
        if key not in self.writer_by_key:
            name = re.sub(r"[^\w.=,+-]+", " ", f"{label} {key[:KEY_DIGITS]}")
            for earlier in (self.folder / name).glob("events.out.tfevents.*"):  # of an export before
                earlier.unlink()
            self.writer_by_key[key] = self.writer_type(str(self.folder / name))
            config = flatten(json.loads(row["config_json"]))
            settings = {leaf: value for leaf, value in config.items() if isinstance(value, str | int | float)}
            hparams = self.make_hparams(settings, trial_id=key, start_time_secs=started_s)
            self._add_event(key, 0, started_s, hparams)
        for point in points:
            values = [
                self.summary_type.Value(tag=curve, simple_value=value)
                for curve, value in point.value_by_curve.items()
            ]
            self._add_event(key, point.step, started_s + point.since_start_s, self.summary_type(value=values))
        self.writer_by_key[key].flush()

    def _add_event(self, key: str, step: int, at_s: float, summary: Any) -> None:
        event = self.event_type(wall_time=at_s, step=step, summary=summary)
        self.writer_by_key[key].add_event(event)


def _recorded_points(frames: Frames, key: str) -> Iterator[CurvePoint]:
    """Yield the points of a recorded run, its steps on rank 0 and its epochs."""
    steps = frames.steps[(frames.steps["key"] == key) & (frames.steps["rank"] == 0)]
    epochs = frames.epochs[frames.epochs["key"] == key]
    for line_type, rows in (("step", steps), ("epoch", epochs)):
        for row in rows_as_dicts(rows):
            at_s = row.get("wall_s") or row.get("start_s") or 0.0
            yield CurvePoint(row["step"], at_s, _curve_values(line_type, row))


def _curve_values(line_type: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line or a row by the names of their curves."""
    curve_by_column = {
        name: f"{line_type}/{name}" for name in field_descriptions_by_name(LINE_TYPES[line_type])
    }
    if line_type == "step":
        curve_by_column |= {f"{phase}_s": f"phase/{phase}" for phase in phases.NAMES}
    return {
        curve: float(row[name])
        for name, curve in curve_by_column.items()
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    }
