"""shi-selection: what it takes from records, and when its claims hold."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from analysis.claims import Verdict
from analysis.records.configs import variant_configs
from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments import figures
from experiments.figures import shi2019_shi_selection as selection
from experiments.figures.runs import configs_of
from tests.conftest import there

pytestmark = pytest.mark.usefixtures("one_launch_decides")

SMALL, LARGE = 2**16, 2**20
BLOCKS = 31
# Milliseconds at the larger size; of every method a quarter of it at the smaller one.
TOOK_MS = {
    "topk": 40.0, "topk-fused": 2.0, "gaussiank": 20.0, "gaussiank-published": 10.0, "dgc": 5.0, "sidco": 8.0,
    "randomk-hash": 0.5,
}  # fmt: skip


def frames(changed: dict[str, float] | None = None, gpu: str | None = None, selected: float = 1.0) -> Frames:
    """Records of one process; milliseconds of single methods are `changed` at the larger size only, and
    `selected` is what Gaussian-k as published finds over k.
    """
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for size in (SMALL, LARGE):
        for name, usual in TOOK_MS.items():
            key = f"{name}-{size}"
            rows.append({
                "key": key, "run_id": str(size), "group": str(size), "variant": name,
                "method.name": name.partition("-")[0], "method.density": 0.001, "task.name": "vector",
                "task.elements": size, "workers": 1, "threads": 1, "cluster.where": "local",
                "simulated": False, "timing.mode": "serialised", "timing.warmup_steps": 1, "seed": 0,
                "alternate.block_steps": 2, "alternate.limit_min": 1, "alternated.half_width": 0.04,
                "alternated.stopped": "half-width", "provenance_json": json.dumps({}), "provenance.gpu": gpu,
            })  # fmt: skip
            took = (changed or {}).get(name, usual) if size == LARGE else usual / 4
            k = int(0.001 * size)
            for step in range(2 * BLOCKS + 2):
                select_s = 1e-3 * took * (1 + 0.01 * (step % 7))
                found = k * (selected if name == "gaussiank-published" else 1.0)
                steps.append({
                    "key": key, "rank": 0, "step": step, "epoch": 0, "block": step // 2,
                    "step_s": select_s + 0.003, "select_s": select_s, "update_s": 0.003,
                    "density": found / size,
                })  # fmt: skip
    return empty()._replace(runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)))


def verdict(begin: str, of: Frames) -> Verdict:
    (found,) = [
        verdict for verdict in figures.judge("shi-selection", of) if verdict.claim.text.startswith(begin)
    ]
    return found


@pytest.mark.parametrize("profile", ["smoke", "laptop", "paper"])
def test_all_methods_take_turns_against_torch_topk_at_each_size(profile: str) -> None:
    found = configs_of("shi-selection", profile)
    assert [config["task"]["elements"] for config in found] == list(selection.SIZES[profile])
    for config in found:
        assert list(variant_configs(config)) == list(selection.METHODS)
        assert next(iter(variant_configs(config))) == selection.EXACT
        assert config["workers"] == 1


def test_the_gain_is_that_of_selecting_alone_at_the_larger_size() -> None:
    gain = there(verdict("fused, exact: faster", frames()).ours)
    assert gain.value == pytest.approx(TOOK_MS["topk"] / TOOK_MS["topk-fused"])
    assert gain.n == BLOCKS


@pytest.mark.parametrize("method", [name for name in TOOK_MS if name not in ("topk", "randomk-hash")])
def test_a_method_is_faster_than_torch_topk_or_not(method: str) -> None:
    begin = f"{selection.LOOKS[method].label}: faster"
    assert verdict(begin, frames()).word == "holds"
    assert verdict(begin, frames({method: 50.0})).word == "does not hold"


def test_an_exact_search_is_faster_than_an_approximate_one_or_not() -> None:
    assert verdict("the fused exact search", frames()).word == "holds"
    assert verdict("the fused exact search", frames({"gaussiank-published": 1.0})).word == "does not hold"


def test_the_papers_statement_is_about_gpus_and_much_is_more_than_twice() -> None:
    begin = "Gaussian-k as published selects"
    assert verdict(begin, frames()).word == "not comparable"
    assert verdict(begin, frames(gpu="NVIDIA A100")).word == "holds"
    slower = frames({"gaussiank-published": 25.0}, gpu="NVIDIA A100")
    assert verdict(begin, slower).word == "does not hold"


def test_an_approximate_selection_may_find_a_third_more_than_k() -> None:
    assert verdict("elements that", frames(selected=1.2)).word == "holds"
    assert verdict("elements that", frames(selected=3.0)).word == "does not hold"


def test_it_is_drawn_with_a_line_for_each_method_and_a_column_for_each_size() -> None:
    times, gains = selection.draw(frames(), "laptop").axes
    assert len(times.get_legend_handles_labels()[1]) == len(TOOK_MS)
    assert len(gains.get_legend_handles_labels()[1]) == len(TOOK_MS) - 1
    for table in figures.tables("shi-selection", frames()):
        assert list(table.frame.columns) == ["method", f"{SMALL:,}", f"{LARGE:,}"]


def test_without_records_nothing_is_judged() -> None:
    assert {found.word for found in figures.judge("shi-selection", empty())} == {"not run"}
