"""The clocks of several ranks on one axis."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.pictures import timeline
from analysis.records.frames import empty
from analysis.records.parquet import newest_frames
from analysis.records.store import Store
from tests.analysis import synthetic


def spans(*rows: tuple[int, str, float, float]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=["rank", "phase", "start_s", "duration_s"])
    of_one: pd.DataFrame = found.assign(key="a", step=7)
    return of_one


def test_ranks_leave_the_first_wait_together_whatever_their_clocks_say() -> None:
    drawn = timeline.aligned(
        spans(
            (0, "forward", 5.0, 0.1), (0, "wait", 5.1, 0.2), (0, "update", 5.3, 0.1),
            (1, "forward", 900.0, 0.3), (1, "wait", 900.3, 0.0), (1, "update", 900.3, 0.1),
        )
    )  # fmt: skip
    waits = drawn[drawn["phase"] == "wait"]
    assert (waits["start_ms"] + waits["took_ms"]).tolist() == pytest.approx([300.0, 300.0])
    assert drawn["start_ms"].min() == 0.0


def test_without_a_wait_on_every_rank_the_step_begins_together() -> None:
    drawn = timeline.aligned(spans((0, "forward", 5.0, 0.1), (1, "forward", 9.0, 0.3), (0, "wait", 5.1, 0.2)))
    assert drawn.loc[drawn["phase"] == "forward", "start_ms"].tolist() == [0.0, 0.0]


def test_every_step_is_laid_by_its_own_waits() -> None:
    first = spans((0, "wait", 5.0, 0.1), (1, "wait", 900.0, 0.1))
    later = spans((0, "forward", 6.0, 0.1), (1, "forward", 950.0, 0.3)).assign(step=8)
    drawn = timeline.aligned(pd.concat([first, later]))
    assert drawn["start_ms"].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0], abs=1e-6)


def test_the_typical_step_is_a_warm_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("runs"))
    attempt = synthetic.timed(store, synthetic.config("topk"))
    frames, _ = newest_frames(store, [attempt.run_id], store.root / "kept")
    drawn = set(frames.spans["step"])
    assert timeline.typical_step(frames, attempt.key) in drawn


def test_a_run_without_spans_is_told_what_to_set() -> None:
    with pytest.raises(ValueError, match="span_steps"):
        timeline.spans_of(empty(), "nothing")
