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
4. There is no interval, or it is over fewer than `stats.ENOUGH_SAMPLES` independent runs; or it is a time,
   and there were fewer launches than that or all were begun on one occasion: *indicated (n = ...)*, and on
   which side of the limits the estimate lies.
5. The interval crosses a limit of the band: *inconclusive*.
6. The interval lies in the band: *reproduced* for a magnitude, *same direction* for an ordering with a
   published number; in one `PARTLY` times as wide: *partly*; else *not reproduced*, *other direction*. A
   claim without a published number *holds* or *does not hold*, and is counted apart.

What follows from the authors' own published logs (`rederived=True`) is *re-derived* in the band, what follows
from numbers that they printed is *recomputed*; outside the band of a published number both are *corrected*.
It is no measurement of ours, so rules 2 and 3 do not apply
to it, and `compute` ignores the frames that it is given; the interval is over the windows that they logged.

All that is asked of the records is asked of the runs that the claim reads (analysis.evidence), not of all
that its item has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from analysis.bands import Band
from analysis.evidence import ChanceLookup, ClaimEvidence, describe_scale_differences, digest_rule
from analysis.occasions import ENOUGH_OCCASIONS
from analysis.pictures import captions
from analysis.pictures.links import LINK_COLUMN, describe_link
from analysis.pictures.numbers import format_count, format_number
from analysis.records.frames import Frames, track_read_run_keys
from analysis.records.steps import LAUNCHES
from analysis.stats import ENOUGH_SAMPLES, PRINTED, Estimate, IncomparableRunsError

ClaimKind = Literal["absolute", "ratio", "shape", "ordering", "limit"]
NUMBER_KINDS = ("absolute", "ratio")  # kinds that only the paper's scale can decide
# From the least favourable on: claims of one group count once, with the first of their words.
VerdictWord = Literal[
    "not reproduced", "other direction", "does not hold", "inconclusive", "partly", "indicated", "post hoc",
    "reproduced", "same direction", "holds", "re-derived", "recomputed", "corrected",
    "not comparable", "not run",
]  # fmt: skip
VERDICT_WORDS: tuple[VerdictWord, ...] = get_args(VerdictWord)
IN_BAND: tuple[VerdictWord, ...] = ("reproduced", "same direction", "holds", "re-derived", "recomputed")
OUT_OF_BAND: tuple[VerdictWord, ...] = ("not reproduced", "other direction", "does not hold", "corrected")
DECISIVE = (*IN_BAND, "partly", *OUT_OF_BAND)
UNDECIDED = ("not comparable", "not run")  # the records say nothing about the claim
PARTLY = 2.0  # a claim holds partly up to this multiple of its tolerance
ANY_GPU = "GPU"  # an accelerator: whatever the driver calls it
SIMULATED, EMULATED, DERIVED = "simulated times", "emulated link", "derived"
LINK_PLACEHOLDER = "{link}"  # in a claim's text: the link of its runs, by what was found


def no_chance_level(task: str) -> float | None:
    """Return None: the chance level of a task of which none is known."""
    return None


@dataclass(frozen=True)
class Claim:
    """Statement of a paper, and how to compute the same quantity from our records."""

    text: str
    paper: float | str | None  # the published number; else in words where the statement is, or nothing
    unit: str
    source: str  # where in the paper, and how the value was read
    kind: ClaimKind
    tolerance: float
    reason: str  # why this tolerance, and what a reader should know before comparing
    compute: Callable[..., Estimate | None]  # of frames and `arguments`: our value
    accelerator: str = ""  # the GPU that it is about, a part of its driver's name for it, or ANY_GPU
    link: str = ""  # what joins the workers, as in conf/link: NVLink, PCIe, ethernet_1g
    timed: bool = False  # computed from times, which virtual ranks simulate
    derived: bool = False  # put together from what several runs measured; nothing ran as a whole
    chance: float | None = None  # of an accuracy: percent of top-1 that guessing gives; by default the task's
    group: str = ""  # claims that follow from one cause are counted once
    rederived: bool = False  # computed from the authors' own logs, not from records of ours
    # For an ordering that depends on how long one trains: the step from which on it stays as it is.
    settles_at: Callable[..., Estimate | None] | None = None  # of frames and `arguments`, too
    arguments: tuple[Any, ...] = ()
    id: str = ""  # stable, short: "ends-close"; derived from the text where there is none
    answers: tuple[str, ...] = ()  # the statements of papers that it answers, by their ids
    stated: str = ""  # the paper's words, where the number in `paper` is ours for them
    revised: str = ""  # "2026-11-25: the mean of all lags, not one of them": when and how `compute` changed
    # The lasting names, in rules, of the function `compute` and of those in `arguments`, in this order; where
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
        """True if the claim has a published number."""
        return isinstance(self.paper, int | float) and not self.stated

    def band(self) -> Band:
        """Return the values of ours for which the claim holds."""
        return self._band(self.tolerance, includes_limits=self.kind != "ordering")

    def partly_band(self) -> Band:
        """Return the values for which the claim holds at least partly."""
        slack = 0.0 if self.kind == "ordering" else PARTLY * self.tolerance
        return self._band(slack, includes_limits=False)

    def _band(self, slack: float, includes_limits: bool) -> Band:
        if self.kind == "ordering":
            return Band(low=slack, includes_limits=includes_limits)
        if self.kind == "limit":
            return Band(high=slack, includes_limits=includes_limits)
        paper = self._paper_number()
        if self.kind == "ratio":
            return Band(paper / (1 + slack), paper * (1 + slack), includes_limits)
        return Band(paper - slack, paper + slack, includes_limits)

    def _paper_number(self) -> float:
        if not isinstance(self.paper, int | float):
            raise ValueError(
                f"a claim of kind {self.kind} is a band around the paper's number, and there is none: "
                f"{self.text}; give one, or take kind ordering"
            )
        return self.paper

    def rule_digest(self, declared_scale: Mapping[str, Any]) -> str:
        """Return a digest of the claim's rule.

        The rule is the quantity, its threshold and band, the hardware that it is about, and the scale at
        which a number can be compared.
        Words may be mended, causes regrouped and functions renamed without another rule: functions count by
        the names in `quantity`. Who changes what a function computes says so in `revised`.

        Args:
            declared_scale: what the paper ran, see `analysis.evidence.describe_scale_differences`.
        """
        names = iter([self.quantity] if isinstance(self.quantity, str) else self.quantity)
        parts = {
            "quantity": _to_rule_json(self.compute, names),
            "of": _to_rule_json(self.arguments, names),
            "unit": self.unit,
            "kind": self.kind,
            "tolerance": self.tolerance,
            "paper": self.paper if isinstance(self.paper, int | float) else None,
            "accelerator": self.accelerator,
            "link": self.link,
            "timed": self.timed,
        }
        if self.revised:
            parts["revised"] = self.revised
        if declared_scale and self.kind in NUMBER_KINDS:
            parts["scale"] = _to_rule_json(declared_scale, names)
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
    horizon: str = ""  # the number of steps that the ordering needs
    num_launches: int | None = None  # of a time: groups of processes that were started
    num_occasions: int | None = None  # on which they were begun
    link_asked_gbit_s: float | None = None  # Gbit/s of an emulated link
    link_farthest_gbit_s: float | None = None  # found, farthest from what was asked
    link_median_gbit_s: float | None = None  # of those found
    is_rule_registered: bool | None = None  # was the rule there before the runs? None: there are none
    chance_percent: float | None = None  # of an accuracy: percent of top-1 that guessing gives
    rule_digest: str = ""  # the digest of its rule
    # The word if no other claim were tested, if testing all together leaves another (analysis.significance).
    overruled_word: VerdictWord | None = None

    @property
    def word_alone(self) -> VerdictWord:
        """The word if no other claim were tested."""
        return self.overruled_word or self.word

    @property
    def p_value_or_one(self) -> float:
        """The p-value of the hypothesis that a limit of its band is the truth; 1 if undecided."""
        if self.word_alone not in DECISIVE or self.ours is None:
            return 1.0
        is_wide = self.claim.is_published and self.word_alone in (
            "partly",
            "not reproduced",
            "other direction",
        )
        band = self.claim.partly_band() if is_wide else self.claim.band()
        return band.largest_p_value_of_limits(self.ours)

    @property
    def explanation(self) -> str:
        """All that must be read with the word: n, the reason, the horizon."""
        parts = []
        if self.word == "indicated" and self.num_launches is None:
            assert self.ours is not None, "what is indicated was measured"
            parts.append(f"n = {self.ours.n}")
        if self.word in ("not comparable", "inconclusive", "indicated", "post hoc"):
            parts.append(self.reason)
        if self.word not in UNDECIDED:
            parts.append(self.horizon)
        return "; ".join(filter(None, parts))


def judge_claims(
    claims: Iterable[Claim],
    frames: Frames,
    declared_scale: Mapping[str, Any],
    chance_of_task: ChanceLookup = no_chance_level,
) -> list[Verdict]:
    """Return a verdict on every claim.

    Args:
        frames: of the item's runs only.
        declared_scale: what the paper ran, see `analysis.evidence.describe_scale_differences`.
        chance_of_task: the accuracy that guessing gives, by the name of a task.
    """
    return [
        replace(
            _judge_claim(claim, frames, declared_scale, chance_of_task),
            rule_digest=claim.rule_digest(declared_scale),
        )
        for claim in claims
    ]


def _to_rule_json(part: Any, names: Iterator[Any]) -> Any:
    """Return a part of a rule as JSON, functions by the next of these names or by their own."""
    name = next(names, None) if callable(part) else None
    if name is not None:
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


def _judge_claim(
    claim: Claim, frames: Frames, declared_scale: Mapping[str, Any], chance_of_task: ChanceLookup
) -> Verdict:
    ours = None
    mixture = ""
    with track_read_run_keys() as keys:
        try:
            ours = claim.compute(frames, *claim.arguments)
        except IncomparableRunsError as error:
            mixture = str(error)
    evidence = ClaimEvidence.from_read_keys(frames, keys)
    times = evidence.prefer_process_runs() if claim.derived else evidence
    was_measured = bool(keys or ours)
    link = times.link_text() if was_measured else describe_link(claim.link)
    claim = replace(claim, text=claim.text.replace(LINK_PLACEHOLDER, link))
    if claim.rederived:
        verdict = Verdict(claim, ours, "not run", scale="", reason="")
    else:
        reduced = describe_scale_differences(evidence.frames, declared_scale)
        scale = "; ".join(filter(None, (reduced, *_measurement_kinds(claim, times))))
        verdict = Verdict(claim, ours, "not run", scale, reason="")
    if mixture:
        return replace(verdict, word="not comparable", reason=mixture)
    if ours is None:
        return replace(verdict, reason="no records of it")
    if not claim.rederived:
        level = claim.chance
        chance_of_claimed_task = chance_of_task if level is None else lambda task: level
        if len(evidence.frames.runs):
            is_registered = evidence.has_rule_registered(claim.id, claim.rule_digest(declared_scale))
            facts = _verdict_facts(claim, times, chance_of_claimed_task)
            verdict = replace(verdict, is_rule_registered=is_registered, **facts)
        why = _incomparable_reason(claim, times, reduced, chance_of_claimed_task)
        if why:
            return replace(verdict, word="not comparable", reason=why)
    verdict = replace(verdict, horizon=_horizon_text(claim, evidence.frames))
    if verdict.is_rule_registered is False:
        why = f"the rule is younger than the runs; {_side_text(claim, ours.value)}"
        return replace(verdict, word="post hoc", reason=why)
    why = _indicated_reason(verdict, ours)
    if why:
        return replace(verdict, word="indicated", reason=why)
    word, why = _decisive_word(claim, ours)
    return replace(verdict, word=word, reason=why)


def _measurement_kinds(claim: Claim, evidence: ClaimEvidence) -> list[str]:
    """Return what else than the scale tells these numbers from a measurement of the real thing."""
    is_kind = {
        SIMULATED: claim.timed and evidence.has_simulated_times,
        EMULATED: claim.timed and evidence.has_emulated_links,
        DERIVED: claim.derived,
    }
    return [kind for kind, is_so in is_kind.items() if is_so]


def _verdict_facts(claim: Claim, evidence: ClaimEvidence, chance_of_task: ChanceLookup) -> dict[str, Any]:
    """Return the fields of a verdict that tell what its records are."""
    if not claim.timed:
        return {"chance_percent": evidence.common_chance_percent(chance_of_task) or None}
    return {
        "num_launches": len(evidence.launches),
        "num_occasions": evidence.num_occasions,
        "link_asked_gbit_s": evidence.link_asked_gbit_s,
        "link_farthest_gbit_s": evidence.link_farthest_gbit_s,
        "link_median_gbit_s": statistics.median(evidence.links_found_gbit_s or [math.nan]),
    }


def _incomparable_reason(
    claim: Claim, evidence: ClaimEvidence, scale: str, chance_of_task: ChanceLookup
) -> str:
    """Return the reason why these records cannot judge the claim; empty where they can."""
    frames = evidence.frames
    required = describe_required_hardware(claim)
    names_hardware = claim.link or claim.accelerator not in ("", ANY_GPU)
    driver_name = "" if claim.accelerator == ANY_GPU else claim.accelerator
    if claim.accelerator and not captions.is_entirely_on_gpu(frames, driver_name):
        hardware = captions.join_with_and(captions.distinct_values(frames, "provenance.gpu") or ["a CPU"])
        return f"about {required}; measured on {hardware}"
    if names_hardware and claim.timed and evidence.has_simulated_times:
        return f"about {required}; these times are simulated"
    # An emulated link is told by what was found, in the claim's own words.
    if (
        claim.link
        and not evidence.has_emulated_links
        and not captions.is_entirely_over_link(frames, claim.link)
    ):
        if captions.distinct_values(frames, LINK_COLUMN) == [claim.link.lower()]:
            return f"about {required}; the machine is not the one that was named"
        links = captions.join_distinct_values(frames, LINK_COLUMN, describe_link)
        return f"about {required}; measured over {links}"
    if claim.kind in NUMBER_KINDS and scale:
        return "about the paper's scale, and this one is reduced"
    return "" if claim.timed else evidence.training_at_chance_text(chance_of_task)


def describe_required_hardware(claim: Claim) -> str:
    """Return the machine that a claim is about: 'A100 and NVLink'; empty where it is about any."""
    accelerator = "GPUs" if claim.accelerator == ANY_GPU else claim.accelerator
    return " and ".join(filter(None, (accelerator, describe_link(claim.link))))


def _decisive_word(claim: Claim, ours: Estimate) -> tuple[VerdictWord, str]:
    """Return the word by the value alone, and why."""
    if math.isnan(ours.value):
        return "inconclusive", "a run diverged: it has no number"
    band = claim.band()
    position = band.interval_position(ours)
    reason = band.interval_position_text(ours, claim.unit)
    if position == "across a limit":
        return "inconclusive", reason
    is_inside = position == "inside"
    if claim.rederived and is_inside:
        return ("recomputed" if ours.sample_kind == PRINTED else "re-derived"), reason
    if not claim.is_published:
        return ("holds" if is_inside else "does not hold"), reason
    if claim.rederived:
        return "corrected", reason
    if not is_inside and claim.partly_band().interval_position(ours) == "inside":
        return "partly", f"the interval lies within {format_number(PARTLY)} times the tolerance"
    if claim.kind == "ordering":
        return ("same direction" if is_inside else "other direction"), reason
    return ("reproduced" if is_inside else "not reproduced"), reason


def _indicated_reason(verdict: Verdict, ours: Estimate) -> str:
    """Return why the value decides nothing yet, and on which side it lies; empty where it may decide."""
    claim = verdict.claim
    if math.isnan(ours.value):
        return ""  # a run diverged: more of them would not help
    side = _side_text(claim, ours.value)
    if claim.timed and verdict.num_launches is not None and verdict.num_launches < ENOUGH_SAMPLES[LAUNCHES]:
        return f"{format_count(verdict.num_launches, LAUNCHES)}; {side}"
    if claim.timed and verdict.num_occasions is not None and verdict.num_occasions < ENOUGH_OCCASIONS:
        return f"all launches on one occasion; {side}"
    return "" if ours.can_support_verdict else side


def _side_text(claim: Claim, value: float) -> str:
    is_inside = claim.band().contains(value)
    if claim.kind == "ordering":
        return "in this direction" if is_inside else "not in this direction"
    return "within the band" if is_inside else "outside the band"


def _horizon_text(claim: Claim, frames: Frames) -> str:
    """Return the step from which on the ordering stays so, of how many."""
    step = claim.settles_at(frames, *claim.arguments) if claim.settles_at else None
    if step is None:
        return ""
    if math.isinf(step.value):
        return "not so at the end of every run"
    steps = captions.join_distinct_values(frames, "steps_total", format_number)
    return f"so from step {format_number(round(step.value))} of {steps} on"
