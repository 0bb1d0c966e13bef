"""What a claim rests on: the runs that it read, their scale, launches, occasions and link, and the rule that
they were begun under.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pandas as pd

from analysis.occasions import occasion_starts
from analysis.pictures import captions
from analysis.pictures.numbers import format_brief, format_number, format_with_unit
from analysis.records.frames import Frames

LINK_TOLERANCE = 0.1  # share by which a link may be off what was asked for, and still be called by that
CHANCE_MARGIN = 1.2  # a training ends at chance up to this multiple of what guessing gives
EMULATED = "netns"  # the kind of cluster whose links are token buckets on one machine
LONG_DELAY_S = 1e-3  # of a way: from there on it matters
RULES_COLUMN = "rules_json"  # the column of the rules that were registered when a run began
TOP1_COLUMNS = ("test_top1", "val_top1")
ChanceLookup = Callable[[str], float | None]  # of a task's name: percent of top-1 that guessing gives
REDUCED = "reduced scale"
EXAMPLES_COLUMN = "examples"  # no column: of all workers in all steps
# What the scale of a run is, as columns of `frames.runs`, and how each is called.
SCALE_NAMES = {
    "task.name": "task", "task.batch_size": "batch", "workers": "workers", "steps_total": "steps",
    EXAMPLES_COLUMN: "examples seen", "train.epochs": "epochs", "method.density": "density",
    "method.density_warmup": "density warm-up", "method.feedback": "feedback", "task.momentum": "momentum",
    "task.lr": "learning rate", "task.lr_milestones": "decays at epochs", "task.smoothing": "label smoothing",
    "task.weight_decay": "weight decay", "precision": "precision",
}  # fmt: skip


class Evidence(NamedTuple):
    """The runs that a claim read, and no others."""

    frames: Frames  # with their runs only; the other tables are whole

    @classmethod
    def of(cls, frames: Frames, keys: Collection[str]) -> Evidence:
        """These runs; where a claim did not say which it reads, all."""
        runs = frames.runs[frames.runs["key"].isin(keys)] if keys else frames.runs
        return cls(frames._replace(runs=runs))

    def of_times(self) -> Evidence:
        """The same without virtual ranks where processes are there as well: of what is put together from both
        these alone gave times.
        """
        runs = self.frames.runs
        measured = runs[~runs["simulated"].fillna(False).astype(bool)] if "simulated" in runs else runs
        return Evidence(self.frames._replace(runs=measured)) if len(measured) else self

    @property
    def launches(self) -> pd.DataFrame:
        """A row for each group of processes that was started: when it was."""
        runs = self.frames.runs
        group = runs["group"].fillna(runs["key"]) if "group" in runs else runs["key"]
        started = runs.get("started", pd.Series(None, runs.index, dtype=object))
        began = pd.to_datetime(started, utc=True, format="ISO8601", errors="coerce")
        table = pd.DataFrame({"launch": group, "began": began})
        found: pd.DataFrame = table.groupby("launch").min()
        return found

    @property
    def occasions(self) -> int:
        """Number of times at which launches were begun: one lasts half an hour."""
        return len(occasion_starts(self.launches["began"].dropna()))

    @property
    def link_asked(self) -> float | None:
        """Gbit/s of the emulated link between two nodes that was asked for; None of several."""
        asked = captions.distinct_values(self.frames, "cluster.link.beta_s_per_byte")
        return 8e-9 / float(asked[0]) if self.is_emulated and len(asked) == 1 else None

    @property
    def links_found(self) -> list[float]:
        """Gbit/s that a node found while all were sending, of each run; none where several were asked for."""
        runs = self.frames.runs
        found = pd.to_numeric(runs.get("provenance.machine.link.together_gbit_s", pd.Series(dtype=float)))
        return sorted(map(float, found.dropna())) if self.link_asked is not None else []

    @property
    def link_found(self) -> float | None:
        """Of these the one that is farthest from what was asked for."""
        asked = self.link_asked or math.nan
        return max(self.links_found, key=lambda found: abs(found / asked - 1), default=None)

    @property
    def is_emulated(self) -> bool:
        """Tell whether nodes of one machine were joined by token buckets."""
        return bool(self.frames.runs.get("cluster.where", pd.Series(dtype=object)).eq(EMULATED).any())

    @property
    def is_off(self) -> bool:
        """Tell whether a link was found that can't be called by what was asked for."""
        asked, found = self.link_asked, self.link_found
        return asked is not None and found is not None and abs(found / asked - 1) > LINK_TOLERANCE

    def link(self) -> str:
        """The link by what was found: '1 Gbit/s', '0.86 Gbit/s (asked: 1)', '2 to 3 Gbit/s (asked: 10)';
        where it has a length, with that: '0.1 Gbit/s and 50 ms one way'.
        """
        asked, found = self.link_asked, self.link_found
        if asked is None or found is None:
            return f"{format_number(asked)} Gbit/s (asked)" if asked else "emulated links"
        if not self.is_off:
            return f"{format_number(asked)} Gbit/s{self._length()}"
        ends = dict.fromkeys(format_brief(each, 2) for each in (self.links_found[0], self.links_found[-1]))
        return f"{' to '.join(ends)} Gbit/s (asked: {format_number(asked)}){self._length()}"

    def _length(self) -> str:
        """Of a link with one length, that matters."""
        runs, column = self.frames.runs, "cluster.link.alpha_s"
        if column not in runs:
            return ""
        ways = pd.to_numeric(runs.loc[runs["cluster.where"] == EMULATED, column]).unique()
        return (
            f" and {format_number(1e3 * ways[0])} ms one way"
            if len(ways) == 1 and ways[0] >= LONG_DELAY_S
            else ""
        )

    def registered(self, claim: str, digest: str) -> bool:
        """Tell whether every run was begun when the claim had this very rule."""
        texts = self.frames.runs.get(RULES_COLUMN, pd.Series([None] * len(self.frames.runs), dtype=object))
        return bool(texts.notna().all()) and all(json.loads(t).get(claim) == digest for t in texts.unique())

    def at_chance(self, chance: ChanceLookup) -> str:
        """The first task of which a training ended at chance, and where; empty where none did."""
        runs = self.frames.runs
        columns = [name for name in TOP1_COLUMNS if name in runs]
        if not columns or "task.name" not in runs:
            return ""
        ends = runs[columns].bfill(axis="columns").iloc[:, 0]
        for task, end in zip(runs["task.name"], ends, strict=True):
            level = chance(str(task))
            if level is not None and pd.notna(end) and end <= CHANCE_MARGIN * level:  # some validate nothing
                return (
                    f"a training ends at {format_with_unit(end, '%')}; guessing gives "
                    f"{format_with_unit(level, '%')}"
                )
        return ""

    def chance(self, chance: ChanceLookup) -> float | None:
        """Percent of top-1 that guessing gives in these trainings; None where they have several levels."""
        levels = {chance(str(task)) for task in self.frames.runs.get("task.name", ())}
        return levels.pop() if len(levels) == 1 else None

    def is_simulated(self) -> bool:
        """Tell whether virtual ranks made some of their times."""
        return captions.is_simulated(self.frames)


def deviating_links_text(frames: Frames) -> str:
    """The emulated links that were not as asked for: '2.7 Gbit/s (asked: 10)'; empty where all were."""
    column = "cluster.link.beta_s_per_byte"
    if column not in frames.runs:
        return ""
    told = [
        evidence.link()
        for _, runs in frames.runs.groupby(column, sort=False)
        if (evidence := Evidence(frames._replace(runs=runs))).is_off
    ]
    return captions.join_words(dict.fromkeys(told)) if told else ""


def digest_rule(rule: Mapping[str, Any]) -> str:
    """Ten digits of a hash of a rule, whose values are JSON's."""
    return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:10]


def describe_scale_differences(frames: Frames, declared: Mapping[str, Any]) -> str:
    """Differences of the runs from what the paper ran, in words; empty where there are none.

    Args:
        declared: the paper's values by column of `frames.runs`, as the item states them in SCALE; where the
            value depends on the device or the task, a mapping from either to value. A run without a field
            (dense has no density) does not differ in it, nor one of a task that a mapping leaves out.
    """
    if not len(frames.runs):
        return ""
    factors = ("steps_total", "workers", "task.batch_size")
    if {*factors} <= {*frames.runs}:
        seen = frames.runs[[*factors]].astype(float).prod(axis="columns", skipna=False)
        frames = frames._replace(runs=frames.runs.assign(**{EXAMPLES_COLUMN: seen}))
    found = (_describe_difference(frames, column, paper) for column, paper in declared.items())
    differences = ", ".join(filter(None, found))
    return f"{REDUCED}: {differences}" if differences else ""


def _describe_difference(frames: Frames, column: str, paper: Any) -> str:
    """'batch 16 instead of 128'; empty where no run differs."""
    runs = frames.runs
    if column not in runs:
        return ""
    found = set()
    none = [None] * len(runs)
    for device, task, value in zip(
        runs.get("device", none), runs.get("task.name", none), runs[column], strict=True
    ):
        expected = paper.get(device, paper.get(task, value)) if isinstance(paper, Mapping) else paper
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if not missing and value != expected:
            found.add((value, expected))
    # Numbers by their size, then words: the order of the records says nothing.
    ordered = sorted(found, key=lambda pair: (isinstance(pair[0], str), pair[0]))
    told = [f"{_value_text(value)} instead of {_value_text(expected)}" for value, expected in ordered]
    return f"{SCALE_NAMES[column]} {captions.join_words(dict.fromkeys(told))}" if told else ""


def _value_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else format_number(value)
    return "none" if value == "[]" else value
