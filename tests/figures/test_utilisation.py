"""utilisation: shares of time computing, put together from steps with an exchange and without."""

from __future__ import annotations

from itertools import product

import pytest

from analysis.pictures.links import FOUND_GBIT_S_COLUMN
from analysis.records.frames import Frames, empty_frames
from analysis.stats import IncomparableRunsError
from experiments.figures import survey_utilisation as item
from tests.conftest import there
from tests.figures.made_up import RecordBuilder

COMPUTING, NBYTES = 0.5, 12_500_000  # seconds; bytes that take a second over 100 Mbit/s
CHECKED = item.CHECKED["laptop"]
AT_ONCE = item.RequestedLink(0.1, 0.0)  # Gbit/s, and a link without distance


def frames(launches: int = 3, delay: float = 0.05, slower: float = 1.0) -> Frames:
    """Return launches over links of 0.1 and 1 Gbit/s.

    An exchange takes its bytes' time and four ways; SparseLoCo's a hundredth of the bytes, streaming's a
    third of them each. Whole rounds of DiLoCo with another H, over the first, take so many times as long.
    """
    records = RecordBuilder({"cluster.link.alpha_s": delay, "workers": 2})
    timed = [
        (name, settings.get("method.every"), gbit_s, 1.0)
        for gbit_s in (0.1, 1.0)
        for name, settings in item.TIMED_AS.items()
    ]
    timed.append((item.DILOCO, CHECKED, 0.1, slower))
    for seed, (name, every, gbit_s, times) in product(range(launches), timed):
        settings = {
            "run_id": f"{gbit_s}-{seed}", "seed": seed, "method.name": name, "method.every": every,
            "cluster.link.beta_s_per_byte": 8e-9 / gbit_s,
        }  # fmt: skip
        nbytes = NBYTES / {item.SPARSELOCO: 100, item.STREAMING: 3}.get(name, 1)
        computing_s = times * COMPUTING * (1 + 0.1 * seed)
        exchange_s = times * (nbytes * 8e-9 / gbit_s + 4 * delay)
        local = {"step_s": computing_s, "wire_bytes": 0.0}
        exchanging = {"step_s": computing_s + exchange_s, "wire_bytes": nbytes}
        period = every or 5
        locals_first = {item.DENSE: 0, item.STREAMING: 2}.get(name, period - 1)
        steps = [*locals_first * [local], *(period - locals_first) * [exchanging]]
        records.add_run(f"{name}-{every}-{gbit_s}-{seed}", settings, 4 * steps, block_steps=2 * period)
    return records.frames()


def test_a_share_is_what_is_computed_of_a_round() -> None:
    records = frames(launches=1)
    assert item.measured_links(records) == [(0.1, 0.05), (1.0, 0.05)]
    for name, every, exchange_s in (
        (item.DENSE, None, 1.2), (item.DILOCO, 1, 1.2), (item.DILOCO, 100, 1.2 / 100),
        (item.STREAMING, 8, 3 * (1 / 3 + 0.2) / 8),
    ):  # fmt: skip
        share = there(item.mean_computing_share(records, name, every, item.CLAIMED)).value
        assert share == pytest.approx(COMPUTING / (COMPUTING + exchange_s))
    is_exchange = records.steps["wire_bytes"] > 0  # where noise makes one short, it is less than all
    quick = records._replace(
        steps=records.steps.assign(step_s=records.steps["step_s"].mask(is_exchange, 0.1))
    )
    assert item.computing_share_by_launch(quick, item.DILOCO, 8, item.CLAIMED).to_dict() == {0: item.MOST}


def test_arithmetic_knows_bytes_and_the_bandwidth_that_was_found() -> None:
    records = frames(launches=1)
    for name in (item.DILOCO, item.STREAMING):
        expected = {0: pytest.approx(COMPUTING / (COMPUTING + 1 / 8))}
        assert item.arithmetic_share_by_launch(records, name, 8, item.CLAIMED).to_dict() == expected
    exact = there(item.arithmetic_over_measured_share(frames(delay=0.0), item.DILOCO, 8, AT_ONCE))
    assert exact[:3] == pytest.approx((1.0, 1.0, 1.0))  # of each launch's own seconds of computing
    assert there(item.arithmetic_over_measured_share(frames(), item.SPARSELOCO, 8, item.CLAIMED)).value > 1.03
    adjacent = frames(launches=1, delay=0.0)
    assert item.found_or_requested_gbit_s_by_launch(adjacent, AT_ONCE).to_list() == [0.1]
    slow = adjacent._replace(runs=adjacent.runs.assign(**{FOUND_GBIT_S_COLUMN: 0.05}))
    assert item.found_or_requested_gbit_s_by_launch(slow, AT_ONCE).to_list() == [0.05]
    dense = item.arithmetic_share_by_launch(slow, item.DENSE, None, AT_ONCE)
    assert dense.to_dict() == {0: pytest.approx(COMPUTING / (COMPUTING + 2))}


def test_the_bandwidth_for_a_share_lies_between_two_links_or_outside_in_words() -> None:
    records = frames(delay=0.0)
    # Dense computes for half of its time where its bytes take as long: twice 100 Mbit/s, in the first launch.
    assert item.bandwidths_at_utilisation(records, item.DENSE, 50, 0.0).gbit_s[0] == pytest.approx(0.2)
    assert getattr(item.bandwidth_at_utilisation_cell(records, item.DENSE, 50, 0.0), "n", 0) == 3
    for records_of_case, name, share, text in (
        (records, item.DENSE, 99, "above 1"),
        (records, item.DILOCO, 50, "below 0.1"),
        (empty_frames(), item.DENSE, 50, "-"),
    ):
        assert item.bandwidth_at_utilisation_cell(records_of_case, name, share, 0.0) == text


def test_a_bandwidth_outside_the_links_counts_as_the_nearest() -> None:
    alone = frames(launches=1, delay=0.0)
    assert there(
        item.dense_over_method_clipped_bandwidth(alone, item.DILOCO, 50, 0.0)
    ).value == pytest.approx(2.0)
    with pytest.raises(
        IncomparableRunsError, match=r"no two bandwidths to compare: below 0.1 Gbit/s in 1 of 1 launches"
    ):
        item.dense_over_method_clipped_bandwidth(alone, item.DILOCO, 1, 0.0)


def test_what_composing_is_worth_is_measured_in_whole_rounds_of_another_h() -> None:
    for slower in (0.8, 1.25):  # too long and too short by as much
        records = frames(slower=slower)
        assert there(
            item.composed_over_measured_step(records, item.DILOCO, CHECKED, item.CLAIMED)
        ).value == pytest.approx(1 / slower)
        assert there(
            item.composing_error_factor(records, item.DILOCO, CHECKED, item.CLAIMED)
        ).value == pytest.approx(1.25)
        # What checks it is no part of what is composed.
        expected = item.computing_share_by_launch(frames(), item.DILOCO, 8, item.CLAIMED)
        assert item.computing_share_by_launch(records, item.DILOCO, 8, item.CLAIMED).equals(expected)
    assert item.composed_over_measured_step(records, item.SPARSELOCO, CHECKED, item.CLAIMED) is None
