"""What a report holds of each figure, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from analysis.claims import WORDS, Verdict, Word
from analysis.pictures import captions
from analysis.records.frames import Frames
from analysis.tables import Table

# A word's sign and its tone, for readers who do not see colours and for those who do.
GOOD, MIDDLING, BAD, PLAIN = ("✓", "good"), ("◐", "middling"), ("✗", "bad"), ("·", "plain")
MARKS: dict[Word, tuple[str, str]] = {
    "reproduced": GOOD, "same direction": GOOD, "holds": GOOD, "re-derived": GOOD,
    "partly": MIDDLING, "indicated": ("○", "middling"), "inconclusive": ("?", "middling"),
    "post hoc": ("○", "middling"),
    "not reproduced": BAD, "other direction": BAD, "does not hold": BAD, "corrected": ("!", "bad"),
    "not comparable": PLAIN, "not run": PLAIN,
}  # fmt: skip
assert set(MARKS) == set(WORDS), "every word has a mark"


@dataclass(frozen=True)
class Item:
    """A figure or table: what was drawn, from what, and what follows."""

    name: str
    stem: str  # of its page and its files
    title: str
    caption: str = ""
    source: str = ""  # whose records
    remarks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # that make it again, the shortest first
    facts: Mapping[str, str] = field(default_factory=dict)  # of its records: machine, data, code
    judged: tuple[Verdict, ...] = ()
    tables: tuple[Table, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)  # kind (svg, pdf, csv, ...) -> file
    bibtex: str = ""  # of the paper
    runs: tuple[str, ...] = ()  # keys of its runs
    damage: str = ""  # why it could not be drawn

    @property
    def alt(self) -> str:
        """Description of its picture, for readers who do not see it."""
        return (
            f"{self.title}. The page of {self.stem} says how it was measured, and has its numbers as tables."
        )


def facts(frames: Frames) -> dict[str, str]:
    """Machine, data, code and dates of an item's runs, as words by name; {} without runs."""
    if not len(frames.runs):
        return {}
    started = sorted(str(at) for at in captions.values(frames, "started"))
    dates = dict.fromkeys((started[0][:10], started[-1][:10])) if started else ()
    return {
        "machine": captions.machine(frames),
        "data": captions.data(frames),
        "workers": captions.workers(frames),
        "torch": captions.listed(captions.values(frames, "provenance.versions.torch")),
        "code": captions.listed(str(commit)[:8] for commit in captions.values(frames, "provenance.commit")),
        "measured": " to ".join(dates) or "unknown",
    }
