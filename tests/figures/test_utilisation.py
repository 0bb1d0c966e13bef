"""utilisation: shares of time computing, put together from steps with an exchange and without."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from analysis.stats import Mixed
from experiments import figures
from experiments.figures import survey_utilisation as item
from tests.conftest import there

COMPUTING, NBYTES = 0.5, 12_500_000  # seconds; bytes that take a second over 100 Mbit/s
CHECKED = item.CHECKED["laptop"]


def frames(
    launches: int = 3, delay: float = 0.05, links: tuple[float, ...] = (0.1, 1.0), slower: float = 1.0
) -> Frames:
    """Launches over links of so many Gbit/s: an exchange takes its bytes' time and four ways; SparseLoCo's a
    hundredth of the bytes, streaming's a third of them each. Whole rounds of DiLoCo with another H, over the
    first, take so many times as long.
    """
    timed = [
        (name, own.get("method.every"), gbit_s, 1.0)
        for gbit_s in links
        for name, own in item.TIMED_AS.items()
    ]
    timed.append((item.DILOCO, CHECKED, links[0], slower))
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for seed, (name, every, gbit_s, times) in itertools.product(range(launches), timed):
        key, a_turn = f"{name}-{every}-{gbit_s}-{seed}", 2 * (every or 5)
        rows.append({
            "key": key, "run_id": f"{gbit_s}-{seed}", "seed": seed, "method.name": name,
            "cluster.link.beta_s_per_byte": 8e-9 / gbit_s, "cluster.link.alpha_s": delay,
            "timing.warmup_steps": 0, "workers": 2, "method.every": every,
        })  # fmt: skip
        part = {item.SPARSELOCO: 100, item.STREAMING: 3}.get(name, 1)
        for step in range(2 * a_turn):
            of_round = step % (every or 5)
            due = {item.DENSE: True, item.STREAMING: of_round > 1}.get(name, of_round == (every or 5) - 1)
            exchange_s = (NBYTES / part * 8e-9 / gbit_s + 4 * delay) * due
            steps.append({
                "key": key, "rank": 0, "step": step, "epoch": 0, "block": 1 + step // a_turn,
                "step_s": times * (COMPUTING * (1 + 0.1 * seed) + exchange_s),
                "wire_bytes": NBYTES / part * due,
            })  # fmt: skip
    return empty()._replace(runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)))


def test_a_share_is_what_is_computed_of_a_round() -> None:
    found = frames(launches=1)
    assert item.cells(found) == [(0.1, 0.05), (1.0, 0.05)]
    dense = there(item.share(found, item.DENSE, None, item.AT)).value
    assert dense == pytest.approx(COMPUTING / (COMPUTING + 1.2))
    for every in (1, 8, 100):
        local = there(item.share(found, item.DILOCO, every, item.AT)).value
        assert local == pytest.approx(COMPUTING / (COMPUTING + 1.2 / every))
    streaming = there(item.share(found, item.STREAMING, 8, item.AT)).value
    assert streaming == pytest.approx(COMPUTING / (COMPUTING + 3 * (1 / 3 + 0.2) / 8))


def test_arithmetic_knows_bytes_and_bandwidth_alone() -> None:
    found = frames(launches=1)
    for name in (item.DILOCO, item.STREAMING):
        expected = {0: pytest.approx(COMPUTING / (COMPUTING + 1 / 8))}
        assert item.arithmetic(found, name, 8, item.AT) == expected
    for name, every in ((item.DENSE, None), (item.DILOCO, 8)):
        exact = there(item.too_good(frames(delay=0.0), name, every, (0.1, 0.0)))
        assert exact[:3] == pytest.approx((1.0, 1.0, 1.0))  # of each launch's own seconds of computing
    assert there(item.too_good(frames(), item.SPARSELOCO, 8, item.AT)).value > 1.03


def test_arithmetic_and_pictures_have_the_bandwidth_that_was_found() -> None:
    own = frames(launches=1, delay=0.0)
    slow = own._replace(runs=own.runs.assign(**{item.FOUND: 0.05}))
    assert item.found_gbit_s(own, (0.1, 0.0)) == 0.1
    assert item.found_gbit_s(slow, (0.1, 0.0)) == 0.05
    checks = own.runs["method.every"] == CHECKED  # which have a probe of their own
    assert item.found_gbit_s(own._replace(runs=slow.runs[~checks]), (0.1, 0.0), 0) == 0.05
    found = item.arithmetic(slow, item.DENSE, None, (0.1, 0.0))
    assert found == {0: pytest.approx(COMPUTING / (COMPUTING + 2))}


def test_a_share_is_less_than_all_where_noise_makes_an_exchange_short() -> None:
    own = frames(launches=1)
    is_exchange = own.steps["wire_bytes"] > 0
    quick = own._replace(steps=own.steps.assign(step_s=own.steps["step_s"].mask(is_exchange, 0.1)))
    assert item.shares(quick, item.DILOCO, 8, item.AT) == {0: item.MOST}


def test_ratios_are_paired_by_launch() -> None:
    more = there(item.ratio(frames(), (item.DILOCO, 32), (item.DENSE, None), item.AT))
    assert more.n == 3
    assert more.value > 2


def test_the_bandwidth_for_a_share_lies_between_two_links_or_outside_in_words() -> None:
    found = frames(delay=0.0)
    # Dense computes for half of its time where its bytes take as long: twice 100 Mbit/s, in the first launch.
    assert item.crossings(found, item.DENSE, 50, 0.0)[0] == pytest.approx(0.2)
    between = item.bandwidth_for(found, item.DENSE, 50, 0.0)
    assert not isinstance(between, str)
    assert between.n == 3
    assert item.bandwidth_for(found, item.DENSE, 99, 0.0) == "above 1"
    assert item.bandwidth_for(found, item.DILOCO, 50, 0.0) == "below 0.1"
    assert item.bandwidth_for(empty(), item.DENSE, 50, 0.0) == "-"


def test_a_bandwidth_outside_the_links_counts_as_the_nearest() -> None:
    value = there(item.less(frames(launches=1, delay=0.0), item.DILOCO, 50, 0.0))
    assert value.value == pytest.approx(2.0)
    wide = frames(launches=1, delay=0.0, links=(0.001, 0.01, 0.1, 1.0))
    assert there(item.less(wide, item.DILOCO, 50, 0.0)).value == pytest.approx(item.AS_THEIRS)
    with pytest.raises(Mixed, match=r"no two bandwidths to compare: below 0.1 Gbit/s in 1 of 1 launches"):
        item.less(frames(launches=1, delay=0.0), item.DILOCO, 1, 0.0)
    assert item.less(empty(), item.DILOCO, 50, 0.0) is None


def test_what_composing_is_worth_is_measured_in_whole_rounds_of_another_h() -> None:
    found = frames(slower=0.8)
    assert there(item.composed(found, item.DILOCO, CHECKED, item.AT)).value == pytest.approx(1.25)
    assert item.checks(found) == [(item.DILOCO, CHECKED, item.AT)]
    for slower in (0.8, 1.25):  # too long and too short by as much
        assert there(
            item.off_by(frames(slower=slower), item.DILOCO, CHECKED, item.AT)
        ).value == pytest.approx(1.25)
    assert item.composed(found, item.SPARSELOCO, CHECKED, item.AT) is None
    # What checks it is no part of what is composed.
    assert item.shares(found, item.DILOCO, 8, item.AT) == item.shares(frames(), item.DILOCO, 8, item.AT)
    assert "1.25 [1.25, 1.25] for DiLoCo, H = 16." in str(item.facts(found)["composed"])
    assert item.facts(empty())["composed"] == ""


def test_every_profile_checks_the_h_that_it_composes() -> None:
    for profile, every in item.CHECKED.items():
        *of_cells, check = item.runs(profile)
        assert {own["method.every"] for own in check.variants.values()} == {every}
        assert check.settings["alternate.block_steps"] == every  # a turn is a round
        links = [each.settings["cluster.link.beta_s_per_byte"] for each in of_cells]
        assert check.settings["cluster.link.beta_s_per_byte"] in links


def test_half_of_the_time_answers_the_simulated_table() -> None:
    judged = {each.claim.id: each for each in figures.judge("utilisation", frames(5, 0.0))}
    verdict = judged["utilisation.diloco-less"]
    assert verdict.claim.answers == ("douillard2025.67",)
    assert there(there(verdict.ours).low) > 1
    assert judged["utilisation.too-good.dense"].word == "not run"  # which is about a link with distance
    assert {each.word for each in figures.judge("utilisation", empty())} == {"not run"}


def test_every_cell_and_method_has_its_rows_and_every_delay_a_panel() -> None:
    found = frames()
    rows, needed, theirs, less, worth = item.table(found)
    assert len(rows.frame) == 2 * sum(len(item.asked(name)) for name in item.TIMED_AS)
    assert list(needed.frame["method"]) == [item.LOOKS[name].label for name in item.TIMED_AS]
    assert theirs.frame.set_index("method").loc["DiLoCo", "50 %"] == "1.4"
    assert less.frame.set_index(["method", "measured with"]).loc[
        ("DiLoCo", "Table 4, simulated"), "50 %"
    ] == (pytest.approx(62))
    assert len(worth.frame) == 1
    assert [axes.get_title() for axes in item.draw(found, "laptop").axes] == ["one way 50 ms"]
