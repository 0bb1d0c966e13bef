"""What a verdict rests on: launches, occasions, links, registered rules, chance; and what is not counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Claim, Verdict, _word, judge
from analysis.evidence import Evidence, links_found
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, empty, reading, reads, remembered
from analysis.records.store import Store
from analysis.stats import POSITIVE, Value, over_launches
from analysis.verdicts import paper_text
from tests.analysis import synthetic
from tests.conftest import there


def runs(*rows: dict[str, Any]) -> Frames:
    keyed = [{"key": f"k{at}", "group": None, **row} for at, row in enumerate(rows)]
    return empty()._replace(runs=pd.DataFrame(keyed))


def timed(minutes: Sequence[float], **more: Any) -> Frames:
    """Launches of two variants each, begun so many minutes after noon."""
    noon = pd.Timestamp("2026-01-01T12:00:00Z")
    return runs(*(
        {"key": f"{at}/{name}", "group": str(at), "started": (noon + pd.Timedelta(minutes=late)).isoformat(),
         "cluster.where": "local", **more}
        for at, late in enumerate(minutes)
        for name in ("dense", "topk")
    ))  # fmt: skip


def on(frames: Frames, ours: Value | None = None, **more: Any) -> Verdict:
    value = ours or Value(2.0, 1.9, 2.1, 5, "launches")
    stated: dict[str, Any] = {
        "unit": "x",
        "source": "source",
        "kind": "ordering",
        "tolerance": 1.0,
        "reason": "reason.",
    }
    claim = Claim(text="faster over {link}", paper=None, ours=lambda frames: value, **stated | more)
    return judge([claim], frames, {}, chance=lambda task: 10.0)[0]


# --- which runs


def test_what_is_read_is_noted_also_where_it_is_remembered() -> None:
    frames = runs({}, {})

    @remembered
    def first(frames: Frames) -> str:
        reads(["k0"])
        return "value"

    for _ in range(2):
        with reading() as outer:
            with reading() as inner:
                assert first(frames) == "value"
            reads(["k1"])
        assert (inner, outer) == ({"k0"}, {"k0", "k1"})
    reads(["k0"])  # nobody asks


# --- launches and occasions


def test_variants_of_one_group_of_processes_are_one_launch() -> None:
    evidence = Evidence(timed([0, 1, 2]))
    assert (len(evidence.launches), evidence.occasions) == (3, 1)


@pytest.mark.parametrize(
    ("minutes", "occasions"),
    [([0, 1, 29], 1), ([0, 1, 30], 2), ([0, 20, 40, 50, 69], 2), ([0, 20, 40, 50, 70], 3), ([61, 0, 31], 3)],
)
def test_an_occasion_lasts_half_an_hour(minutes: list[float], occasions: int) -> None:
    assert Evidence(timed(minutes)).occasions == occasions


def test_a_time_is_decided_by_five_launches_on_two_occasions() -> None:
    enough = timed([0, 1, 2, 40, 41])
    told = on(enough, timed=True)
    assert (told.word, told.launches, told.occasions) == ("holds", 5, 2)
    for minutes, why in (
        ([0, 1, 2, 40], "4 launches; "),
        ([0, 1, 2, 3, 4], "all launches on one occasion; "),
    ):
        few = on(timed(minutes), timed=True)
        assert (few.word, few.reason) == ("indicated", f"{why}in this direction")
    assert on(enough, Value(2.0, 1.9, 2.1, 400, "blocks"), timed=True).word == "indicated"


# Standard deviations of log ratios, between launches and between the blocks of one: as the records show them
# (three launches of torch.topk over fused: 19.84, 14.46, 16.86; step ratios), and none.
SPREADS = {"selection": (0.16, 0.18), "steps": (0.03, 0.08), "none": (0.0, 0.05)}


def drawn(between: float, within: float, at_random: np.random.Generator, n: int = 5) -> pd.Series[float]:
    """Ratios whose truth is 1, of 12 blocks in each of n launches."""
    logs = between * at_random.standard_normal((n, 1)) + within * at_random.standard_normal((n, 12))
    index = pd.MultiIndex.from_product([range(n), range(12)])
    return pd.Series(np.exp(logs).ravel(), index)


@pytest.mark.parametrize("spread", SPREADS)
def test_the_interval_over_launches_covers_the_truth_as_often_as_it_says(spread: str) -> None:
    at_random, draws = np.random.default_rng(7), 3000
    found = [over_launches(drawn(*SPREADS[spread], at_random), POSITIVE) for _ in range(draws)]
    assert {(value.n, value.of) for value in found} == {(5, "launches")}
    share = np.mean([there(value.low) <= 1.0 <= there(value.high) for value in found])
    assert 0.93 <= share <= 0.97


def test_the_interval_over_blocks_of_one_launch_covers_it_half_as_often() -> None:
    """Which is why it decides nothing."""
    at_random = np.random.default_rng(7)
    found = [over_launches(drawn(*SPREADS["selection"], at_random, n=1), POSITIVE) for _ in range(300)]
    assert {value.of for value in found} == {"blocks"}
    assert np.mean([there(value.low) <= 1.0 <= there(value.high) for value in found]) < 0.6


@pytest.mark.parametrize("spread", SPREADS)
def test_where_there_is_no_effect_few_words_say_that_there_is_one(spread: str) -> None:
    at_random, draws = np.random.default_rng(8), 6000  # of which 2.5 % give or take 0.2 % are expected
    longer = claim(kind="ordering", paper=None, tolerance=1.0)
    words = [
        _word(longer, over_launches(drawn(*SPREADS[spread], at_random), POSITIVE))[0] for _ in range(draws)
    ]
    assert words.count("holds") <= 0.03 * draws
    assert words.count("inconclusive") >= 0.93 * draws


# --- links


def over(asked: float, found: float | None) -> Frames:
    link = {"cluster.link.beta_s_per_byte": 8e-9 / asked, "provenance.machine.link.together_gbit_s": found}
    return timed([0, 1, 2, 40, 41], **{**link, "cluster.where": "netns"})


@pytest.mark.parametrize(
    ("asked", "found", "text"),
    [
        (1.0, 0.95, "faster over 1 Gbit/s"), (1.0, 0.861, "faster over 0.86 Gbit/s (asked: 1)"),
        (10.0, 2.5, "faster over 2.5 Gbit/s (asked: 10)"), (1.0, None, "faster over 1 Gbit/s (asked)"),
    ],
)  # fmt: skip
def test_a_claim_about_a_link_is_worded_by_what_was_found(
    asked: float, found: float | None, text: str
) -> None:
    told = on(over(asked, found), timed=True, link="ethernet_1g")
    assert (told.word, told.claim.text, told.scale) == ("holds", text, "emulated link")
    assert there(told.link_asked) == pytest.approx(asked)
    assert told.link_found == found


def test_a_title_tells_what_was_found_where_that_is_not_what_was_asked_for() -> None:
    off, as_asked = over(10.0, 2.5), over(1.0, 0.95)
    assert links_found(off) == "2.5 Gbit/s (asked: 10)"
    both = off._replace(runs=pd.concat([off.runs, as_asked.runs]))
    assert links_found(both) == "2.5 Gbit/s (asked: 10)"
    assert links_found(as_asked) == links_found(empty()) == ""


def test_of_links_that_differ_all_are_told_and_the_farthest_counts() -> None:
    frames = over(1.0, 0.97)
    frames.runs["provenance.machine.link.together_gbit_s"] = np.repeat([0.942, 0.923, 0.583, 0.942, 0.942], 2)
    told = on(frames, timed=True, link="ethernet_1g")
    assert told.claim.text == "faster over 0.58 to 0.94 Gbit/s (asked: 1)"
    assert told.link_found == 0.583


# --- rules


RULE: dict[str, Any] = {"unit": "x", "source": "source", "reason": "reason."}


def ratio(frames: Frames, of: str = "topk") -> Value:
    return Value(2.0, 1.9, 2.1, 3)


def claim(**more: Any) -> Claim:
    fields = {"text": "text", "paper": 2.0, "kind": "shape", "tolerance": 0.5, "ours": ratio, "id": "a.b"}
    return Claim(**RULE | fields | more)


@pytest.mark.parametrize(
    "other",
    [{"tolerance": 0.6}, {"paper": 2.1}, {"kind": "ordering"}, {"unit": "ms"}, {"of": ("dense",)},
     {"ours": lambda frames: ratio(frames)}, {"link": "ethernet_1g"}, {"accelerator": "A100"},
     {"timed": True}, {"revised": "2026-11-25: of all"}, {"chance": 0.0}],
)  # fmt: skip
def test_what_decides_is_in_the_rule(other: dict[str, Any]) -> None:
    assert claim(**other).rule({}) != claim().rule({})


def test_what_a_paper_says_in_words_holds_and_is_not_reproduced() -> None:
    said, number = claim(stated="about twice"), claim()
    assert said.rule({}) == number.rule({})
    assert [_word(each, ratio(empty()))[0] for each in (said, number)] == ["holds", "reproduced"]
    assert paper_text(said) == "about twice"


def test_the_scale_is_in_the_rule_of_a_number_alone() -> None:
    scale = {"workers": 8}
    assert claim(kind="ratio").rule(scale) != claim(kind="ratio").rule({})
    assert claim().rule(scale) == claim().rule({})


def test_words_are_not_in_the_rule() -> None:
    assert claim(text="mended", reason="Mended.", group="cause", source="elsewhere").rule({}) == claim().rule(
        {}
    )


@pytest.mark.registering
@pytest.mark.parametrize(
    ("rules", "word", "registered"),
    [
        ([{"a.b": "RULE"}, {"a.b": "RULE"}], "reproduced", True),
        ([{"a.b": "RULE"}, {"a.b": "other"}], "post hoc", False),
        ([{"a.b": "RULE"}, {"a.c": "RULE"}], "post hoc", False),
        ([{"a.b": "RULE"}, None], "post hoc", False),
    ],
)
def test_a_rule_that_is_younger_than_one_of_the_runs_decides_nothing(
    rules: list[dict[str, str] | None], word: str, registered: bool
) -> None:
    texts = [rule and json.dumps(rule).replace("RULE", claim().rule({})) for rule in rules]
    (told,) = judge([claim()], runs(*({"rules_json": text} for text in texts)), {})
    assert (told.word, told.registered) == (word, registered)
    if not registered:
        assert told.because == "the rule is younger than the runs; within the band"


@pytest.mark.registering
def test_a_run_stores_the_rules_that_were_there_when_it_began(tmp_path: Path) -> None:
    store = Store(tmp_path)
    attempt = synthetic.timed(store, synthetic.config())
    attempt.update(rules={"a.b": claim().rule({})})
    frames, _ = from_attempts(store.all_valid())
    assert judge([claim()], frames, {})[0].word == "reproduced"
    assert judge([claim(tolerance=0.6)], frames, {})[0].word == "post hoc"


# --- chance


@pytest.mark.parametrize(
    ("ends", "word"),
    [
        ((None, None), "holds"),
        ((40.0, 12.1), "holds"),
        ((40.0, 11.9), "not comparable"),
        ((9.8, 9.9), "not comparable"),
    ],
)
def test_a_training_that_ends_at_chance_decides_nothing(ends: tuple[float, float], word: str) -> None:
    frames = runs(*({"task.name": "cnn", "val_top1": end, "test_top1": None} for end in ends))
    told = on(frames, Value(20.0, 19.0, 21.0, 3))
    assert (told.word, told.chance) == (word, 10.0)
    if word != "holds":
        assert told.reason == f"a training ends at {min(ends)} %; guessing gives 10 %"
