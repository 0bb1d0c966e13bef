"""distance: exchanges over links with distance, beside their predictions, paired by launch."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analysis.records.configs import run_id
from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments.figures import survey_distance as item
from experiments.figures.runs import configs_of
from tests.conftest import there

DELAYS, SIZES = (0.0, 0.05), (2, 8)


def ways(how: str, size: int) -> int:
    """Of an all-reduce."""
    return 4 * (size - 1) if how == item.BACKEND else 4


def frames(launches: int = 3, off: float = 0.05, windows: float | None = None) -> Frames:
    """Launches whose exchanges take their ways and 0.01 s; predictions are off by so much. Two turns of three
    steps, and a run with the system's windows, which take so many times as long.
    """
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()

    def add(seed: int, delay: float, size: int, how: str, factor: float, own: dict[str, Any]) -> None:
        key = f"{seed}-{delay}-{size}-{how}-{own}"
        rows.append({
            "key": key, "run_id": key, "seed": seed, "method.name": "dense",
            "cluster.link.alpha_s": delay, "workers": size, "timing.warmup_steps": 0, **own,
            **({} if how == item.AUTO else {"collectives": how}),  # records leave defaults out
        })  # fmt: skip
        took = (ways(how, size) * delay + 0.01) * factor * (1 + 0.1 * seed)
        for step in range(6):
            for rank in range(2):  # who waits, and who is waited for
                steps.append({
                    "key": key, "rank": rank, "step": step, "epoch": 0, "block": 1 + step // 3,
                    "step_s": 2 * took, "wait_s": 0.25 * took * rank, "transfer_s": took * (1 - 0.25 * rank),
                    "wire_bytes": 100, "messages": 4, "predicted_s": took * (1 + off),
                })  # fmt: skip

    for seed in range(launches):
        for delay in DELAYS:
            for size in SIZES:
                for how in (item.AUTO, item.BACKEND):
                    add(seed, delay, size, how, 1.0, {})
        if windows:
            add(seed, 0.05, 8, item.AUTO, windows, {"cluster.windows": "system"})
    return empty()._replace(runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)))


def test_gloos_rings_are_compared_with_what_the_probe_found_quicker() -> None:
    found = frames()
    assert there(item.gain(found, "dense", 0.05, 8)).value == pytest.approx(
        (28 * 0.05 + 0.01) / (4 * 0.05 + 0.01)
    )
    assert there(item.gain(found, "dense", 0.05, 2)).value == pytest.approx(1.0)
    assert item.gain(found, "topk", 0.05, 8) is None
    assert item.gain(empty(), "dense", 0.05, 8) is None


@pytest.mark.parametrize("off", [0.05, -0.2])
def test_the_models_error_is_that_of_links_with_distance(off: float) -> None:
    found = frames(off=off)
    assert there(item.error(found, 0.5)).value == pytest.approx(100 * abs(off))
    near = found._replace(runs=found.runs.assign(**{"cluster.link.alpha_s": 0.001}))
    assert item.error(near, 0.5) is None


def test_windows_as_the_system_has_them_are_a_table_of_their_own() -> None:
    with_them, without = frames(windows=1.5), frames()
    titles = [table.title for table in item.table(without)]
    assert [table.title for table in item.table(with_them)] == [*titles, "TCP's windows"]
    windows = item.table(with_them)[-1].frame
    assert [(each.value, each.n) for each in windows["times as long"]] == [(pytest.approx(1.5), 3)]
    assert len(item.raised(with_them)) == len(item.raised(without))
    assert there(item.error(with_them, 0.9)).value == pytest.approx(5.0)


def test_a_row_tells_ways() -> None:
    table = item.table(frames(launches=1))[1].frame
    far = table[(table["one way"] == 50) & (table["P"] == 8)].set_index("how")
    assert dict(far["ways"]) == pytest.approx({"the quicker one": 4.2, "gloo's rings": 28.2})
    assert table["ways"][table["one way"] == 0].isna().all()


def test_every_exchange_takes_turns_and_dense_has_a_panel_for_each_number_of_workers() -> None:
    names = item.variants()
    assert {"dense", "dense-backend", "topk", "topk-backend", "oktopk"} <= set(names)
    assert names["topk-backend"] == {**names["topk"], "collectives": "backend"}
    drawn = item.draw(frames(), "laptop")
    assert [axes.get_title() for axes in drawn.axes] == ["P = 2", "P = 8"]


def test_every_cell_is_a_run_of_its_own() -> None:
    configs = configs_of("distance", "laptop")
    assert len({run_id(config) for config in configs}) == len(configs)


def test_the_longest_time_is_inside_the_picture() -> None:
    found = frames()
    longest = item.raised(found)["measured"].max()
    assert min(axes.get_ylim()[1] for axes in item.draw(found, "laptop").axes) >= longest
