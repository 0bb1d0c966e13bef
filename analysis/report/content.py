"""Contents of the report's pages of figures, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from analysis import verdicts
from analysis.claims import VERDICT_WORDS, Verdict, VerdictWord
from analysis.pictures import captions
from analysis.pictures.numbers import format_count
from analysis.records.frames import Frames

# A word's sign and its tone, for readers who do not see colours and for those who do.
GOOD, MIDDLING, BAD, PLAIN = ("✓", "good"), ("◐", "middling"), ("✗", "bad"), ("·", "plain")
MARK_BY_WORD: dict[VerdictWord, tuple[str, str]] = {
    "reproduced": GOOD, "same direction": GOOD, "holds": GOOD, "re-derived": GOOD, "recomputed": GOOD,
    "partly": MIDDLING, "indicated": ("○", "middling"), "inconclusive": ("?", "middling"),
    "post hoc": ("○", "middling"),
    "not reproduced": BAD, "other direction": BAD, "does not hold": BAD, "corrected": ("!", "bad"),
    "not comparable": PLAIN, "not run": PLAIN,
}  # fmt: skip
assert set(MARK_BY_WORD) == set(VERDICT_WORDS), "every word has a mark"


@dataclass(frozen=True)
class JudgedClaim:
    """A verdict as readers see it."""

    id: str  # of the claim
    word: VerdictWord
    text: str
    paper: str
    paper_number: float | None
    ours: str
    number: float | None
    explanation: str
    scale: str
    note: str  # how the number was read, and when the claim holds
    p_value: float

    @classmethod
    def from_verdict(cls, verdict: Verdict) -> JudgedClaim:
        """Return the texts and numbers of a verdict."""
        claim = verdict.claim
        value = verdict.ours.value if verdict.ours else float("nan")
        return cls(
            id=claim.id,
            word=verdict.word,
            text=claim.text,
            paper=verdicts.paper_value_text(claim),
            paper_number=float(claim.paper) if isinstance(claim.paper, int | float) else None,
            ours=verdicts.our_value_text(verdict),
            number=None if math.isnan(value) else value,
            explanation=verdict.explanation,
            scale=verdict.scale,
            note=verdicts.claim_note(claim),
            p_value=verdict.p_value_or_one,
        )


class HtmlTable(NamedTuple):
    """A table as a page shows it."""

    title: str
    html: str


@dataclass(frozen=True)
class ItemPage:
    """A figure or table: what was drawn, from what, and what follows.

    All of it is plain data, so that it can be kept for the next report.
    """

    name: str
    stem: str  # of its page and its files
    title: str
    caption: str = ""
    source: str = ""  # whose records
    remarks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # that make it again, the shortest first
    facts: Mapping[str, str] = field(default_factory=dict)  # of its records: machine, data, code
    judged: tuple[JudgedClaim, ...] = ()
    tables: tuple[HtmlTable, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # kind (svg, pdf, csv, ...) -> path of the file
    bibtex: str = ""  # of the paper
    runs: tuple[str, ...] = ()  # keys of its runs
    damage: str = ""  # why it could not be drawn
    paper: str = ""  # in words; empty of one's own
    # Of this machine's runs, else as below:
    summary: tuple[str, ...] = ()  # sentences on what they show, the most important first
    num_more_runs: int = 0  # that would make it firmer
    made_s: float = 0.0  # when the newest of them began, or their list changed, in seconds since 1970

    @property
    def alt_text(self) -> str:
        """Description of its picture, for readers who do not see it."""
        return (
            f"{self.title}. The page of {self.stem} says how it was measured, and has its numbers as tables."
        )


class SupportingClaim(NamedTuple):
    """A claim that carries a finding: in fewer words, its verdict, and the item that judges it."""

    short: str
    judged: JudgedClaim
    item: ItemPage


@dataclass(frozen=True)
class Finding:
    """A finding: a sentence, its picture's item, and the claims behind it."""

    sentence: str
    item: ItemPage
    claims: tuple[SupportingClaim, ...]


def describe_provenance(frames: Frames) -> dict[str, str]:
    """Return number, machine, data, code and dates of an item's runs, as words by name; {} without runs."""
    if not len(frames.runs):
        return {}
    started = sorted(map(str, captions.distinct_values(frames, "started")))
    dates = dict.fromkeys((started[0][:10], started[-1][:10])) if started else ()
    return {
        "runs": describe_runs(frames),
        "machine": captions.describe_machine(frames),
        "data": captions.describe_data_and_digest(frames),
        "workers": captions.describe_workers_and_batch(frames),
        "torch": captions.join_distinct_values(frames, "provenance.versions.torch"),
        "code": captions.join_with_and(
            str(commit)[:8] for commit in captions.distinct_values(frames, "provenance.commit")
        ),
        "measured": " to ".join(dates) or "unknown",
    }


def describe_runs(frames: Frames) -> str:
    """Return the number of runs, and of launches: '3 launches, in which 4 methods take turns'."""
    runs = frames.runs
    launched = runs.dropna(subset=["group"]) if "group" in runs else runs[:0]
    parts = []
    if len(launched):
        launches = format_count(launched["group"].nunique(), "launches")
        parts.append(f"{launches}, in which {launched['variant'].nunique()} methods take turns")
    others = runs["run_id"].nunique() - launched["run_id"].nunique()
    if others:
        parts.append(format_count(others, "runs"))
    return captions.join_with_and(parts)
