"""What a report holds, as plain data. Times are seconds or milliseconds as named, sizes bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from analysis import verdicts
from analysis.claims import WORDS, Word
from analysis.pictures import captions
from analysis.records.frames import Frames
from analysis.tables import Table

# A word's sign and its tone, for readers who do not see colours and for those who do.
MARKS: dict[Word, tuple[str, str]] = {
    "reproduced": ("✓", "good"),
    "holds": ("✓", "good"),
    "re-derived": ("✓", "good"),
    "partly": ("◐", "middling"),
    "indicated": ("○", "middling"),
    "inconclusive": ("?", "middling"),
    "not reproduced": ("✗", "bad"),
    "does not hold": ("✗", "bad"),
    "not comparable": ("·", "plain"),
    "not run": ("·", "plain"),
}
assert set(MARKS) == set(WORDS), "every word has a mark"


@dataclass(frozen=True)
class Judged:
    """One verdict, in words."""

    item: str
    claim: str
    paper: str
    ours: str
    word: Word
    because: str  # what must be read with the word
    scale: str  # what is reduced or simulated
    notes: str  # where the number was read, when the claim holds, and why

    @property
    def mark(self) -> str:
        """Sign of its word."""
        return MARKS[self.word][0]

    @property
    def tone(self) -> str:
        """Class of its colour."""
        return MARKS[self.word][1]

    @property
    def rank(self) -> int:
        """Least favourable first."""
        return WORDS.index(self.word)


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
    judged: tuple[Judged, ...] = ()
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


def judged(rows: Iterable[verdicts.Row]) -> tuple[Judged, ...]:
    """(item, verdict) rows as a reader sees them."""
    return tuple(
        Judged(
            item=item,
            claim=verdict.claim.text,
            paper=verdicts.paper_text(verdict.claim),
            ours=verdicts.ours_text(verdict),
            word=verdict.word,
            because=verdict.because,
            scale=verdict.scale,
            notes=f"{verdict.claim.source}. {verdicts.rule(verdict.claim)} {verdict.claim.reason}",
        )
        for item, verdict in rows
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
        "code": captions.listed(versions(frames)),
        "measured": " to ".join(dates) or "unknown",
    }


def versions(frames: Frames) -> list[str]:
    """The first digits of each commit that the runs were made with."""
    return [str(commit)[:8] for commit in captions.values(frames, "provenance.commit")]


@dataclass(frozen=True)
class MethodCard:
    """A method of the library, and what was measured of it."""

    name: str
    summary: str
    broken: str = ""  # why its file can't be read


@dataclass(frozen=True)
class Contents:
    """All that the pages show, but for the runs, which are written one by one."""

    items: tuple[Item, ...]
    counts: Mapping[Word, int]  # how often each word was reached; claims of one cause count once
    methods: tuple[MethodCard, ...] = ()
    notes: tuple[str, ...] = ()  # what had to be left out, and why
