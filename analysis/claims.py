"""Claims: a published number or statement, the rule by which it holds, and the verdict of our records.

    absolute   our value is within `tolerance` (in the claim's unit) of the paper's
    ratio      our value is within the fraction `tolerance` of the paper's
    ordering   our difference is above `tolerance`, in the published direction
    shape      our deviation from the published shape is at most `tolerance`

Where the interval of our value crosses a limit of that band, the verdict is inconclusive. A verdict on
measurements at a reduced scale always says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis import captions
from analysis.frames import Frames
from analysis.stats import Value

Kind = Literal["absolute", "ratio", "ordering", "shape"]
Needs = Literal["any", "paper scale", "paper hardware"]
Word = Literal["reproduced", "partly", "not reproduced", "inconclusive", "not comparable", "not run"]
PARTLY = 2.0  # a claim holds partly up to this multiple of its tolerance


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and how to compute the same quantity from our records."""

    text: str
    paper: float | str | None
    unit: str
    source: str  # where in the paper, and how the value was read
    kind: Kind
    tolerance: float
    reason: str  # why this tolerance, and what a reader should know before comparing
    ours: Callable[[Frames], Value | None]
    needs: Needs = "any"
    hardware: str = ""  # the GPU that "paper hardware" means, a part of its driver's name for it
    timed: bool = False  # computed from times, which virtual ranks simulate

    def __post_init__(self) -> None:
        if self.kind in ("absolute", "ratio"):
            self._paper_number()
        assert (self.needs == "paper hardware") == bool(self.hardware), self.text

    def band(self, widen: float = 1.0) -> tuple[float, float]:
        """The lowest and highest value of ours for which the claim holds, at `widen` times its tolerance."""
        slack = self.tolerance * widen
        if self.kind == "absolute":
            return self._paper_number() - slack, self._paper_number() + slack
        if self.kind == "ratio":
            return self._paper_number() * (1 - slack), self._paper_number() * (1 + slack)
        if self.kind == "ordering":
            return (self.tolerance if widen == 1.0 else 0.0), math.inf
        return -math.inf, slack

    def _paper_number(self) -> float:
        assert isinstance(self.paper, int | float), f"{self.kind} needs the paper's number: {self.text}"
        return self.paper


@dataclass(frozen=True)
class Verdict:
    """A claim, our value for it, and what follows."""

    claim: Claim
    ours: Value | None
    word: Word
    scale: str  # empty at the paper's scale; else what is reduced or simulated

    @property
    def text(self) -> str:
        """The word, with the scale beside it where that is not the paper's."""
        judged = self.word not in ("not run", "not comparable")
        return f"{self.word} ({self.scale})" if judged and self.scale else self.word


def reduced(frames: Frames, profile: str) -> str:
    """The scale of the runs in words, from the records; empty for profile=paper, which is at the paper's."""
    if profile == "paper":
        return ""
    if not len(frames.runs):
        return "reduced scale"
    task, steps = (captions.listed(captions.values(frames, name)) for name in ("task.name", "steps_total"))
    return f"reduced scale: {task}, {captions.workers(frames)}, {steps} steps"


def judge(claims: Iterable[Claim], frames: Frames, scale: str) -> list[Verdict]:
    """A verdict on every claim. `frames` holds the item's own runs; `scale` is `reduced(frames, profile)`."""
    return [_judge(claim, frames, scale) for claim in claims]


def table(rows: Iterable[tuple[str, Verdict]]) -> str:
    """(item, verdict) rows as a Markdown table."""
    lines = ["| item | claim | paper | ours | verdict |", "|---|---|---|---|---|"]
    for item, verdict in rows:
        claim = verdict.claim
        cells = (item, claim.text, paper_text(claim), ours_text(verdict), verdict.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def notes(verdicts: Sequence[Verdict]) -> str:
    """Where each number was read, when the claim holds and why, as a Markdown list."""
    claims = [verdict.claim for verdict in verdicts]
    return "".join(f"- {claim.text}: {claim.source}. {rule(claim)} {claim.reason}\n" for claim in claims)


def paper_text(claim: Claim) -> str:
    """The paper's value as it was published, with its unit."""
    if isinstance(claim.paper, int | float):
        return f"{claim.paper:,} {claim.unit}".strip()
    return claim.paper or "-"


def ours_text(verdict: Verdict) -> str:
    """Our value, its interval and n; times from virtual ranks are marked."""
    value, unit = verdict.ours, verdict.claim.unit
    if value is None:
        return "-"
    if isinstance(value.value, bool):
        text = "yes" if value.value else "no"
    elif value.low is None or value.high is None:
        text = _with_unit(value.value, unit)
    else:
        text = f"{_with_unit(value.value, unit)} [{_digits(value.low)}, {_digits(value.high)}]"
    simulated = ", *simulated*" if verdict.claim.timed and "simulated" in verdict.scale else ""
    return f"{text} (n = {value.n} {value.of}{simulated})"


def rule(claim: Claim) -> str:
    """When the claim holds, in words."""
    if claim.kind == "absolute":
        return f"Holds within {_with_unit(claim.tolerance, claim.unit)}."
    if claim.kind == "ratio":
        return f"Holds within {100 * claim.tolerance:g} %."
    if claim.kind == "ordering":
        return f"Holds above {_with_unit(claim.tolerance, claim.unit)}."
    return f"Holds up to {_with_unit(claim.tolerance, claim.unit)}."


def _judge(claim: Claim, frames: Frames, scale: str) -> Verdict:
    ours = claim.ours(frames)
    simulated = "simulated times" if claim.timed and captions.is_simulated(frames) else ""
    where = "; ".join(filter(None, (scale, simulated)))
    if ours is None:
        return Verdict(claim, None, "not run", where)
    smaller = claim.needs != "any" and bool(scale)
    elsewhere = claim.needs == "paper hardware" and (simulated or not captions.is_on(frames, claim.hardware))
    if smaller or elsewhere:
        return Verdict(claim, ours, "not comparable", where)
    return Verdict(claim, ours, _word(claim, ours), where)


def _word(claim: Claim, ours: Value) -> Word:
    if isinstance(ours.value, bool):
        return "reproduced" if ours.value else "not reproduced"
    if math.isnan(ours.value):
        return "inconclusive"
    least = ours.value if ours.low is None else ours.low
    most = ours.value if ours.high is None else ours.high
    low, high = claim.band()
    if (least > low if claim.kind == "ordering" else least >= low) and most <= high:
        return "reproduced"
    if least < low < most or least < high < most:
        return "inconclusive"
    wide_low, wide_high = claim.band(PARTLY)
    return "partly" if wide_low < ours.value < wide_high else "not reproduced"


def _with_unit(value: float, unit: str) -> str:
    return "never" if math.isinf(value) else f"{_digits(value)} {unit}".strip()


def _digits(value: float) -> str:
    """Four significant digits or the whole part, at most six decimals, no exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}".rstrip("0").rstrip(".") if decimals else f"{value:,.0f}"
