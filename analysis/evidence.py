"""The evidence of a claim: the runs that it read, their scale, launches, occasions and link.

Each run registers the rules of claims when it begins.
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
from analysis.pictures.numbers import CHOSEN_DIGITS, format_number, format_with_unit
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


class ClaimEvidence(NamedTuple):
    """The runs that a claim read, and no others."""

    frames: Frames  # with their runs only; the other tables are whole

    @classmethod
    def from_read_keys(cls, frames: Frames, keys: Collection[str]) -> ClaimEvidence:
        """Return the evidence of these runs, or of all where a claim did not say which it reads."""
        runs = frames.runs[frames.runs["key"].isin(keys)] if keys else frames.runs
        return cls(frames._replace(runs=runs))

    def prefer_process_runs(self) -> ClaimEvidence:
        """Return the evidence of processes alone, where there are any: these alone gave times."""
        runs = self.frames.runs
        process_runs = runs[~runs["simulated"].fillna(False).astype(bool)] if "simulated" in runs else runs
        return ClaimEvidence(self.frames._replace(runs=process_runs)) if len(process_runs) else self

    @property
    def launches(self) -> pd.DataFrame:
        """A row for each group of processes that was started: when it was."""
        runs = self.frames.runs
        group = runs["group"].fillna(runs["key"]) if "group" in runs else runs["key"]
        started = runs.get("started", pd.Series(None, runs.index, dtype=object))
        starts = pd.to_datetime(started, utc=True, format="ISO8601", errors="coerce")
        table: pd.DataFrame = pd.DataFrame({"launch": group, "began": starts}).groupby("launch").min()
        return table

    @property
    def num_occasions(self) -> int:
        """Number of times at which launches were begun: one lasts half an hour."""
        return len(occasion_starts(self.launches["began"].dropna()))

    @property
    def link_asked_gbit_s(self) -> float | None:
        """Gbit/s of the emulated link between two nodes that was asked for; None of several."""
        asked_s_per_byte = captions.distinct_values(self.frames, "cluster.link.beta_s_per_byte")
        return (
            8e-9 / float(asked_s_per_byte[0])
            if self.has_emulated_links and len(asked_s_per_byte) == 1
            else None
        )

    @property
    def links_found_gbit_s(self) -> list[float]:
        """Gbit/s that a node found while all were sending, of each run; none where several were asked for."""
        if self.link_asked_gbit_s is None:
            return []
        column = "provenance.machine.link.together_gbit_s"
        return sorted(map(float, pd.to_numeric(self._column(column)).dropna()))

    @property
    def link_farthest_gbit_s(self) -> float | None:
        """Gbit/s that was found of the link that is farthest from what was asked for."""
        asked_gbit_s = self.link_asked_gbit_s or math.nan
        return max(self.links_found_gbit_s, key=lambda gbit_s: abs(gbit_s / asked_gbit_s - 1), default=None)

    @property
    def has_emulated_links(self) -> bool:
        """True if nodes of one machine were joined by token buckets."""
        return bool(self._column("cluster.where").eq(EMULATED).any())

    @property
    def is_link_off_target(self) -> bool:
        """True if a link was found that can't be called by what was asked for."""
        asked_gbit_s, found_gbit_s = self.link_asked_gbit_s, self.link_farthest_gbit_s
        return (
            asked_gbit_s is not None
            and found_gbit_s is not None
            and abs(found_gbit_s / asked_gbit_s - 1) > LINK_TOLERANCE
        )

    def link_text(self) -> str:
        """Return the link by what was found: '1 Gbit/s', '0.9 Gbit/s (asked: 1)', '2 to 3 Gbit/s (asked: 9)'.

        A link with a length has that, too: '0.1 Gbit/s and 50 ms one way'.
        """
        asked_gbit_s, found_gbit_s = self.link_asked_gbit_s, self.links_found_gbit_s
        if asked_gbit_s is None or not found_gbit_s:
            return f"{format_number(asked_gbit_s)} Gbit/s (asked)" if asked_gbit_s else "emulated links"
        if not self.is_link_off_target:
            return f"{format_number(asked_gbit_s)} Gbit/s{self._length_text()}"
        ends = dict.fromkeys((format_number(found_gbit_s[0], 2), format_number(found_gbit_s[-1], 2)))
        return f"{' to '.join(ends)} Gbit/s (asked: {format_number(asked_gbit_s)}){self._length_text()}"

    def _length_text(self) -> str:
        runs, column = self.frames.runs, "cluster.link.alpha_s"
        if column not in runs:
            return ""
        delays_s = pd.to_numeric(runs.loc[runs["cluster.where"] == EMULATED, column]).unique()
        if len(delays_s) != 1 or delays_s[0] < LONG_DELAY_S:
            return ""
        return f" and {format_number(1e3 * delays_s[0])} ms one way"

    def has_rule_registered(self, claim_id: str, digest: str) -> bool:
        """Return True where every run was begun when the claim had this very rule."""
        texts = self._column(RULES_COLUMN)
        return bool(texts.notna().all()) and all(
            json.loads(t).get(claim_id) == digest for t in texts.unique()
        )

    def training_at_chance_text(self, chance_of_task: ChanceLookup) -> str:
        """Return where the first training ended that ended at chance; empty where none did."""
        runs = self.frames.runs
        columns = [name for name in TOP1_COLUMNS if name in runs]
        if not columns or "task.name" not in runs:
            return ""
        final_top1 = runs[columns].bfill(axis="columns").iloc[:, 0]
        for task, top1 in zip(runs["task.name"], final_top1, strict=True):
            level = chance_of_task(str(task))
            if (
                level is not None and pd.notna(top1) and top1 <= CHANCE_MARGIN * level
            ):  # some validate nothing
                return (
                    f"a training ends at {format_with_unit(top1, '%')}; "
                    f"guessing gives {format_with_unit(level, '%')}"
                )
        return ""

    def common_chance_percent(self, chance_of_task: ChanceLookup) -> float | None:
        """Return the percent of top-1 that guessing gives in these trainings; None of several levels."""
        levels = {chance_of_task(str(task)) for task in self.frames.runs.get("task.name", ())}
        return levels.pop() if len(levels) == 1 else None

    @property
    def has_simulated_times(self) -> bool:
        """Return True where virtual ranks made some of their times."""
        return captions.has_simulated_times(self.frames)

    def _column(self, name: str) -> pd.Series[Any]:
        """Return a column of the runs, without values where it was not recorded."""
        runs = self.frames.runs
        column: pd.Series[Any] = runs.get(name, pd.Series(None, runs.index, dtype=object))
        return column


def deviating_links_text(frames: Frames) -> str:
    """Return emulated links that were not as asked for: '2.7 Gbit/s (asked: 10)'; empty where all were."""
    column = "cluster.link.beta_s_per_byte"
    if column not in frames.runs:
        return ""
    links = [ClaimEvidence(frames._replace(runs=runs)) for _, runs in frames.runs.groupby(column, sort=False)]
    texts = [link.link_text() for link in links if link.is_link_off_target]
    return captions.join_with_and(dict.fromkeys(texts)) if texts else ""


def digest_rule(rule: Mapping[str, Any]) -> str:
    """Return ten digits of a hash of a rule, whose values are JSON's."""
    return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:10]


def describe_scale_differences(frames: Frames, declared_scale: Mapping[str, Any]) -> str:
    """Return the differences of the runs from what the paper ran, in words; empty where there are none.

    Args:
        frames: of an item's runs.
        declared_scale: the paper's values by column of `frames.runs`, from the item's SCALE; where the value
            depends on the device or the task, a mapping from either to value. A run without a field
            (dense has no density) does not differ in it, nor one of a task that a mapping leaves out.
    """
    runs = frames.runs
    if not len(runs):
        return ""
    factors = ["steps_total", "workers", "task.batch_size"]
    if {*factors} <= {*runs}:
        examples = runs[factors].astype(float).prod(axis="columns", skipna=False)
        runs = runs.assign(**{EXAMPLES_COLUMN: examples})
    texts = (_describe_difference(runs, column, paper) for column, paper in declared_scale.items())
    differences = ", ".join(filter(None, texts))
    return f"{REDUCED}: {differences}" if differences else ""


def _describe_difference(runs: pd.DataFrame, column: str, paper: Any) -> str:
    """Return 'batch 16 instead of 128'; empty where no run differs."""
    if column not in runs:
        return ""
    value_pairs = set()
    table = runs.reindex(columns=["device", "task.name", column])
    for device, task, value in table.itertuples(index=False, name=None):
        paper_value = paper.get(device, paper.get(task, value)) if isinstance(paper, Mapping) else paper
        is_missing = value is None or (isinstance(value, float) and math.isnan(value))
        if not is_missing and value != paper_value:
            value_pairs.add((value, paper_value))
    # Numbers by their size, then words: the order of the records says nothing.
    ordered = sorted(value_pairs, key=lambda pair: (isinstance(pair[0], str), pair[0]))
    texts = [f"{_value_text(value)} instead of {_value_text(paper_value)}" for value, paper_value in ordered]
    return f"{SCALE_NAMES[column]} {captions.join_with_and(dict.fromkeys(texts))}" if texts else ""


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return format_number(value, CHOSEN_DIGITS)
    return "none" if value == "[]" else value
