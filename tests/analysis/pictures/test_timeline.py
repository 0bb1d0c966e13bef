"""The clocks of several ranks on one axis."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.pictures import timeline
from analysis.records.frames import empty_frames


def spans(*rows: tuple[int, str, float, float]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=["rank", "phase", "start_s", "duration_s"])
    of_one: pd.DataFrame = found.assign(key="a", step=7)
    return of_one


def test_ranks_leave_the_first_wait_of_each_step_together_whatever_their_clocks_say() -> None:
    step = spans(
        (0, "forward", 5.0, 0.1), (0, "wait", 5.1, 0.2), (0, "update", 5.3, 0.1),
        (1, "forward", 900.0, 0.3), (1, "wait", 900.3, 0.0), (1, "update", 900.3, 0.1),
    )  # fmt: skip
    later = spans((0, "forward", 6.0, 0.1), (1, "forward", 950.0, 0.3)).assign(step=8)
    drawn = timeline.spans_from_step_start_ms(pd.concat([step, later]))
    waits = drawn[drawn["phase"] == "wait"]
    assert (waits["start_ms"] + waits["took_ms"]).tolist() == pytest.approx([300.0, 300.0])
    for _, of_step in drawn.groupby("step"):
        assert of_step["start_ms"].min() == pytest.approx(0.0, abs=1e-6)
    assert drawn.loc[drawn["step"] == 8, "start_ms"].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_without_a_wait_on_every_rank_the_step_begins_together() -> None:
    drawn = timeline.spans_from_step_start_ms(
        spans((0, "forward", 5.0, 0.1), (1, "forward", 9.0, 0.3), (0, "wait", 5.1, 0.2))
    )
    assert drawn.loc[drawn["phase"] == "forward", "start_ms"].tolist() == [0.0, 0.0]


def test_a_run_without_spans_is_told_what_to_set() -> None:
    with pytest.raises(ValueError, match="span_steps"):
        timeline.spans_of_run(empty_frames(), "nothing")
