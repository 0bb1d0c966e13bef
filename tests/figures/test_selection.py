"""shi-selection: what it takes from records, and when its claims hold."""

from __future__ import annotations

from functools import partial

import pytest

from analysis.records.frames import Frames
from experiments.figures import shi2019_shi_selection as selection
from tests.conftest import there
from tests.figures import made_up
from tests.figures.made_up import TURNS, RecordBuilder, settings_of

pytestmark = pytest.mark.usefixtures("one_launch_decides")

SMALL, LARGE = 2**16, 2**20
BLOCKS = 31
# Milliseconds at the larger size; of every method a quarter of it at the smaller one.
TOOK_MS = {
    "topk": 40.0, "topk-fused": 2.0, "gaussiank": 20.0, "gaussiank-published": 10.0, "dgc": 5.0, "sidco": 8.0,
    "randomk-hash": 0.5,
}  # fmt: skip
A100 = "NVIDIA A100"
verdict = partial(made_up.verdict, "shi-selection")


def frames(changed: dict[str, float] | None = None, gpu: str | None = None, selected: float = 1.0) -> Frames:
    """Return records of one process.

    Milliseconds of single methods are `changed` at the larger size only, and `selected` is what Gaussian-k as
    published finds over k.
    """
    words = """
    method.density=0.001 task.name=vector workers=1 threads=1 cluster.where=local timing.mode=serialised
    timing.warmup_steps=1
    """
    records = RecordBuilder(TURNS, settings_of(words), {"provenance.gpu": gpu})
    for size in (SMALL, LARGE):
        took_ms = TOOK_MS | (changed or {}) if size == LARGE else TOOK_MS
        for name in TOOK_MS:
            selected_over_k = selected if name == "gaussiank-published" else 1.0
            usual_s = 1e-3 * took_ms[name] * (size / LARGE) ** 0.5
            steps = [
                {
                    "select_s": usual_s * (1 + 0.01 * (step % 7)),
                    "update_s": 0.003,
                    "density": 0.001 * selected_over_k,
                }
                for step in range(2 * BLOCKS + 2)
            ]
            settings = {
                "run_id": str(size), "group": str(size), "variant": name, "task.elements": size,
                "method.name": name.partition("-")[0],
            }  # fmt: skip
            records.add_run(f"{name}-{size}", settings, steps, block_steps=2, first_block=0)
    return records.frames()


def test_the_gain_is_that_of_selecting_alone_at_the_larger_size() -> None:
    gain = there(verdict(frames(), "fused, exact: faster").ours)
    assert (gain.value, gain.n) == pytest.approx((TOOK_MS["topk"] / TOOK_MS["topk-fused"], BLOCKS))


def test_a_claim_holds_or_not_as_times_and_elements_are() -> None:
    usual = frames()
    for begins, opposite in (
        *((f"{selection.LOOKS[name].label}: faster", frames({name: 50.0})) for name in ("dgc", "sidco")),
        ("the fused exact search", frames({"gaussiank-published": 1.0})),
        ("elements that", frames(selected=3.0)),
    ):
        assert verdict(usual, begins).word == "holds", begins
        assert verdict(opposite, begins).word == "does not hold", begins
    assert verdict(frames(selected=1.2), "elements that").word == "holds"  # a third more than k at most


def test_the_papers_statement_is_about_gpus_and_much_is_more_than_twice() -> None:
    for records, word in (
        (frames(), "not comparable"), (frames(gpu=A100), "holds"),
        (frames({"gaussiank-published": 25.0}, A100), "does not hold"),
    ):  # fmt: skip
        assert verdict(records, "Gaussian-k as published selects").word == word
