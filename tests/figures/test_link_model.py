"""The item link-model: predictions from counted bytes and a probed link, on invented runs."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analysis.pictures import timeline
from analysis.records.frames import Frames
from experiments import figures
from experiments.figures import survey_link_model as link_model
from experiments.figures.runs import configs_of
from sparsify.cost import Cost, Link
from tests.conftest import there

pytestmark = pytest.mark.usefixtures("one_launch_decides")

EXACT = Link(1e-4, 8.4e-9)
COMPUTING_S = 0.002  # that an exchange takes longer between two computations
BLOCKS = 30
Run = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]


def of(key: str, method: str, wire_bytes: int, messages: int, transfer_s: float) -> Run:
    """A run of two workers, one step a turn, in which worker 0 only sends and is done in half the time."""
    run = {
        "key": key, "run_id": key, "method.name": method, "method.density": 0.01, "workers": 2,
        "cluster.link.name": "ethernet_1g", "timing.warmup_steps": 0, "task.name": "vector",
        "timing.mode": "serialised", link_model.COMPUTING: COMPUTING_S,
    }  # fmt: skip
    steps, spans = [], []
    for rank in (0, 1):
        for step in range(BLOCKS + 1):
            took = transfer_s * (0.5 if rank == 0 else 1.0)
            steps.append({
                "key": key, "rank": rank, "step": step, "epoch": 1, "step_s": 2 * took, "transfer_s": took,
                "wire_bytes": wire_bytes, "messages": messages, "block": step,
                "predicted_s": EXACT.seconds(Cost(messages, wire_bytes)) * (1 - 0.1 * rank),
            })  # fmt: skip
            spans.append({
                "key": key, "rank": rank, "step": step, "phase": "transfer", "start_s": float(step),
                "duration_s": took,
            })  # fmt: skip
    return run, steps, spans


def frames(*runs: Run) -> Frames:
    tables = (
        pd.DataFrame([run for run, _, _ in runs]),
        pd.DataFrame([row for _, steps, _ in runs for row in steps]),
        pd.DataFrame([row for _, _, spans in runs for row in spans]),
    )
    return Frames(tables[0], tables[1], pd.DataFrame(), tables[2])


LARGE, SMALL = 10**6, 10**3


@pytest.fixture
def measured() -> Frames:
    seconds = [COMPUTING_S + EXACT.seconds(Cost(2, size)) for size in (LARGE, SMALL)]
    return frames(
        of("a", "dense", LARGE, 2, seconds[0]), of("b", "topk", LARGE, 2, 2 * seconds[0]),
        of("c", "topk", SMALL, 2, 5 * seconds[1]),
    )  # fmt: skip


def test_a_prediction_is_what_was_sent_on_the_link_that_was_found(measured: Frames) -> None:
    found = link_model.cases(measured)
    assert list(found["ratio"]) == pytest.approx([1.0, 0.5, 0.2])
    assert list(found["exchange"]) == ["dense: allreduce", "Top-k: allgather", "Top-k: allgather"]


def test_aims_are_of_large_messages_only(measured: Frames) -> None:
    half, most = figures.judge("link-model", measured)
    assert there(half.ours).value == pytest.approx(25.0)  # between 0 and 50 %
    assert there(half.ours).n == BLOCKS
    assert (half.word, most.word) == ("does not hold", "does not hold")
    alone = frames(of("a", "dense", LARGE, 2, COMPUTING_S + EXACT.seconds(Cost(2, LARGE))))
    assert [verdict.word for verdict in figures.judge("link-model", alone)] == ["holds", "holds"]


def test_a_sender_that_is_done_first_does_not_shorten_a_tree() -> None:
    """Two messages, the first from worker 1 to worker 0 and the second back; who sends is done at once."""
    rows = [
        {"rank": 0, "start_s": 0.0, "duration_s": 1.0}, {"rank": 0, "start_s": 1.0, "duration_s": 0.1},
        {"rank": 1, "start_s": 0.0, "duration_s": 0.1}, {"rank": 1, "start_s": 1.0, "duration_s": 1.0},
    ]  # fmt: skip
    spans = pd.DataFrame([{"key": "a", "step": 3, "phase": "transfer", **row} for row in rows])
    empty = pd.DataFrame()
    assert timeline.stretch(Frames(empty, empty, empty, spans), "a") == pytest.approx(2.0 / 1.1)


def test_runs_without_a_probe_are_left_out(measured: Frames) -> None:
    measured.steps["predicted_s"] = 0.0
    assert not len(link_model.cases(measured))
    with pytest.raises(ValueError, match="no run of this item has a probed link"):
        link_model.draw(measured, "laptop")
    assert [verdict.word for verdict in figures.judge("link-model", measured)] == ["not run"] * 2


def test_picture_tables_and_caption(measured: Frames) -> None:
    link_model.draw(measured, "laptop")
    by_exchange, by_size, every = link_model.table(measured)
    assert list(by_exchange.frame["cases"]) == [1, 1]
    assert list(by_size.frame["cases"]) == [2]
    assert len(every.frame) == 3
    assert "0.75 at P = 2" in figures.caption("link-model", measured, "laptop")
    assert "(2 ms at P = 2)" in figures.caption("link-model", measured, "laptop")


@pytest.mark.parametrize(("profile", "sizes"), [("smoke", [2]), ("laptop", [2, 4, 8])])
def test_its_runs_can_be_made(profile: str, sizes: list[int]) -> None:
    configs = configs_of("link-model", profile)
    assert [config["workers"] for config in configs] == sizes
    for config in configs:
        densities = {variant["method"].get("density") for variant in config["variants"]} - {None}
        assert profile == "smoke" or max(densities) / min(densities) == pytest.approx(1000)
