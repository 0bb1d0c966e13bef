from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from msgspec import structs

from analysis.records import parquet, phases
from analysis.records.configs import flatten, label_configs
from analysis.records.files import DamagedFileError
from analysis.records.frames import Frames, select_runs, to_dicts
from analysis.records.loading import OWN
from analysis.records.log import read_json_lines_as
from analysis.records.schema import EpochLine, LogLine, StepLine, fields_by_name
from analysis.records.store import Attempt
from experiments.commands._arguments import Filters
from experiments.commands._messages import iterate_with_progress, repeat_until_interrupted, say
from experiments.commands._run_table import KEY_DIGITS, filter_runs, load_runs, run_configs
from experiments.config.folders import ResultFolders
from experiments.worker.errors import explain_import_error

GROUP = "results"
KINDS: dict[str, type[StepLine | EpochLine]] = {
    "step": StepLine,
    "epoch": EpochLine,
}  # of lines: the first word of a curve's name


def export(words: Filters, *, out: str | None = None, follow: bool = False) -> int:
    """Curves of runs for TensorBoard, many at a time, with the settings of each: export sweep=thesis --follow

    Args:
        words: which runs, as for `list`.
        out: the folder of its event files; results/tensorboard by default.
        follow: go on until Ctrl-C, and add what runs that are under way measure meanwhile.
    """
    folders = ResultFolders()
    folder = Path(out) if out else folders.results / "tensorboard"
    board = Board(folder, folders)
    shown = board.show(words)
    if not shown:
        raise ValueError("no run is meant by these words; `list` shows what there is")
    say(f"`tensorboard --logdir {folder}` shows {shown} runs")
    if follow:
        repeat_until_interrupted(lambda: board.show(words))
    board.close()
    return 0


class CurvePoint(NamedTuple):
    """Numbers of one step, by the names of their curves."""

    step: int
    at_s: float  # since the run began
    curves: dict[str, float]


class Board:
    """A folder of event files, one run or variant each."""

    def __init__(self, folder: Path, folders: ResultFolders) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ValueError((explain_import_error(error) or ("", str(error)))[1]) from error
        self.folder, self.folders = folder, folders
        self.open, self.event, self.summary = EventFileWriter, event_pb2.Event, summary_pb2.Summary
        self.settings = hparams_pb
        self.writers = dict[str, Any]()  # by key
        self.read = dict[str, int]()  # lines of an attempt's log, by its name
        self.first_s = dict[str, float]()  # by the clock of its worker

    def show(self, words: Sequence[str]) -> int:
        """Add what is new of the runs that these words mean; returns how many there are by now."""
        runs = filter_runs(load_runs(self.folders), words)
        known = runs[runs["config_json"].notna()]
        names = dict(zip(known["key"], label_configs(run_configs(known)), strict=True))
        own, shipped = (known[known["source"].eq(OWN) == is_own] for is_own in (True, False))
        for name in iterate_with_progress([*dict.fromkeys(own["run_id"])], "runs"):
            of_run = {row["key"].partition("/")[2]: row for row in to_dicts(own[own["run_id"] == name])}
            attempts = self.folders.store.attempts(name)
            if not attempts:  # they were removed meanwhile
                continue
            attempt = attempts[-1]
            found, lines = self._new(attempt)
            if found.keys() <= of_run.keys():  # variants that take turns have rows once they have ended
                self.read[attempt.name] = lines
                for variant, points in found.items():
                    self._add(of_run[variant], names[of_run[variant]["key"]], points)
        new = [row for row in to_dicts(shipped) if row["key"] not in self.writers]
        if new:
            frames = select_runs(parquet.read_parquet(self.folders.shipped), [row["key"] for row in new])
            for row in iterate_with_progress(new, "shipped runs"):
                self._add(row, names[row["key"]], [*_of_frames(frames, row["key"])])
        return len(self.writers)

    def close(self) -> None:
        """Leave all files whole."""
        for writer in self.writers.values():
            writer.close()

    def _new(self, attempt: Attempt) -> tuple[dict[str, list[CurvePoint]], int]:
        """What rank 0 of an attempt has logged since the last look, by variant; and its lines by now."""
        try:
            lines, _ = read_json_lines_as(attempt.rank_path(0), LogLine)
        except (FileNotFoundError, DamagedFileError):
            return {}, 0
        found: dict[str, list[CurvePoint]] = {}
        for line in lines[self.read.get(attempt.name, 0) :]:
            if isinstance(line, StepLine):
                at_s = line.start_s - self.first_s.setdefault(attempt.name, line.start_s)
                row = structs.asdict(line) | {f"{phase}_s": each for phase, each in line.phases.items()}
                found.setdefault(line.variant or "", []).append(
                    CurvePoint(line.step, at_s, _values("step", row))
                )
            elif isinstance(line, EpochLine):
                values = _values("epoch", structs.asdict(line))
                found.setdefault(line.variant or "", []).append(
                    CurvePoint(line.step, line.wall_s or 0.0, values)
                )
        return found, len(lines)

    def _add(self, row: Mapping[str, Any], label: str, points: Sequence[CurvePoint]) -> None:
        key = row["key"]
        began = pd.Timestamp(row["started"]).timestamp() if isinstance(row.get("started"), str) else 0.0
        if key not in self.writers:
            name = re.sub(r"[^\w.=,+-]+", " ", f"{label} {key[:KEY_DIGITS]}")
            for earlier in (self.folder / name).glob("events.out.tfevents.*"):  # of an export before
                earlier.unlink()
            self.writers[key] = self.open(str(self.folder / name))
            own = flatten(json.loads(row["config_json"]))
            settings = {leaf: each for leaf, each in own.items() if isinstance(each, str | int | float)}
            self._event(key, 0, began, self.settings(settings, trial_id=key, start_time_secs=began))
        for point in points:
            value = [self.summary.Value(tag=tag, simple_value=each) for tag, each in point.curves.items()]
            self._event(key, point.step, began + point.at_s, self.summary(value=value))
        self.writers[key].flush()

    def _event(self, key: str, step: int, at_s: float, summary: Any) -> None:
        self.writers[key].add_event(self.event(wall_time=at_s, step=step, summary=summary))


def _of_frames(frames: Frames, key: str) -> Iterator[CurvePoint]:
    for kind, frame in (("step", frames.steps), ("epoch", frames.epochs)):
        own = frame[frame["key"] == key]
        own = own[own["rank"] == 0] if kind == "step" else own
        for row in to_dicts(own):
            yield CurvePoint(row["step"], row.get("wall_s") or row.get("start_s") or 0.0, _values(kind, row))


def _values(kind: str, row: Mapping[str, Any]) -> dict[str, float]:
    names = {name: f"{kind}/{name}" for name in fields_by_name(KINDS[kind])}
    names |= {f"{phase}_s": f"phase/{phase}" for phase in phases.NAMES} if kind == "step" else {}
    numbers = ((shown, row.get(name)) for name, shown in names.items())
    return {
        shown: float(each) for shown, each in numbers if isinstance(each, int | float) and math.isfinite(each)
    }
