"""time-to-accuracy: steps of trainings times what a step takes, by link."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Verdict
from analysis.records.frames import Frames, empty, runs_frame, typed
from analysis.stats import Value
from experiments import figures
from experiments.figures import _predicted
from experiments.figures import survey_time_to_accuracy as item
from experiments.figures import yoon2022_fig3_slim as slim
from experiments.figures import yoon2022_slow_links as slow_links
from experiments.figures._reaching import Reached, reached, seconds_to, sooner, steps_to
from experiments.figures.runs import configs_of, more_configs_of
from tests.conftest import there

pytestmark = pytest.mark.usefixtures("one_launch_decides")

ELEMENTS, WORKERS, EVERY = 924_186, 8, 49
COMPUTE_S, WAIT_S = 0.05, 0.4
SELECT_S = {"dense": 0.0, "topk": 0.01, "topk-denser": 0.012, "randomk": 0.002}
# % of top-1 that an epoch adds: in how many epochs 70 % are reached follows.
GAINS = {"dense": 10.0, "topk": 7.0, "topk-denser": 8.0, "randomk": 2.0}
EPOCHS = 12
SEEDS = (0, 1, 2)


def frames(select_s: float | None = None, gains: dict[str, float] | None = None) -> Frames:
    """Trainings on eight virtual workers, and steps of two processes that took turns; `select_s` is Top-k's,
    and `gains` are changed.
    """
    rows, steps, epochs = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    shared = {
        "task.name": "slimvgg_cifar10", "task.batch_size": 8, "parameters": ELEMENTS,
        "timing.warmup_steps": 1, "provenance_json": json.dumps({}), "train.validate_every": 1,
    }  # fmt: skip
    took_s = SELECT_S | ({} if select_s is None else {"topk": select_s})
    for name, gain in (GAINS | (gains or {})).items():
        of_run = shared | {
            "method.name": name.partition("-")[0],
            "method.density": None if name == "dense" else 0.01 if name == "topk-denser" else 0.001,
        }
        for seed in SEEDS:
            key = f"{name}-{seed}"
            rows.append(of_run | {
                "key": key, "run_id": key, "workers": WORKERS, "seed": seed, "cluster.where": "virtual",
                "simulated": True, "train.validate": "epoch", "timing.mode": "production",
                "steps_total": EPOCHS * EVERY,
            })  # fmt: skip
            epochs += [
                {
                    "key": key, "epoch": epoch, "step": epoch * EVERY, "val_loss": 1.0,
                    "val_top1": min(99.0, gain * epoch + 0.1 * seed),
                }
                for epoch in range(1, EPOCHS + 1)
            ]  # fmt: skip
        variant = slow_links.CURVES[name]
        rows.append(of_run | {
            "key": variant, "run_id": "timed", "group": "timed", "variant": variant, "workers": 2, "seed": 0,
            "cluster.where": "local", "simulated": False, "train.validate": "never",
            "timing.mode": "serialised", "alternate.block_steps": 2, "alternate.limit_min": 4,
            "alternated.half_width": 0.01, "alternated.stopped": "half-width",
        })  # fmt: skip
        for step in range(64):
            parts = {"forward_s": COMPUTE_S, "select_s": took_s[name], "wait_s": WAIT_S}
            steps.append({
                "key": variant, "rank": 0, "step": step, "epoch": 0, "block": step // 2,
                "step_s": sum(parts.values()), **parts,
            })  # fmt: skip
    return empty()._replace(
        runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)),
        epochs=typed("epochs", pd.DataFrame(epochs)),
    )  # fmt: skip


def on(link: str, fast: str, slow: str, of: Frames) -> Verdict:
    (found,) = [
        each for each in figures.judge("time-to-accuracy", of)
        if each.claim.text.startswith(f"{fast} has") and slow in each.claim.text and link in each.claim.text
    ]  # fmt: skip
    return found


def test_the_trainings_are_those_of_fig3_slim_and_the_emulated_step_that_of_slow_links() -> None:
    assert item.runs("laptop")[:-1] == slim.runs("laptop")
    emulated = item.more_runs("laptop")[-1]
    assert emulated in slow_links.runs("laptop")


@pytest.mark.parametrize("profile", ["smoke", "laptop", "paper"])
def test_what_takes_turns_is_the_model_that_was_trained(profile: str) -> None:
    *trained, timed = configs_of("time-to-accuracy", profile)
    assert {config["task"]["name"] for config in trained} == {timed["task"]["name"]}
    assert timed["train"]["validate"] == "never"
    assert all(config["train"]["validate"] == "epoch" for config in trained)
    assert len(more_configs_of("time-to-accuracy", profile)) >= len(trained)


def test_a_simulated_step_is_computing_selecting_and_the_exchange_of_all_workers() -> None:
    found = item.step_s(frames(), "topk")
    for link, joined in _predicted.LINKS.items():
        exchange = _predicted.exchange_s("topk", ELEMENTS, 0.001, WORKERS, joined)
        assert found[f"{link}, simulated"] == pytest.approx(COMPUTE_S + SELECT_S["topk"] + exchange)
    assert found[item.LOOPBACK] == pytest.approx(COMPUTE_S + SELECT_S["topk"] + WAIT_S)


def test_on_the_loopback_dense_is_sooner_and_what_is_simulated_decides_nothing() -> None:
    assert on(item.LOOPBACK, "dense", "Top-k", frames()).word == "holds"
    narrow = on("1 Gbit/s, simulated", "Top-k, 0.001", "dense", frames(select_s=0.001))
    assert (narrow.word, narrow.reason) == ("indicated", "in this direction")
    wide = on("NVLink 3", "dense", "Top-k", frames())
    assert (wide.word, wide.reason) == ("indicated", "in this direction")


def test_all_turn_round_where_selecting_or_training_is_otherwise() -> None:
    slow = frames(select_s=5.0)
    assert on("1 Gbit/s, simulated", "Top-k, 0.001", "dense", slow).reason == "not in this direction"
    quick = frames(select_s=0.0001, gains={"topk": 40.0})
    assert on("NVLink 3", "dense", "Top-k", quick).reason == "not in this direction"
    assert on(item.LOOPBACK, "dense", "Top-k", quick).word == "does not hold"


def test_who_never_gets_there_is_not_sooner() -> None:
    never = frames(gains={"topk": 1.0})
    found = on("1 Gbit/s, simulated", "Top-k, 0.001", "dense", never)
    assert there(found.ours).value == 0
    assert found.reason == "not in this direction"
    sooner = on(item.LOOPBACK, "dense", "Top-k", never)
    assert sooner.ours is not None
    assert (sooner.word, sooner.ours.value, sooner.ours.high) == ("holds", np.inf, np.inf)


def test_without_the_emulated_link_its_claim_is_not_run() -> None:
    words = {each.claim.text: each.word for each in figures.judge("time-to-accuracy", frames())}
    (word,) = [word for text, word in words.items() if item.EMULATED in text]
    assert word == "not run"
    assert {each.word for each in figures.judge("time-to-accuracy", empty())} == {"not run"}


def test_picture_and_table_have_each_link_and_method() -> None:
    figure = item.draw(frames(), "laptop")
    links = item.by_link(frames())
    assert list(links) == [*(f"{link}, simulated" for link in _predicted.LINKS), item.LOOPBACK]
    assert len(figure.axes) == len(links)
    assert "simulated" in figures.caption("time-to-accuracy", frames(), "laptop").lower()
    (table,) = figures.tables("time-to-accuracy", frames())
    assert len(table.frame) == len(links) * len(GAINS)
    assert list(table.frame.columns)[3:-1] == [f"{level} %" for level in (70, 80, 90)]


# --- when a curve gets somewhere
# ------------------------------------------------------------------------------------


def test_the_first_step_that_is_there_counts_and_the_one_before_is_told() -> None:
    assert reached([10, 20, 30], [50.0, 61.0, 59.0], 60) == (10, 20)
    assert reached([10, 20, 30], [3.0, 2.0, 2.5], 2.0, falls=True) == (10, 20)
    assert reached([10, 20], [5.0, 1.0], 3) == (0, 10)
    assert reached([10, 20], [1.0, 2.0], 3) == (20, np.inf)


def test_steps_are_counted_by_seed() -> None:
    found = steps_to(frames(), ["dense-0", "dense-2"], "val_top1", 70.1)
    assert found == {0: (7 * EVERY, 8 * EVERY), 2: (6 * EVERY, 7 * EVERY)}


CERTAIN = Value(2.0, 1.9, 2.1, 50, "blocks")  # of step times
NEVER = Reached(900, np.inf)


def test_ratios_are_paired_by_seed() -> None:
    slow = {0: Reached(90, 100), 1: Reached(190, 200), 2: Reached(390, 400)}
    fast = {2: Reached(190, 200), 0: Reached(45, 50), 1: Reached(95, 100)}
    value = there(sooner(slow, fast, CERTAIN))
    assert value.value == pytest.approx(4)
    assert value.n == 3
    assert sooner({0: NEVER}, {0: NEVER}, CERTAIN) is None
    assert sooner({0: NEVER}, {1: Reached(0, 10)}, CERTAIN) is None


def test_seeds_that_get_there_at_the_same_validation_are_not_certain() -> None:
    slow, fast = (dict.fromkeys(SEEDS, Reached(*ends)) for ends in ((200, 300), (100, 200)))
    value = there(sooner(slow, fast, CERTAIN))
    assert value.value == pytest.approx(3)
    assert [value.low, value.high] == pytest.approx([1.9 * 200 / 200, 2.1 * 300 / 100])
    undecided = there(sooner(slow, fast, Value(2.0)))
    assert (round(undecided.value, 9), undecided.low, undecided.n) == (3, None, 3)
    seconds = there(seconds_to(slow, 0.5))
    assert [seconds.value, seconds.low, seconds.high] == pytest.approx([150, 100, 150])


def test_who_gets_there_at_the_first_validation_may_have_done_so_at_once() -> None:
    slow, fast = (dict.fromkeys(SEEDS, Reached(*ends)) for ends in ((200, 300), (0, 100)))
    value = there(sooner(slow, fast, CERTAIN))
    assert [value.low, value.high] == pytest.approx([1.9 * 2, np.inf])


def test_who_does_not_get_there_might_have_after_the_last_validation() -> None:
    arrived, never = dict.fromkeys(SEEDS, Reached(200, 300)), dict.fromkeys(SEEDS, NEVER)
    value = there(sooner(arrived, never, CERTAIN))
    assert [value.value, value.low, value.high] == pytest.approx([0, 0, 2.1 * 300 / 900])
    value = there(sooner(never, arrived, CERTAIN))
    assert [value.value, value.low, value.high] == pytest.approx([np.inf, 1.9 * 900 / 300, np.inf])


def test_a_mean_time_needs_every_seed() -> None:
    assert seconds_to({0: Reached(5, 10), 1: NEVER}, 0.5) is None
    assert seconds_to({}, 0.5) is None
    value = there(seconds_to({0: Reached(5, 10)}, 0.5))
    assert value.value == pytest.approx(5)
    assert value.low is None
