"""distance: exchanges over links with distance, beside their predictions, paired by launch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from analysis.records.frames import Frames
from experiments.figures import survey_distance as item
from tests.conftest import there
from tests.figures.made_up import RecordBuilder


def frames(off: float = 0.05) -> Frames:
    """Return three launches whose exchanges take their ways and 0.01 s, in two turns of three steps;
    predictions are off by so much.
    """
    records = RecordBuilder({"method.name": "dense"})
    for seed, delay, size, how in product(range(3), (0.0, 0.05), (2, 8), (item.AUTO, item.BACKEND)):
        settings: dict[str, Any] = {"seed": seed, "cluster.link.alpha_s": delay, "workers": size}
        if how == item.BACKEND:
            settings["collectives"] = how  # records leave defaults out
        ways = 4 * (size - 1) if how == item.BACKEND else 4
        took = (ways * delay + 0.01) * (1 + 0.1 * seed)
        ranks = [  # who is waited for, and who waits
            {
                "step_s": 2 * took, "wait_s": wait_s, "transfer_s": took - wait_s, "messages": 4,
                "wire_bytes": 100, "predicted_s": took * (1 + off),
            }
            for wait_s in (0, 0.25 * took)
        ]  # fmt: skip
        key = f"{seed}-{delay}-{size}-{how}"
        records.add_run(key, settings, *(6 * [row] for row in ranks), block_steps=3)
    return records.frames()


def test_gloos_rings_are_compared_with_what_the_probe_found_quicker() -> None:
    far, near = (there(item.gain(frames(), "dense", 0.05, size)).value for size in (8, 2))
    assert (far, near) == pytest.approx(((28 * 0.05 + 0.01) / (4 * 0.05 + 0.01), 1.0))
    assert item.gain(frames(), "topk", 0.05, 8) is None


@pytest.mark.parametrize("off", [0.05, -0.2])
def test_the_models_error_is_that_of_links_with_distance(off: float) -> None:
    found = frames(off)
    assert there(item.error(found, 0.5)).value == pytest.approx(100 * abs(off))
    near = found._replace(runs=found.runs.assign(**{"cluster.link.alpha_s": 0.001}))
    assert item.error(near, 0.5) is None
