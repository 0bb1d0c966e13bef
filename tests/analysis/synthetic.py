"""Invented records for tests. Nothing was measured: every number here comes from a formula.

They are written through analysis.records, as a run does it, and their provenance says "synthetic", so that a
figure drawn from them cannot be taken for a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.frames import Frames
from analysis.records.log import RankLog
from analysis.records.store import Attempt, Store

MS = 1e-3
PHASES_MS = {  # method -> phase -> milliseconds
    "dense": {
        "io": 4, "forward": 110, "backward": 230, "check": 2, "transfer": 60, "scatter": 1, "update": 14
    },
    "topk": {
        "io": 4, "forward": 110, "backward": 230, "check": 2,
        "select": 150, "transfer": 5, "scatter": 3, "update": 14,
    },
    "randomk": {
        "io": 4, "forward": 110, "backward": 230, "check": 2,
        "select": 190, "transfer": 5, "scatter": 3, "update": 14,
    },
}  # fmt: skip
WAIT_MS = {"dense": 6, "topk": 18, "randomk": 8}  # of every rank except the last, for which the others wait
UNACCOUNTED_MS = 1.5
END_TOP1 = {"dense": 74.0, "topk": 62.0, "randomk": 50.0}
END_LOSS = {"dense": 0.75, "topk": 1.05, "randomk": 1.40}


def config(method: str = "dense", **changes: Any) -> dict[str, Any]:
    """A resolved config as a run stores it; `changes` replace whole top-level entries."""
    sparse = {"density": 0.001, "scope": "global", "density_warmup": [0.015625, 0.004]}
    return {
        "method": {"name": method} | ({} if method == "dense" else sparse),
        "task": {"name": "vgg16_cifar10", "batch_size": 32, "lr": 0.1, "lr_milestones": [81, 122]},
        "workers": 2,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "train": {"epochs": 138, "steps": 20, "validate": "never"},
        "timing": {"mode": "serialised", "warmup_steps": 4, "span_steps": 2},
        "cluster": {
            "name": "local", "where": "local", "gpu": "none",
            "link": {"name": "loopback", "alpha_s": 1e-5, "beta_s_per_byte": 1e-10},
        },
    } | changes  # fmt: skip


def learning_config(method: str = "dense", seed: int = 0, epochs: int = 10, **changes: Any) -> dict[str, Any]:
    """The config of a training on eight virtual ranks."""
    base = config(method)
    return (
        base
        | {
            "task": base["task"] | {"name": "cnn_cifar10", "batch_size": 16},
            "workers": 8,
            "seed": seed,
            "train": {"epochs": epochs, "steps": None, "validate": "epoch"},
            "cluster": base["cluster"] | {"name": "virtual", "where": "virtual"},
        }
        | changes
    )


def timed(store: Store, config: Mapping[str, Any], slow: float = 1.0, **provenance: Any) -> Attempt:
    """A finished run of `config`'s train.steps steps; phases take `slow` times as long as in PHASES_MS."""
    attempt, method = store.begin(config), config["method"]["name"]
    for rank in range(config["workers"]):
        clock = 100.0 * rank  # every rank has its own clock
        with RankLog(attempt.rank_path(rank)) as log:
            for step in range(config["train"]["steps"]):
                clock = _add_step(log, config, method, rank, step, clock, slow)
            log.flush()
    log.close()
    _finish(attempt, config, **provenance)
    return attempt


def alternated(
    store: Store, methods: list[str], blocks: int = 30, block_steps: int = 3, **changes: Any
) -> Attempt:
    """A finished run whose variants, named after their methods, took turns; two steps of warm-up each."""
    first = config(methods[0], **changes)
    variants = [{"name": method, "method": config(method)["method"]} for method in methods]
    turns = {"blocks": blocks, "block_steps": block_steps, "until": 0.05, "limit_min": 15}
    shared = first | {"variants": variants, "alternate": turns, "train": first["train"] | {"steps": None}}
    return in_turns(store, shared)


def made(store: Store, config: Mapping[str, Any]) -> Attempt:
    """A finished run of this config, whether variants take turns in it or not."""
    return in_turns(store, config) if config.get("variants") else timed(store, config)


def in_turns(store: Store, config: Mapping[str, Any]) -> Attempt:
    """A finished run of a config with variants; two steps of warm-up each, and the least number of turns."""
    turns, attempt = config["alternate"], store.begin(config)
    steps = 2 + turns["blocks"] * turns["block_steps"]
    for rank in range(config["workers"]):
        clock = 100.0 * rank
        with RankLog(attempt.rank_path(rank)) as log:
            for step in range(steps):
                block = 0 if step < 2 else 1 + (step - 2) // turns["block_steps"]
                for variant in config["variants"]:
                    turn = {"variant": variant["name"], "block": block}
                    method = variant["method"]["name"]
                    clock = _add_step(log, config, method, rank, step, clock, 1.0, **turn)
            log.flush()
        log.close()
    ended = {"stopped": "half-width", "half_width": 0.01, "blocks": turns["blocks"]}
    _finish(attempt, config, steps=steps, alternated=ended)
    return attempt


def learned(
    store: Store, config: Mapping[str, Any], steps_per_epoch: int = 390, **provenance: Any
) -> Attempt:
    """A finished training whose validation curves end at END_TOP1 and END_LOSS; seeds differ a little."""
    attempt, method = store.begin(config), config["method"]["name"]
    log = RankLog(attempt.rank_path(0))
    noise = np.random.default_rng(config["seed"])
    epochs = config["train"]["epochs"]
    for epoch in range(1, epochs + 1):
        done = (1 - math.exp(-4 * epoch / epochs)) / (1 - math.exp(-4))
        log.add(
            "epoch",
            epoch=epoch,
            step=epoch * steps_per_epoch,
            train_loss=2.3 - 1.4 * done,
            val_loss=2.3 - (2.3 - END_LOSS[method]) * done + 0.01 * noise.standard_normal(),
            val_top1=10 + (END_TOP1[method] - 10) * done + 0.3 * noise.standard_normal(),
            val_top5=50 + 45 * done,
            wall_s=20.0 * epoch,
            wire_bytes=58_913_064 if method == "dense" else 117_824,
            host_syncs=0,
            sent_density=1.0 if method == "dense" else 0.001,
            update_density=1.0 if method == "dense" else 0.0018,
            captured_energy=None if method == "dense" else 0.1 + 0.2 * done,
            **({"test_top1": END_TOP1[method] + noise.standard_normal()} if epoch == epochs else {}),
        )
    log.flush()
    log.close()
    _finish(attempt, config, **provenance)
    return attempt


def ended(store: Store, config: Mapping[str, Any], top1: float, loss: float) -> Attempt:
    """A finished training of two epochs that ends with this accuracy and this loss, seeds differing a
    little.
    """
    attempt = store.begin(config)
    log = RankLog(attempt.rank_path(0))
    for epoch in (1, 2):
        log.add(
            "epoch", epoch=epoch, step=100 * epoch, train_loss=loss + 2 - epoch, val_loss=loss,
            val_top1=top1 - 5 * (2 - epoch) + 0.1 * config["seed"], val_top5=99.0, wall_s=20.0 * epoch,
            wire_bytes=100, host_syncs=0, sent_density=1.0, update_density=1.0, captured_energy=None,
        )  # fmt: skip
    log.flush()
    log.close()
    _finish(attempt, config, steps=200)
    return attempt


def looked(store: Store, config: Mapping[str, Any], looks: list[dict[str, Any]]) -> Attempt:
    """A finished training that was looked at; `looks` as experiments/training/looks.py logs them."""
    attempt = store.begin(config)
    log = RankLog(attempt.rank_path(0))
    for look in looks:
        log.add("look", **look)
    log.flush()
    log.close()
    _finish(attempt, config)
    return attempt


def _add_step(
    log: RankLog,
    config: Mapping[str, Any],
    method: str,
    rank: int,
    step: int,
    clock: float,
    slow: float,
    **turn: Any,
) -> float:
    """Log one step; returns the clock after it. The last rank is late, and the others wait for it."""
    last = config["workers"] - 1
    jitter = 1 + 0.03 * math.sin(1.7 * step) + (0.5 if step < 2 else 0.0)
    phases: dict[str, float] = {}
    spans: list[tuple[str, float, float]] = []
    now, late = clock, WAIT_MS[method] * MS
    for phase, took_ms in PHASES_MS[method].items():
        took = took_ms * MS * slow * jitter
        if phase == "backward" and rank == last:
            took += late  # this is what the others wait for
        if phase == "transfer":
            wait = 0.1 * MS if rank == last else late + 0.1 * MS
            phases["wait"] = wait
            spans.append(("wait", now, wait))
            now += wait
        phases[phase] = took
        spans.append((phase, now, took))
        now += took
    now += UNACCOUNTED_MS * MS
    mode = config["timing"]["mode"]
    if mode == "production":
        phases = {phase: phases[phase] for phase in ("wait", "transfer")}
    if mode == "as_published":
        phases["synchronize"] = phases.pop("wait") + phases.pop("transfer")
    steps, with_spans = config["train"]["steps"], config["timing"]["span_steps"]
    drawn = mode == "serialised" and (with_spans is None or steps is None or steps - step <= with_spans)
    log.add(
        "step",
        step=step,
        epoch=1,
        start_s=clock,
        step_s=now - clock,
        phases=phases,
        wire_bytes=58_913_064 if method == "dense" else 117_824,
        sent_density=1.0 if method == "dense" else 0.001,
        update_density=1.0 if method == "dense" else 0.0018,
        residual_norm=0.0 if method != "topk" else 1.0 + 0.1 * step,
        loss=2.3 - 0.01 * step,
        lr=0.1,
        **({"spans": spans} if drawn else {}),
        **turn,
    )
    return now


def _finish(
    attempt: Attempt,
    config: Mapping[str, Any],
    steps: int | None = None,
    alternated: dict[str, Any] | None = None,
    **provenance: Any,
) -> None:
    facts = {
        "cpu": "synthetic CPU",
        "cores": 2,
        "gpu": None,
        "data": {"name": "synthetic", "digest": "0123456789abcdef"},
        "commit": "0" * 40,
        "dirty": None,
        "versions": {"torch": "0.0.0", "python": "3.0.0"},
        "host": "nowhere",
        "clocks_mhz": [2000, 2000],
    }
    attempt.update(
        state="ok",
        files=attempt.fingerprints(),
        steps=steps or config["train"]["steps"] or 390 * config["train"]["epochs"],
        **({"alternated": alternated} if alternated else {}),
        parameters=14_728_266,
        tensors=54,
        steps_per_epoch=49,
        simulated=config["cluster"]["where"] == "virtual",
        provenance=facts | provenance,
    )


def item_store(root: Path, seeds: int = 1) -> Store:
    """Runs for every item: timed in the modes serialised and production, and trainings with `seeds` seeds."""
    store = Store(root)
    for method in PHASES_MS:
        for mode in ("serialised", "production"):
            timed(store, config(method, timing={"mode": mode, "warmup_steps": 4, "span_steps": 2}))
        for seed in range(seeds):
            learned(store, learning_config(method, seed))
    return store


def key(frames: Frames, method: str, mode: str = "serialised", workers: int = 2) -> str:
    """The first run of this kind."""
    runs = frames.runs
    found = runs[
        (runs["method.name"] == method) & (runs["timing.mode"] == mode) & (runs["workers"] == workers)
    ]
    return str(found["key"].iloc[0])
