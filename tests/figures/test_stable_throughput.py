"""stable-throughput: steps to a common loss times simulated steps, and predictions without computing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Verdict
from analysis.records.configs import variant_configs
from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments import figures
from experiments.figures import _large as large
from experiments.figures import _predicted
from experiments.figures import zhang_stable_throughput as item
from experiments.figures._predicted import Work
from experiments.figures.runs import configs_of
from tests.conftest import there

TASK = "berttiny_ptb64"
ELEMENTS = 10_000_000  # of task=vector
STEP_S = {"dense": 0.4, "topk": 0.25, "oktopk": 0.2, "stable_topk": 0.15}
SELECT_S = {"dense": 0.0, "topk": 0.03, "oktopk": 0.06, "stable_topk": 0.01}
FALLS = {"dense": 0.50, "topk": 0.40, "oktopk": 0.35, "stable_topk": 0.40}  # of the loss, in an epoch
EPOCHS, EVERY = 10, 25
SEEDS = (0, 1, 2)
Numbers = dict[str, float]


def frames(
    step_s: Numbers | None = None, select_s: Numbers | None = None, falls: Numbers | None = None
) -> Frames:
    """Trainings of a small model, its steps in turns on virtual workers, and vectors of two processes."""
    rows, steps, epochs = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    turns = {
        "group": "g", "alternate.block_steps": 2, "alternate.limit_min": 3, "alternated.half_width": 0.01,
        "alternated.stopped": "half-width", "timing.mode": "serialised", "train.validate": "never", "seed": 0,
    }  # fmt: skip
    shared = {"timing.warmup_steps": 1, "provenance_json": json.dumps({}), "task.batch_size": 4}
    virtual = {
        "workers": 4, "cluster.where": "virtual", "simulated": True, "task.name": TASK,
        "cluster.link.name": "ethernet_1g",
    }  # fmt: skip
    local = {"workers": 2, "cluster.where": "local", "simulated": False, "task.name": "vector"}
    local |= {"task.elements": ELEMENTS, "cluster.link.name": "loopback"}
    for name in STEP_S:
        fall = (falls or {}).get(name, FALLS[name])
        for seed in SEEDS:
            key = f"{name}-{seed}"
            rows.append(shared | virtual | {
                "key": key, "run_id": key, "method.name": name, "seed": seed, "train.validate": "epoch",
                "timing.mode": "production", "steps_total": EPOCHS * EVERY,
            })  # fmt: skip
            epochs += [
                {"key": key, "epoch": epoch, "step": epoch * EVERY, "train_loss": 9 - fall * epoch}
                for epoch in range(1, EPOCHS + 1)
            ]
        took = {
            "step": (step_s or {}).get(name, STEP_S[name]),
            "select": (select_s or {}).get(name, SELECT_S[name]),
        }
        for kind, of_kind in (("step", virtual), ("select", local)):
            key = f"{name}-{kind}"
            rows.append(
                shared | of_kind | turns | {"key": key, "run_id": kind, "variant": name, "method.name": name}
            )
            for step in range(66):
                parts = {"forward_s": 0.001} | ({"select_s": took["select"]} if kind == "select" else {})
                steps.append({
                    "key": key, "rank": 0, "step": step, "epoch": 0, "block": step // 2,
                    "step_s": took[kind] + 0.001 * (kind == "select"), **parts,
                })  # fmt: skip
    return empty()._replace(
        runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)),
        epochs=typed("epochs", pd.DataFrame(epochs)),
    )  # fmt: skip


def verdict(begin: str, of: Frames) -> Verdict:
    found = [each for each in figures.judge("stable-throughput", of) if each.claim.text.startswith(begin)]
    return found[0]


@pytest.mark.parametrize("profile", ["smoke", "laptop", "paper"])
def test_what_is_trained_takes_turns_as_well_and_so_does_a_vector(profile: str) -> None:
    configs = configs_of("stable-throughput", profile)
    turns = [config for config in configs if config["variants"]]
    trained = {config["task"]["name"] for config in configs if not config["variants"]}
    assert {config["task"]["name"] for config in turns} == trained | {"vector"}
    for config in turns:
        assert list(variant_configs(config)) == list(large.LOOKS)
    for config in configs:
        if config["task"]["name"] in trained:
            assert config["cluster"]["where"] == "virtual"


def test_time_to_the_loss_that_all_reach_is_steps_times_a_step() -> None:
    given = frames()
    assert item.level(given, TASK) == pytest.approx(9 - EPOCHS * min(FALLS.values()))
    # 3.5 below the start: dense after 7 epochs, Stable Top-K after 9.
    value = there(item.times_as_soon(given, TASK, "stable_topk", "dense"))
    assert value.value == pytest.approx(7 * STEP_S["dense"] / (9 * STEP_S["stable_topk"]))


@pytest.mark.parametrize(
    ("begin", "turned"),
    [
        ("a step of Stable Top-K is shorter", {"step_s": {"stable_topk": 0.3}}),
        ("Stable Top-K is down to the same loss before dense", {"step_s": {"dense": 0.01}}),
        ("Stable Top-K is down to the same loss before Ok-Topk", {"falls": {"stable_topk": 0.05}}),
        ("Ok-Topk adds more to computing", {"select_s": {"stable_topk": 0.5}}),
    ],
)
def test_an_ordering_is_indicated_at_most_and_turns_round(begin: str, turned: dict[str, Numbers]) -> None:
    here, there = verdict(begin, frames()), verdict(begin, frames(**turned))
    assert {here.word, there.word} == {"indicated"}
    assert here.reason.endswith("; in this direction")
    assert there.reason.endswith("; not in this direction")


def test_hours_of_large_models_are_not_comparable() -> None:
    found = [each for each in figures.judge("stable-throughput", frames()) if "hours" in each.claim.text]
    assert found[0].claim.paper == pytest.approx(84.3 / 41.8, abs=0.01)
    assert {each.word for each in found if each.ours is not None} == {"not comparable"}


def test_all_that_is_claimed_of_times_says_that_it_is_simulated() -> None:
    assert all("simulated" in claim.text for claim in item.claims() if claim.timed)
    assert {each.word for each in figures.judge("stable-throughput", empty())} == {"not run"}


def test_the_computing_that_gives_a_ratio_gives_it() -> None:
    parts = {"dense": Work(0.0, 0.1), "stable_topk": Work(0.0, 0.2)}
    link, elements = large.LINKS["10 Gbit/s"], 345_000_000
    dense, own = (large.added_s(parts, each, elements, link) for each in parts)
    seconds = there(large.computing_for(2.02, dense, own))
    again = large.speedup(parts, "stable_topk", elements, link, np.array([seconds]))
    assert again[0] == pytest.approx(2.02)
    assert large.computing_for(2.02, 0.1, 0.2) is None


def test_stable_top_k_sends_values_without_indices() -> None:
    link, n, size = _predicted.ethernet(10), 1_000_000, 8
    sent = 4 * 2 * 10_000 * (size - 1) // size
    assert _predicted.exchange_s("stable_topk", n, 0.01, size, link) == pytest.approx(
        6 * _predicted.ALPHA_S + sent * 8e-10
    )


def test_it_is_drawn_and_told_as_simulated() -> None:
    gains, curves, predicted = item.draw(frames(), "laptop").axes
    assert gains.has_data()
    assert "simulated" in gains.get_ylabel()
    assert "simulated" in curves.get_xlabel()
    assert len(predicted.lines) == 2 * (len(STEP_S) - 1) + 2  # two links, and what was published of two
    assert "*Simulated*" in figures.caption("stable-throughput", frames(), "laptop")
    assert all("simulated" in table.title for table in figures.tables("stable-throughput", frames()))
