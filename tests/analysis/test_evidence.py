"""Evidence of a verdict: launches, occasions, links, registered rules, chance; and what is not counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Claim, Verdict, judge_claims
from analysis.evidence import ClaimEvidence, deviating_links_text
from analysis.records.attempts import load_attempt
from analysis.records.frames import (
    Frames,
    cache_by_frames,
    empty_frames,
    note_read_run_keys,
    track_read_run_keys,
)
from analysis.records.store import Store
from analysis.stats import POSITIVE, Estimate, estimate_mean_over_launches
from analysis.verdicts import paper_value_text
from tests.analysis import synthetic
from tests.analysis.values import interval


def runs(*rows: dict[str, Any]) -> Frames:
    keyed = [{"key": f"k{at}", "group": None, **row} for at, row in enumerate(rows)]
    return empty_frames()._replace(runs=pd.DataFrame(keyed))


def timed(minutes: Sequence[float], **more: Any) -> Frames:
    """Return launches of two variants each, begun so many minutes after noon."""
    noon = pd.Timestamp("2026-01-01T12:00:00Z")
    return runs(*(
        {"key": f"{at}/{name}", "group": str(at), "started": (noon + pd.Timedelta(minutes=late)).isoformat(),
         "cluster.where": "local", **more}
        for at, late in enumerate(minutes)
        for name in ("dense", "topk")
    ))  # fmt: skip


ENOUGH = (0, 1, 2, 40, 41)  # minutes at which enough launches begin on enough occasions


def ratio(frames: Frames, of: str = "topk") -> Estimate:
    return Estimate(2.0, 1.9, 2.1, 3)


def claim(**more: Any) -> Claim:
    stated: dict[str, Any] = {"unit": "x", "source": "source", "reason": "reason.", "id": "a.b"}
    decisive = {"text": "text", "paper": 2.0, "kind": "shape", "tolerance": 0.5, "compute": ratio}
    return Claim(**stated | decisive | more)


def on(frames: Frames, ours: Estimate | None = None, **more: Any) -> Verdict:
    """Return the verdict on a claim that something is above 1."""
    value = ours or Estimate(2.0, 1.9, 2.1, 5, "launches")
    above = claim(text="faster over {link}", paper=None, kind="ordering", tolerance=1.0, **more)
    return judge_claims(
        [replace(above, compute=lambda frames: value)], frames, {}, chance_of_task=lambda task: 10.0
    )[0]


# --- which runs


def test_what_is_read_is_noted_also_where_it_is_remembered() -> None:
    first = cache_by_frames(lambda frames: note_read_run_keys(["k0"]))
    frames = empty_frames()
    for _ in range(2):
        with track_read_run_keys() as outer:
            with track_read_run_keys() as inner:
                first(frames)
            note_read_run_keys(["k1"])
        assert (inner, outer) == ({"k0"}, {"k0", "k1"})
    note_read_run_keys(["k0"])  # nobody asks


# --- launches and occasions


def test_variants_of_one_group_of_processes_are_one_launch_and_an_occasion_lasts_half_an_hour() -> None:
    for minutes, occasions in (
        ([0, 1, 29], 1), ([0, 1, 30], 2), ([0, 20, 40, 50, 69], 2), ([0, 20, 40, 50, 70], 3), ([61, 0, 31], 3)
    ):  # fmt: skip
        evidence = ClaimEvidence(timed(minutes))
        assert (len(evidence.launches), evidence.num_occasions) == (len(minutes), occasions), minutes


def test_a_time_is_decided_by_five_launches_on_two_occasions() -> None:
    for minutes, of, word, reason in (
        (ENOUGH, "launches", "holds", "the interval lies within the band"),
        (ENOUGH[:4], "launches", "indicated", "4 launches; in this direction"),
        (range(5), "launches", "indicated", "all launches on one occasion; in this direction"),
        (ENOUGH, "blocks", "indicated", "in this direction"),
    ):
        judged = on(timed(minutes), Estimate(2.0, 1.9, 2.1, 400, of), timed=True)
        assert (judged.word, judged.reason) == (word, reason)
    assert (judged.num_launches, judged.num_occasions) == (5, 2)


# Standard deviations of log ratios, between launches and between the blocks of one: as the records show them
# (three launches of torch.topk over fused: 19.84, 14.46, 16.86; step ratios), and none.
SPREADS = {"selection": (0.16, 0.18), "steps": (0.03, 0.08), "none": (0.0, 0.05)}


def drawn(spread: str, draws: int, launches: int = 5) -> list[Estimate]:
    """Return values of ratios whose truth is 1, of 12 blocks in each launch."""
    at_random = np.random.default_rng(7)
    between, within = SPREADS[spread]
    index = pd.MultiIndex.from_product([range(launches), range(12)])
    values = []
    for _ in range(draws):
        logs = between * at_random.standard_normal((launches, 1))
        logs = logs + within * at_random.standard_normal((launches, 12))
        values.append(estimate_mean_over_launches(pd.Series(np.exp(logs).ravel(), index), POSITIVE))
    return values


def coverage(values: Sequence[Estimate]) -> float:
    return float(np.mean([low <= 1.0 <= high for low, high in map(interval, values)]))


@pytest.mark.parametrize(
    ("spread", "draws"),
    [("selection", 1000), *(pytest.param(spread, 6000, marks=pytest.mark.extended) for spread in SPREADS)],
)
def test_intervals_over_launches_cover_the_truth_and_no_effect_is_rarely_called_one(
    spread: str, draws: int
) -> None:
    values = drawn(spread, draws)
    assert {(value.n, value.sample_kind) for value in values} == {(5, "launches")}
    assert 0.93 <= coverage(values) <= 0.97
    words = [on(empty_frames(), value).word for value in values]
    assert words.count("holds") <= 0.035 * draws  # 2.5 % are expected
    assert words.count("inconclusive") >= 0.93 * draws


# --- links


def over(asked: float, *measured: float | None) -> Frames:
    """Return launches over an emulated link, and what each of them measured of it."""
    frames = timed(ENOUGH, **{"cluster.link.beta_s_per_byte": 8e-9 / asked, "cluster.where": "netns"})
    of_launches = pd.Series(measured, dtype=float).repeat(10 // len(measured))
    frames.runs["provenance.machine.link.together_gbit_s"] = of_launches.to_numpy()
    return frames


def test_a_claim_about_a_link_is_worded_by_what_was_found_the_farthest_of_all() -> None:
    for asked, measured, text in (
        (1.0, [0.95], "1 Gbit/s"),
        (1.0, [0.861], "0.86 Gbit/s (asked: 1)"),
        (10.0, [2.5], "2.5 Gbit/s (asked: 10)"),
        (1.0, [None], "1 Gbit/s (asked)"),
        (1.0, [0.942, 0.923, 0.583, 0.942, 0.942], "0.58 to 0.94 Gbit/s (asked: 1)"),
    ):
        judged = on(over(asked, *measured), timed=True, link="ethernet_1g")
        assert (judged.word, judged.claim.text, judged.scale) == (
            "holds",
            f"faster over {text}",
            "emulated link",
        )
        assert judged.link_asked_gbit_s == pytest.approx(asked)
        assert judged.link_farthest_gbit_s == measured[len(measured) // 2]


def test_a_title_tells_what_was_found_where_that_is_not_what_was_asked_for() -> None:
    off, as_asked = over(10.0, 2.5), over(1.0, 0.95)
    both = off._replace(runs=pd.concat([off.runs, as_asked.runs]))
    assert deviating_links_text(off) == deviating_links_text(both) == "2.5 Gbit/s (asked: 10)"
    assert deviating_links_text(as_asked) == deviating_links_text(empty_frames()) == ""


# --- rules


def test_what_decides_is_in_the_rule_and_words_are_not() -> None:
    rule = claim().rule_digest({})
    decisive: dict[str, Any] = {
        "tolerance": 0.6, "paper": 2.1, "kind": "ordering", "unit": "ms", "arguments": ("dense",),
        "compute": lambda frames: ratio(frames), "link": "ethernet_1g", "accelerator": "A100", "timed": True,
        "revised": "2026-11-25: of all", "chance": 0.0,
    }  # fmt: skip
    others = {claim(**{field: other}).rule_digest({}) for field, other in decisive.items()}
    assert len({rule} | others) == 1 + len(decisive)
    scale = {"workers": 8}  # in that of a number alone
    mended = claim(text="mended", reason="Mended.", group="cause", source="elsewhere", stated="about twice")
    assert mended.rule_digest({}) == claim().rule_digest(scale) == rule
    assert claim(kind="ratio").rule_digest(scale) != claim(kind="ratio").rule_digest({})


def test_what_a_paper_says_in_words_holds_and_is_not_reproduced() -> None:
    in_words = claim(stated="about twice")
    assert [verdict.word for verdict in judge_claims([in_words, claim()], empty_frames(), {})] == [
        "holds",
        "reproduced",
    ]
    assert paper_value_text(in_words) == "about twice"


@pytest.mark.registering
def test_a_rule_that_is_younger_than_one_of_the_runs_decides_nothing(tmp_path: Path) -> None:
    stored = json.dumps({"a.b": claim().rule_digest({})})
    for other in (json.dumps({"a.b": "other"}), stored.replace("a.b", "a.c"), None):
        (judged,) = judge_claims([claim()], runs({"rules_json": stored}, {"rules_json": other}), {})
        assert (judged.word, judged.is_rule_registered) == ("post hoc", False)
        assert judged.explanation == "the rule is younger than the runs; within the band"
    attempt = synthetic.timed(Store(tmp_path), synthetic.config())
    attempt.update_manifest(rules=json.loads(stored))  # as a run stores those that are there when it begins
    judged, other_rule = judge_claims([claim(), claim(tolerance=0.6)], load_attempt(attempt)[0], {})
    assert (judged.word, judged.is_rule_registered, other_rule.word) == ("reproduced", True, "post hoc")


# --- chance


def test_a_training_that_ends_at_chance_decides_nothing() -> None:
    for ends, lowest in (((None, None), ""), ((40.0, 12.1), ""), ((40.0, 11.9), "11.9"), ((9.8, 9.9), "9.8")):
        judged = on(runs(*({"task.name": "cnn", "val_top1": end} for end in ends)))
        assert (judged.word, judged.chance_percent) == ("not comparable" if lowest else "holds", 10.0)
        reason = f"a training ends at {lowest} %; guessing gives 10 %"
        assert (judged.reason == reason) == bool(lowest)
