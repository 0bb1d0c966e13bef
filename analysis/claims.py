"""Claims: a published number or statement, the rule by which it holds, and the verdict of our records.

    absolute   our value is within `tolerance` (in the claim's unit) of the paper's; at the paper's scale only
    ratio      our value is within a factor of 1 + `tolerance` of the paper's; at the paper's scale only
    shape      as absolute, but a statement on the course of things, which a reduced scale can have, too
    ordering   our difference is above `tolerance`, in the published direction; at any scale
    limit      our value is at most `tolerance`: an aim of this project, not a published number

The rules, in the order in which they are asked:

1. Nothing was measured: *not run*.
2. The records differ in what a comparison must hold fixed, the claim names an accelerator or a link that they
   are not from, or it is a number and their scale is reduced: *not comparable*, and why.
3. There is no interval, or it is over fewer than `stats.ENOUGH` independent runs or blocks:
   *indicated (n = ...)*, and on which side of the limits the estimate lies.
4. The interval crosses a limit of the band: *inconclusive*.
5. The interval lies in the band: *reproduced*; in one `PARTLY` times as wide: *partly*; else *not
   reproduced*. A claim without a published number *holds* or *does not hold*, and is counted apart.

*re-derived* is what becomes of *reproduced* and *holds* for a claim with `rederived=True`, whose value
follows from the authors' own published logs. It is no measurement of ours, so rule 2 does not apply to it,
and `ours` ignores the frames that it is given; the band, the interval and the number of blocks are asked for
all the same (`Value.of` is "blocks": of iterations of one of their jobs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from analysis.pictures import captions
from analysis.pictures.numbers import number, with_unit
from analysis.records.frames import Frames
from analysis.stats import Mixed, Value

ClaimKind = Literal["absolute", "ratio", "shape", "ordering", "limit"]
NUMBERS = ("absolute", "ratio")  # kinds that only the paper's scale can decide
# From the least favourable on: claims of one group count once, with the first of their words.
Word = Literal[
    "not reproduced", "does not hold", "inconclusive", "partly", "indicated", "reproduced", "holds",
    "re-derived", "not comparable", "not run",
]  # fmt: skip
WORDS: tuple[Word, ...] = get_args(Word)
UNDECIDED = ("not comparable", "not run")  # the records say nothing about the claim
PARTLY = 2.0  # a claim holds partly up to this multiple of its tolerance
ANY_GPU = "GPU"  # an accelerator: whatever the driver calls it
REDUCED = "reduced scale"
SIMULATED = "simulated times"
# What the scale of a run is, as columns of `frames.runs`, and how each is called.
SCALE_NAMES = {
    "task.name": "task", "task.batch_size": "batch", "workers": "workers", "steps_total": "steps",
    "train.epochs": "epochs", "method.density": "density", "method.density_warmup": "density warm-up",
    "task.lr": "learning rate", "task.lr_milestones": "decays at epochs", "precision": "precision",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and how to compute the same quantity from our records."""

    text: str
    paper: float | str | None  # the published number; else in words where the statement is, or nothing
    unit: str
    source: str  # where in the paper, and how the value was read
    kind: ClaimKind
    tolerance: float
    reason: str  # why this tolerance, and what a reader should know before comparing
    ours: Callable[..., Value | None]  # of frames, and of what stands in `of`
    accelerator: str = ""  # the GPU that it is about, a part of its driver's name for it, or ANY_GPU
    link: str = ""  # what joins the workers, as in conf/link: NVLink, PCIe
    timed: bool = False  # computed from times, which virtual ranks simulate
    group: str = ""  # claims that follow from one cause are counted once
    rederived: bool = False  # computed from the authors' own logs, not from records of ours
    # For an ordering that depends on how long one trains: the step from which on it stays as it is.
    flips_at: Callable[..., Value | None] | None = None  # of frames and of `of`, too
    of: tuple[Any, ...] = ()
    id: str = ""  # stable, short: "ends-close"; derived from the text where there is none
    answers: tuple[str, ...] = ()  # the statements of papers that it answers, by their ids

    def __post_init__(self) -> None:
        if self.kind in ("absolute", "ratio", "shape"):
            self._paper_number()
        assert self.kind != "limit" or not self.is_published, f"a limit is our own aim: {self.text}"

    @property
    def is_published(self) -> bool:
        """Whether it has a published number."""
        return isinstance(self.paper, int | float)

    def band(self, widen: float = 1.0) -> tuple[float, float]:
        """The lowest and highest value of ours for which the claim holds, at `widen` times its tolerance."""
        slack = self.tolerance * widen
        if self.kind in ("absolute", "shape"):
            return self._paper_number() - slack, self._paper_number() + slack
        if self.kind == "ratio":
            return self._paper_number() / (1 + slack), self._paper_number() * (1 + slack)
        if self.kind == "ordering":
            return (self.tolerance if widen == 1.0 else 0.0), math.inf
        return -math.inf, self.tolerance

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
    reason: str  # why this word
    flips: str = ""  # the horizon that the ordering needs

    @property
    def because(self) -> str:
        """All that must be read with the word: n, the reason, the horizon."""
        said = [self.reason] if self.word in ("not comparable", "inconclusive", "indicated") else []
        if self.word == "indicated":
            assert self.ours is not None, "what is indicated was measured"
            said.insert(0, f"n = {self.ours.n}")
        if self.word not in UNDECIDED:
            said.append(self.flips)
        return "; ".join(filter(None, said))


def reduced(frames: Frames, declared: Mapping[str, Any] | None) -> str:
    """Differences of the runs from what the paper ran, in words; empty where there are none.

    Args:
        declared: the paper's values by column of `frames.runs`, as the item states them in SCALE; where the
            value depends on the device, a mapping from device to value. A run without a field (dense has no
            density) does not differ in it.
    """
    if declared is None:
        return f"{REDUCED}: the item does not say what the paper's is"
    if not len(frames.runs):
        return ""
    found = (_difference(frames, column, paper) for column, paper in declared.items())
    differences = ", ".join(filter(None, found))
    return f"{REDUCED}: {differences}" if differences else ""


def judge(claims: Iterable[Claim], frames: Frames, scale: str) -> list[Verdict]:
    """A verdict on every claim. `frames` are of the item's runs only; `scale` is `reduced` of them."""
    return [_judge(claim, frames, scale) for claim in claims]


def _difference(frames: Frames, column: str, paper: Any) -> str:
    """'batch 16 instead of 128'; empty where no run differs."""
    runs = frames.runs
    if column not in runs:
        return ""
    found = set()
    for device, value in zip(runs.get("device", [None] * len(runs)), runs[column], strict=True):
        expected = paper[device] if isinstance(paper, Mapping) else paper
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        if not missing and value != expected:
            found.add((value, expected))
    # Numbers by their size, then words: the order of the records says nothing.
    ordered = sorted(found, key=lambda pair: (isinstance(pair[0], str), pair[0]))
    told = [f"{_plain(value)} instead of {_plain(expected)}" for value, expected in ordered]
    return f"{SCALE_NAMES[column]} {captions.listed(dict.fromkeys(told))}" if told else ""


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return "none" if value == "[]" else value
    return number(value)


def _judge(claim: Claim, frames: Frames, scale: str) -> Verdict:
    simulated = SIMULATED if claim.timed and captions.is_simulated(frames) else ""
    where = "" if claim.rederived else "; ".join(filter(None, (scale, simulated)))
    try:
        ours = claim.ours(frames, *claim.of)
    except Mixed as mixture:
        return Verdict(claim, None, "not comparable", where, str(mixture))
    if ours is None:
        return Verdict(claim, None, "not run", where, "no records of it")
    if why := "" if claim.rederived else _elsewhere(claim, frames, scale):
        return Verdict(claim, ours, "not comparable", where, why)
    word, reason = _word(claim, ours)
    return Verdict(claim, ours, word, where, reason, _flips(claim, frames))


def _elsewhere(claim: Claim, frames: Frames, scale: str) -> str:
    """Reason why these records cannot judge the claim; empty where they can."""
    exactly = claim.link or claim.accelerator not in ("", ANY_GPU)
    driver = "" if claim.accelerator == ANY_GPU else claim.accelerator
    if claim.accelerator and not captions.is_on(frames, driver):
        hardware = captions.listed(captions.values(frames, "provenance.gpu") or ["a CPU"])
        return f"about {about(claim)}; measured on {hardware}"
    if exactly and claim.timed and captions.is_simulated(frames):
        return f"about {about(claim)}; these times are simulated"
    if claim.link and not captions.is_linked(frames, claim.link):
        links = captions.listed(captions.values(frames, "cluster.link.name"))
        return f"about {about(claim)}; measured over {links}"
    if claim.kind in NUMBERS and scale:
        return "about the paper's scale, and this one is reduced"
    return ""


def about(claim: Claim) -> str:
    """The machine that a claim is about, in words."""
    accelerator = "GPUs" if claim.accelerator == ANY_GPU else claim.accelerator
    return " and ".join(filter(None, (accelerator, claim.link)))


def _word(claim: Claim, ours: Value) -> tuple[Word, str]:
    """The word by the value alone, and why."""
    if math.isnan(ours.value):
        return "inconclusive", "a run diverged: it has no number"
    if not ours.decides:
        return "indicated", _side(claim, ours.value)
    least, most = ours.low, ours.high
    assert least is not None, "what decides has an interval"
    assert most is not None, "what decides has an interval"
    low, high = claim.band()
    if (least > low if claim.kind == "ordering" else least >= low) and most <= high:
        if claim.rederived:
            return "re-derived", "the interval lies within the band"
        return ("reproduced" if claim.is_published else "holds"), "the interval lies within the band"
    crossed = [edge for edge in (low, high) if least <= edge <= most]
    if crossed:
        limits = captions.listed(with_unit(edge, claim.unit) for edge in crossed)
        return "inconclusive", f"the interval includes the limit {limits}"
    wide_low, wide_high = claim.band(PARTLY)
    if claim.is_published and wide_low < least and most < wide_high:
        return "partly", f"the interval lies within {number(PARTLY)} times the tolerance"
    return ("not reproduced" if claim.is_published else "does not hold"), "the interval lies outside the band"


def _side(claim: Claim, value: float) -> str:
    low, high = claim.band()
    if claim.kind == "ordering":
        return "in this direction" if value > low else "not in this direction"
    return "within the band" if low <= value <= high else "outside the band"


def _flips(claim: Claim, frames: Frames) -> str:
    """The step from which on the ordering stays so, of how many."""
    at = claim.flips_at(frames, *claim.of) if claim.flips_at else None
    if at is None:
        return ""
    if math.isinf(at.value):
        return "not so at the end of every run"
    steps = captions.listed(number(steps) for steps in captions.values(frames, "steps_total"))
    return f"so from step {number(round(at.value))} of {steps} on"
