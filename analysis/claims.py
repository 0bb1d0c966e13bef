"""Claims: a published number or statement, the rule by which it holds, and the verdict of our records.

    absolute   our value is within `tolerance` (in the claim's unit) of the paper's; at the paper's scale only
    ratio      our value is within a factor of 1 + `tolerance` of the paper's; at the paper's scale only
    shape      as absolute, but a statement on the course of things, which a reduced scale can have, too
    ordering   our difference is above `tolerance`, in the published direction; at any scale
    limit      our value is at most `tolerance`: an aim of this project, not a published number

The rules, in the order in which they are asked:

1. Nothing was measured: *not run*.
2. The records differ in what a comparison must hold fixed, the claim names an accelerator or a link that they
   are not from, or it is a number and their scale is reduced; or a training that is no timing ended where
   guessing ends: *not comparable*, and why.
3. The runs were begun before the claim had this rule: *post hoc*. A rule is registered by the runs, which
   store the digest of each claim's rule when they begin.
4. There is no interval, or it is over fewer than `stats.ENOUGH_SAMPLES` independent runs; or it is a time, and there
   were fewer launches than that or all were begun on one occasion: *indicated (n = ...)*, and on which side
   of the limits the estimate lies.
5. The interval crosses a limit of the band: *inconclusive*.
6. The interval lies in the band: *reproduced* for a magnitude, *same direction* for an ordering with a
   published number; in one `PARTLY` times as wide: *partly*; else *not reproduced*, *other direction*. A
   claim without a published number *holds* or *does not hold*, and is counted apart.

What follows from the authors' own published logs (`rederived=True`) is *re-derived* in the band, and
*corrected* outside of that of a published number. It is no measurement of ours, so rules 2 and 3 do not apply
to it, and `ours` ignores the frames that it is given; the interval is over the windows that they logged.

All that is asked of the records is asked of the runs that the claim reads (analysis.evidence), not of all
that its item has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from analysis.evidence import ChanceLookup, Evidence, describe_scale_differences, digest_rule
from analysis.occasions import ENOUGH_OCCASIONS
from analysis.pictures import captions
from analysis.pictures.numbers import format_count, format_number, format_with_unit
from analysis.records.frames import Frames, track_read_keys
from analysis.records.steps import LAUNCHES
from analysis.stats import ENOUGH_SAMPLES, Estimate, MixedRunsError

ClaimKind = Literal["absolute", "ratio", "shape", "ordering", "limit"]
NUMBER_KINDS = ("absolute", "ratio")  # kinds that only the paper's scale can decide
# From the least favourable on: claims of one group count once, with the first of their words.
VerdictWord = Literal[
    "not reproduced", "other direction", "does not hold", "inconclusive", "partly", "indicated", "post hoc",
    "reproduced", "same direction", "holds", "re-derived", "corrected", "not comparable", "not run",
]  # fmt: skip
VERDICT_WORDS: tuple[VerdictWord, ...] = get_args(VerdictWord)
IN_BAND: tuple[VerdictWord, ...] = ("reproduced", "same direction", "holds", "re-derived")
OUT_OF_BAND: tuple[VerdictWord, ...] = ("not reproduced", "other direction", "does not hold", "corrected")
DECISIVE = (*IN_BAND, "partly", *OUT_OF_BAND)
UNDECIDED = ("not comparable", "not run")  # the records say nothing about the claim
PARTLY = 2.0  # a claim holds partly up to this multiple of its tolerance
ANY_GPU = "GPU"  # an accelerator: whatever the driver calls it
SIMULATED, EMULATED, DERIVED = "simulated times", "emulated link", "derived"
LINK_PLACEHOLDER = "{link}"  # in a claim's text: the link of its runs, by what was found


def no_chance_level(task: str) -> float | None:
    """The chance level of a task of which none is known."""
    return None


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
    ours: Callable[..., Estimate | None]  # of frames, and of what stands in `of`
    accelerator: str = ""  # the GPU that it is about, a part of its driver's name for it, or ANY_GPU
    link: str = ""  # what joins the workers, as in conf/link: NVLink, PCIe, ethernet_1g
    timed: bool = False  # computed from times, which virtual ranks simulate
    derived: bool = False  # put together from what several runs measured; nothing ran as a whole
    chance: float | None = None  # of an accuracy: percent of top-1 that guessing gives; by default the task's
    group: str = ""  # claims that follow from one cause are counted once
    rederived: bool = False  # computed from the authors' own logs, not from records of ours
    # For an ordering that depends on how long one trains: the step from which on it stays as it is.
    flips_at: Callable[..., Estimate | None] | None = None  # of frames and of `of`, too
    of: tuple[Any, ...] = ()
    id: str = ""  # stable, short: "ends-close"; derived from the text where there is none
    answers: tuple[str, ...] = ()  # the statements of papers that it answers, by their ids
    stated: str = ""  # the paper's words, where the number in `paper` is ours for them
    revised: str = ""  # "2026-11-25: the mean of all lags, not one of them": when and how `ours` was changed
    # The lasting names, in rules, of the function `ours` and of the functions in `of`, in this order; where
    # none are given their Python names count, and who renames a function gives the claim another rule.
    quantity: str | Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.kind in ("absolute", "ratio", "shape"):
            self._paper_number()
        if self.kind == "limit" and self.is_published:
            raise ValueError(f"a limit is our own aim, and this one has a published number: {self.text}")
        if math.isnan(self.tolerance) or (self.kind not in ("ordering", "limit") and self.tolerance < 0):
            raise ValueError(f"a band needs a tolerance of 0 or more, not {self.tolerance}: {self.text}")

    @property
    def is_published(self) -> bool:
        """Whether it has a published number."""
        return isinstance(self.paper, int | float) and not self.stated

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
        if not isinstance(self.paper, int | float):
            raise ValueError(
                f"a claim of kind {self.kind} is a band around the paper's number, and there is none: "
                f"{self.text}; give one, or take kind ordering"
            )
        return self.paper

    def rule(self, declared: Mapping[str, Any]) -> str:
        """Digest of what decides: the quantity, its threshold and band, the hardware it is about, and the
        scale at which a number can be compared.

        Words may be mended, causes regrouped and functions renamed without another rule: functions count by
        the names in `quantity`. Who changes what a function computes says so in `revised`.

        Args:
            declared: what the paper ran, see `analysis.evidence.describe_scale_differences`.
        """
        names = iter([self.quantity] if isinstance(self.quantity, str) else self.quantity)
        parts = {
            "quantity": _to_rule_json(self.ours, names), "of": _to_rule_json(self.of, names), "unit": self.unit,
            "kind": self.kind, "tolerance": self.tolerance,
            "paper": self.paper if isinstance(self.paper, int | float) else None,
            "accelerator": self.accelerator, "link": self.link, "timed": self.timed,
        }  # fmt: skip
        if self.revised:
            parts["revised"] = self.revised
        if declared and self.kind in NUMBER_KINDS:
            parts["scale"] = _to_rule_json(declared, names)
        if self.chance is not None:
            parts["chance"] = self.chance
        return digest_rule(parts)


@dataclass(frozen=True)
class Verdict:
    """A claim, our value for it, and what follows."""

    claim: Claim
    ours: Estimate | None
    word: VerdictWord
    scale: str  # empty at the paper's scale; else what is reduced, simulated, emulated or derived
    reason: str  # why this word
    flips: str = ""  # the horizon that the ordering needs
    launches: int | None = None  # of a time: groups of processes that were started
    occasions: int | None = None  # on which they were begun
    link_asked: float | None = None  # Gbit/s of an emulated link
    link_found: float | None = None
    registered: bool | None = None  # was the rule there before the runs? None: there are none
    chance: float | None = None  # of an accuracy: percent of top-1 that guessing gives
    rule: str = ""  # the digest of its rule

    @property
    def p_value(self) -> float:
        """Of a decisive word: how probable such an interval is, if a limit of its band is the truth."""
        if self.word not in DECISIVE or self.ours is None:
            return 1.0
        wide = self.word in ("partly", "not reproduced", "other direction")
        edges = self.claim.band(PARTLY if wide and self.claim.is_published else 1.0)
        return max(self.ours.p_value(edge) for edge in edges if math.isfinite(edge))

    @property
    def because(self) -> str:
        """All that must be read with the word: n, the reason, the horizon."""
        told = ("not comparable", "inconclusive", "indicated", "post hoc")
        said = [self.reason] if self.word in told else []
        if self.word == "indicated":
            assert self.ours is not None, "what is indicated was measured"
            said[:0] = [f"n = {self.ours.n}"] if self.launches is None else []
        if self.word not in UNDECIDED:
            said.append(self.flips)
        return "; ".join(filter(None, said))


def judge_claims(
    claims: Iterable[Claim],
    frames: Frames,
    declared: Mapping[str, Any],
    chance: ChanceLookup = no_chance_level,
) -> list[Verdict]:
    """A verdict on every claim.

    Args:
        frames: of the item's runs only.
        declared: what the paper ran, see `describe_scale_differences`.
    """
    return [
        replace(_judge_claim(claim, frames, declared, chance), rule=claim.rule(declared)) for claim in claims
    ]


def _to_rule_json(part: Any, names: Iterator[Any]) -> Any:
    """Return a part of a rule as JSON, functions by the next of these names or by their own."""
    if callable(part) and (name := next(names, None)) is not None:
        return name
    if isinstance(part, partial):
        return [_to_rule_json(piece, names) for piece in (part.func, part.args, part.keywords)]
    if isinstance(part, Mapping):
        return {str(key): _to_rule_json(value, names) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_to_rule_json(item, names) for item in part]
    if isinstance(part, str | int | float) or part is None:
        return part
    return getattr(part, "__name__", None) or repr(part)


def _judge_claim(claim: Claim, frames: Frames, declared: Mapping[str, Any], chance: ChanceLookup) -> Verdict:
    with track_read_keys() as keys:
        try:
            ours = claim.ours(frames, *claim.of)
        except MixedRunsError as mixture:
            ours, mixed = None, str(mixture)
        else:
            mixed = ""
    evidence = Evidence.of(frames, keys)
    level = claim.chance
    of_task = chance if level is None else lambda task: level
    times = evidence.of_times() if claim.derived else evidence
    link = times.link() if keys or ours else claim.link  # what read nothing was not measured
    claim = replace(claim, text=claim.text.replace(LINK_PLACEHOLDER, link))
    scale = "" if claim.rederived else describe_scale_differences(evidence.frames, declared)
    where = "; ".join(filter(None, (scale, *_measurement_kinds(claim, times))))
    if mixed:
        return Verdict(claim, None, "not comparable", where, mixed)
    if ours is None:
        return Verdict(claim, None, "not run", where, "no records of it")
    facts = (
        {
            **_verdict_facts(claim, times, of_task),
            "registered": evidence.registered(claim.id, claim.rule(declared)),
        }
        if len(evidence.frames.runs) and not claim.rederived
        else {}
    )
    verdict = Verdict(claim, ours, "not run", where, "", **facts)
    if why := "" if claim.rederived else _incomparable_reason(claim, times, scale, of_task):
        return replace(verdict, word="not comparable", reason=why)
    flips = _horizon_text(claim, evidence.frames)
    if verdict.registered is False:
        why = f"the rule is younger than the runs; {_side_text(claim, ours.value)}"
        return replace(verdict, word="post hoc", reason=why, flips=flips)
    if why := _indicated_reason(verdict):
        return replace(verdict, word="indicated", reason=why, flips=flips)
    word, reason = _decisive_word(claim, ours)
    return replace(verdict, word=word, reason=reason, flips=flips)


def _measurement_kinds(claim: Claim, evidence: Evidence) -> list[str]:
    """What else than the scale tells these numbers from a measurement of the real thing."""
    if claim.rederived:
        return []
    simulated = claim.timed and evidence.is_simulated()
    emulated = claim.timed and evidence.is_emulated
    found = {SIMULATED: simulated, EMULATED: emulated, DERIVED: claim.derived}
    return [kind for kind, is_so in found.items() if is_so]


def _verdict_facts(claim: Claim, evidence: Evidence, chance: ChanceLookup) -> dict[str, Any]:
    """The fields of a verdict that tell what its records are."""
    if not claim.timed:
        return {"chance": evidence.chance(chance) or None}
    return {
        "launches": len(evidence.launches), "occasions": evidence.occasions,
        "link_asked": evidence.link_asked, "link_found": evidence.link_found,
    }  # fmt: skip


def _incomparable_reason(claim: Claim, evidence: Evidence, scale: str, chance: ChanceLookup) -> str:
    """Reason why these records cannot judge the claim; empty where they can."""
    frames = evidence.frames
    exactly = claim.link or claim.accelerator not in ("", ANY_GPU)
    driver = "" if claim.accelerator == ANY_GPU else claim.accelerator
    if claim.accelerator and not captions.is_on_gpu(frames, driver):
        hardware = captions.join_words(captions.distinct_values(frames, "provenance.gpu") or ["a CPU"])
        return f"about {describe_required_hardware(claim)}; measured on {hardware}"
    if exactly and claim.timed and evidence.is_simulated():
        return f"about {describe_required_hardware(claim)}; these times are simulated"
    # An emulated link is told by what was found, in the claim's own words.
    if claim.link and not evidence.is_emulated and not captions.is_over_link(frames, claim.link):
        links = captions.join_words(captions.distinct_values(frames, "cluster.link.name"))
        return f"about {describe_required_hardware(claim)}; measured over {links}"
    if claim.kind in NUMBER_KINDS and scale:
        return "about the paper's scale, and this one is reduced"
    return "" if claim.timed else evidence.at_chance(chance)


def describe_required_hardware(claim: Claim) -> str:
    """The machine that a claim is about, in words."""
    accelerator = "GPUs" if claim.accelerator == ANY_GPU else claim.accelerator
    return " and ".join(filter(None, (accelerator, claim.link)))


def _decisive_word(claim: Claim, ours: Estimate) -> tuple[VerdictWord, str]:
    """The word by the value alone, and why."""
    if math.isnan(ours.value):
        return "inconclusive", "a run diverged: it has no number"
    least, most = ours.low, ours.high
    assert least is not None, "what decides has an interval"
    assert most is not None, "what decides has an interval"
    low, high = claim.band()
    if (least > low if claim.kind == "ordering" else least >= low) and most <= high:
        return _favourable_word(claim), "the interval lies within the band"
    crossed = [edge for edge in (low, high) if least <= edge <= most]
    if crossed:
        limits = captions.join_words(format_with_unit(edge, claim.unit) for edge in crossed)
        return "inconclusive", f"the interval includes the limit {limits}"
    wide_low, wide_high = claim.band(PARTLY)
    if claim.is_published and not claim.rederived and wide_low < least and most < wide_high:
        return "partly", f"the interval lies within {format_number(PARTLY)} times the tolerance"
    return _unfavourable_word(claim), "the interval lies outside the band"


def _favourable_word(claim: Claim) -> VerdictWord:
    if claim.rederived:
        return "re-derived"
    if not claim.is_published:
        return "holds"
    return "same direction" if claim.kind == "ordering" else "reproduced"


def _unfavourable_word(claim: Claim) -> VerdictWord:
    if not claim.is_published:
        return "does not hold"
    if claim.rederived:
        return "corrected"
    return "other direction" if claim.kind == "ordering" else "not reproduced"


def _indicated_reason(verdict: Verdict) -> str:
    """Reason why the value decides nothing yet, and on which side it lies; empty where it may decide."""
    claim, ours = verdict.claim, verdict.ours
    assert ours is not None, "what is asked for was measured"
    side = _side_text(claim, ours.value)
    if math.isnan(ours.value):
        return ""  # a run diverged: more of them would not help
    if claim.timed and verdict.launches is not None and verdict.launches < ENOUGH_SAMPLES[LAUNCHES]:
        return f"{format_count(verdict.launches, LAUNCHES)}; {side}"
    if claim.timed and verdict.occasions is not None and verdict.occasions < ENOUGH_OCCASIONS:
        return f"all launches on one occasion; {side}"
    return "" if ours.decides else side


def _side_text(claim: Claim, value: float) -> str:
    low, high = claim.band()
    if claim.kind == "ordering":
        return "in this direction" if value > low else "not in this direction"
    return "within the band" if low <= value <= high else "outside the band"


def _horizon_text(claim: Claim, frames: Frames) -> str:
    """The step from which on the ordering stays so, of how many."""
    at = claim.flips_at(frames, *claim.of) if claim.flips_at else None
    if at is None:
        return ""
    if math.isinf(at.value):
        return "not so at the end of every run"
    steps = captions.join_words(
        format_number(steps) for steps in captions.distinct_values(frames, "steps_total")
    )
    return f"so from step {format_number(round(at.value))} of {steps} on"
