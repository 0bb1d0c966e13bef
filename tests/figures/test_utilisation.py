"""utilisation: shares of time computing, put together from steps with an exchange and without."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments.figures import survey_utilisation as item
from tests.conftest import there

COMPUTING, NBYTES = 0.5, 12_500_000  # seconds; bytes that take a second over 100 Mbit/s


def frames(launches: int = 3, delay: float = 0.05) -> Frames:
    """Launches over 100 Mbit/s and 1 Gbit/s: an exchange takes its bytes' time and four ways; SparseLoCo's a
    hundredth of the bytes, streaming's a third of them each.
    """
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for seed in range(launches):
        for gbit_s in (0.1, 1.0):
            for name, own in item.TIMED_AS.items():
                key = f"{name}-{gbit_s}-{seed}"
                rows.append({
                    "key": key, "run_id": f"{gbit_s}-{seed}", "seed": seed, "method.name": own["method"],
                    "cluster.link.beta_s_per_byte": 8e-9 / gbit_s, "cluster.link.alpha_s": delay,
                    "timing.warmup_steps": 0, "workers": 2, "method.every": own.get("method.every"),
                })  # fmt: skip
                part = {item.SPARSELOCO: 100, item.STREAMING: 3}.get(name, 1)
                for step in range(20):
                    due = {item.DENSE: True, item.STREAMING: step % 5 > 1}.get(name, step % 5 == 4)
                    exchange_s = (NBYTES / part * 8e-9 / gbit_s + 4 * delay) * due
                    steps.append({
                        "key": key, "rank": 0, "step": step, "epoch": 0, "block": 1 + step // 10,
                        "step_s": COMPUTING * (1 + 0.1 * seed) + exchange_s,
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
    assert item.arithmetic(found, item.DILOCO, 8, item.AT) == pytest.approx(COMPUTING / (COMPUTING + 1 / 8))
    assert item.arithmetic(found, item.STREAMING, 8, item.AT) == pytest.approx(
        COMPUTING / (COMPUTING + 1 / 8)
    )
    without = frames(launches=1, delay=0.0)
    exact = there(item.too_good(without, item.DILOCO, 8, (0.1, 0.0)))
    assert exact.value == pytest.approx(1.0)
    assert there(item.too_good(frames(), item.SPARSELOCO, 8, item.AT)).value > 1.03


def test_ratios_are_paired_by_launch() -> None:
    more = there(item.ratio(frames(), (item.DILOCO, 32), (item.DENSE, None), item.AT))
    assert more.n == 3
    assert more.value > 2


def test_the_bandwidth_for_a_share_lies_between_two_links_or_outside_in_words() -> None:
    found = frames(launches=1)
    assert item.bandwidth_for(found, item.DENSE, 0.99, 0.05) == "above 1"
    assert item.bandwidth_for(found, item.DILOCO, 0.5, 0.05) == "below 0.1"
    assert 0.1 < float(item.bandwidth_for(found, item.DENSE, 0.5, 0.05)) < 1
    assert item.bandwidth_for(empty(), item.DENSE, 0.5, 0.05) == "-"


def test_every_cell_and_method_has_its_rows_and_every_delay_a_panel() -> None:
    found = frames()
    rows, needed, theirs = item.table(found)
    assert len(rows.frame) == 2 * sum(len(item.asked(name)) for name in item.TIMED_AS)
    assert list(needed.frame["method"]) == [item.LOOKS[name].label for name in item.TIMED_AS]
    assert theirs.frame.set_index("method").loc["DiLoCo", "50 %"] == "1.4"
    assert [axes.get_title() for axes in item.draw(found, "laptop").axes] == ["one way 50 ms"]
