"""The item link-model: predictions from counted bytes and a probed link, on invented runs."""

from __future__ import annotations

import pytest

from analysis.records.frames import Frames
from experiments import figures
from experiments.figures import survey_link_model as link_model
from sparsify.cost import CollectiveCost, Link
from tests.conftest import there
from tests.figures.made_up import RecordBuilder, settings_of

pytestmark = pytest.mark.usefixtures("one_launch_decides")

EXACT = Link(1e-4, 8.4e-9)
COMPUTING_S = 0.002  # that an exchange takes longer between two computations
BLOCKS = 30
LARGE, SMALL = 10**6, 10**3


def frames(*runs: tuple[str, int, float]) -> Frames:
    """Return a run of two workers for each method.

    Each is given as (method, bytes, times), where its exchange takes so many times as long as predicted: one
    step a turn, in which worker 0 only sends and is done in half the time.
    """
    words = """
    method.density=0.01 workers=2 cluster.link.name=ethernet_1g task.name=vector timing.mode=serialised
    """
    records = RecordBuilder(settings_of(words), {link_model.COMPUTING_COLUMN: COMPUTING_S})
    for method, wire_bytes, times in runs:
        exact_s = EXACT.transfer_seconds(CollectiveCost(2, wire_bytes))
        took_s = (COMPUTING_S + exact_s) * times
        ranks, spans = [], []
        for rank, own_s in enumerate((0.5 * took_s, took_s)):
            row = {
                "step_s": 2 * own_s, "transfer_s": own_s, "wire_bytes": wire_bytes, "messages": 2,
                "predicted_s": exact_s * (1 - 0.1 * rank),
            }  # fmt: skip
            ranks.append((BLOCKS + 1) * [row])
            spans += [
                {"rank": rank, "step": step, "phase": "transfer", "start_s": step, "duration_s": own_s}
                for step in range(BLOCKS + 1)
            ]
        key = f"{method}-{wire_bytes}"
        records.add_run(key, {"method.name": method}, *ranks, first_block=0, spans=spans)
    return records.frames()


@pytest.fixture
def measured() -> Frames:
    return frames(("dense", LARGE, 1), ("topk", LARGE, 2), ("topk", SMALL, 5))


def test_aims_are_of_large_messages_only(measured: Frames) -> None:
    half, most = figures.load("link-model").judge(measured)
    assert there(half.ours).value == pytest.approx(25.0)  # between 0 and 50 %
    assert there(half.ours).n == BLOCKS
    assert (half.word, most.word) == ("does not hold", "does not hold")
    alone = figures.load("link-model").judge(frames(("dense", LARGE, 1)))
    assert [verdict.word for verdict in alone] == ["holds", "holds"]
