"""stable-throughput: steps to a common loss times simulated steps, and predictions without computing."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from analysis.records.frames import Frames
from experiments.figures import _predicted
from experiments.figures import zhang_stable_throughput as item
from tests.conftest import there
from tests.figures.made_up import TURNS, RecordBuilder, verdict

TASK = "berttiny_ptb64"
STEP_S = {"dense": 0.4, "topk": 0.25, "oktopk": 0.2, "stable_topk": 0.15}
SELECT_S = {"dense": 0.0, "topk": 0.03, "oktopk": 0.06, "stable_topk": 0.01}
FALLS = {"dense": 0.50, "topk": 0.40, "oktopk": 0.35, "stable_topk": 0.40}  # of the loss, in an epoch
EPOCHS, EVERY = 10, 25
Numbers = dict[str, float]
NO_CHANGE: Numbers = {}


def frames(step_s: Numbers = NO_CHANGE, select_s: Numbers = NO_CHANGE, falls: Numbers = NO_CHANGE) -> Frames:
    """Return trainings of a small model, its steps in turns on virtual workers, and vectors of two processes;
    with some numbers changed.
    """
    records = RecordBuilder({"timing.warmup_steps": 1, "task.batch_size": 4, "timing.mode": "serialised"})
    virtual = {
        "workers": 4, "cluster.where": "virtual", "simulated": True, "task.name": TASK,
        "cluster.link.name": "ethernet_1g",
    }  # fmt: skip
    local = {"workers": 2, "cluster.where": "local", "task.name": "vector", "task.elements": 10_000_000}
    training = virtual | {
        "train.validate": "epoch", "timing.mode": "production", "steps_total": EPOCHS * EVERY,
    }  # fmt: skip
    for name, seed in product(STEP_S, range(3)):
        fall = (FALLS | falls)[name]
        epochs = [
            {"epoch": epoch, "step": epoch * EVERY, "train_loss": 9 - fall * epoch}
            for epoch in range(1, EPOCHS + 1)
        ]
        records.add_run(f"{name}-{seed}", training | {"method.name": name, "seed": seed}, epochs=epochs)
    for name in STEP_S:
        turns = TURNS | {"group": "g", "train.validate": "never", "variant": name, "method.name": name}
        step = {"step_s": (STEP_S | step_s)[name], "forward_s": 0.001}
        selecting = {"forward_s": 0.001, "select_s": (SELECT_S | select_s)[name]}
        for settings, row in ((virtual, step), (local, selecting)):
            own = settings | turns | {"run_id": settings["task.name"]}
            key = f"{name}-{settings['task.name']}"
            records.add_run(key, own, 66 * [row], block_steps=2, first_block=0)
    return records.frames()


def test_time_to_the_loss_that_all_reach_is_steps_times_a_step() -> None:
    given = frames()
    assert item.level(given, TASK) == pytest.approx(9 - EPOCHS * min(FALLS.values()))
    # 3.5 below the start: dense after 7 epochs, Stable Top-K after 9.
    value = there(item.times_as_soon(given, TASK, "stable_topk", "dense"))
    assert value.value == pytest.approx(7 * STEP_S["dense"] / (9 * STEP_S["stable_topk"]))


def test_an_ordering_is_indicated_at_most_and_turns_round() -> None:
    usual, of = frames(), partial(verdict, "stable-throughput")
    for begins, turned in (
        ("a step of Stable Top-K is shorter", frames(step_s={"stable_topk": 0.3})),
        ("Stable Top-K is down to the same loss before dense", frames(step_s={"dense": 0.01})),
        ("Stable Top-K is down to the same loss before Ok-Topk", frames(falls={"stable_topk": 0.05})),
        ("Ok-Topk adds more to computing", frames(select_s={"stable_topk": 0.5})),
    ):
        assert {of(usual, begins).word, of(turned, begins).word} == {"indicated"}
        assert of(usual, begins).reason.endswith("; in this direction")
        assert of(turned, begins).reason.endswith("; not in this direction")


def test_stable_top_k_sends_values_without_indices() -> None:
    link, size = _predicted.ethernet(10), 8
    sent = 4 * 2 * 10_000 * (size - 1) // size
    took_s = _predicted.exchange_s("stable_topk", 1_000_000, 0.01, size, link)
    assert took_s == pytest.approx(6 * _predicted.ALPHA_S + sent * 8e-10)
