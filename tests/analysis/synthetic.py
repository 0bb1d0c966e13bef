"""Invented records for tests. Nothing was measured: every number here comes from a formula.

They are written through analysis.records, as a run does it, and their provenance says "synthetic", so that a
figure drawn from them cannot be taken for a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from analysis.records.attempts import load_valid_attempts
from analysis.records.frames import Frames, query_runs
from analysis.records.log import RankLog
from analysis.records.store import Attempt, Store

Turn = tuple[int, str, dict[str, Any]]  # a step, its method, and what else its line has
MS = 1e-3
# Milliseconds of each phase, by method.
PHASES_MS: dict[str, dict[str, float]] = yaml.safe_load("""
dense: {io: 4, forward: 110, backward: 230, check: 2, wait: 0.1, transfer: 60, scatter: 1, update: 14}
topk: {io: 4, forward: 110, backward: 230, check: 2, select: 150, wait: 0.1, transfer: 5, scatter: 3,
       update: 14}
randomk: {io: 4, forward: 110, backward: 230, check: 2, select: 190, wait: 0.1, transfer: 5, scatter: 3,
          update: 14}
""")
WAIT_MS = {"dense": 6, "topk": 18, "randomk": 8}  # of every rank except the last, for which the others wait
UNACCOUNTED_MS = 1.5
END_TOP1 = {"dense": 74.0, "topk": 62.0, "randomk": 50.0}
END_LOSS = {"dense": 0.75, "topk": 1.05, "randomk": 1.40}
SENT: dict[str, dict[str, float]] = yaml.safe_load("""
dense: {wire_bytes: 58913064, sent_density: 1.0, update_density: 1.0}
topk: &sparse {wire_bytes: 117824, sent_density: 0.001, update_density: 0.0018}
randomk: *sparse
""")
METHODS = """
dense: {name: dense}
topk: {name: topk, density: 0.001, scope: global, density_warmup: [0.015625, 0.004]}
randomk: {name: randomk, density: 0.001, scope: global, density_warmup: [0.015625, 0.004]}
"""
CONFIG = """
task: {name: vgg16_cifar10, batch_size: 32, lr: 0.1, lr_milestones: [81, 122]}
workers: 2
seed: 0
device: cpu
threads: 1
precision: fp32
train: {epochs: 138, steps: 20, validate: never}
timing: {mode: serialised, warmup_steps: 4, span_steps: 2}
cluster:
  name: local
  where: local
  gpu: none
  link: {name: loopback, alpha_s: 1.0e-5, beta_s_per_byte: 1.0e-10}
"""
MADE_ON = """
cpu: synthetic CPU
cores: 2
gpu: null
commit: "0000000000000000000000000000000000000000"
dirty: null
data: {name: synthetic, digest: 0123456789abcdef}
versions: {torch: 0.0.0, python: 3.0.0}
host: nowhere
clocks_mhz: [2000, 2000]
"""


def config(method: str = "dense", **changes: Any) -> dict[str, Any]:
    """Return a resolved config as a run stores it; `changes` replace whole top-level entries."""
    return {"method": yaml.safe_load(METHODS)[method], **yaml.safe_load(CONFIG), **changes}


def learning_config(method: str = "dense", seed: int = 0, epochs: int = 10, **changes: Any) -> dict[str, Any]:
    """Return the config of a training on eight virtual ranks."""
    base = config(method, workers=8, seed=seed)
    base["task"] |= {"name": "cnn_cifar10", "batch_size": 16}
    base["train"] = {"epochs": epochs, "steps": None, "validate": "epoch"}
    base["cluster"] |= {"name": "virtual", "where": "virtual"}
    return base | changes


def timed(store: Store, config: Mapping[str, Any], slow: float = 1.0, **provenance: Any) -> Attempt:
    """Store a finished run of train.steps steps; phases take `slow` times as long as in PHASES_MS."""
    turns: list[Turn] = [(step, config["method"]["name"], {}) for step in range(config["train"]["steps"])]
    return _stepped(store, config, turns, slow, **provenance)


def alternated(
    store: Store, methods: list[str], blocks: int = 30, block_steps: int = 3, **changes: Any
) -> Attempt:
    """Store a finished run whose variants, named after their methods, took turns after a warm-up."""
    first = config(methods[0], **changes)
    variants = [{"name": method, "method": config(method)["method"]} for method in methods]
    turns = {"blocks": blocks, "block_steps": block_steps, "until": 0.05, "limit_min": 15}
    shared = first | {"variants": variants, "alternate": turns, "train": first["train"] | {"steps": None}}
    return in_turns(store, shared)


def made(store: Store, config: Mapping[str, Any]) -> Attempt:
    """Store a finished run of this config, whether variants take turns in it or not."""
    return in_turns(store, config) if config.get("variants") else timed(store, config)


def in_turns(store: Store, config: Mapping[str, Any]) -> Attempt:
    """Store a finished run of a config with variants: two steps of warm-up each, and the fewest turns."""
    blocks, block_steps = config["alternate"]["blocks"], config["alternate"]["block_steps"]
    steps = 2 + blocks * block_steps
    turns = [
        (step, variant["method"]["name"], {"variant": variant["name"], "block": block})
        for step, block in enumerate([0, 0, *(1 + at // block_steps for at in range(steps - 2))])
        for variant in config["variants"]
    ]
    ended = {"stopped": "half-width", "half_width": 0.01, "blocks": blocks}
    return _stepped(store, config, turns, facts={"steps": steps, "alternated": ended})


def learned(
    store: Store, config: Mapping[str, Any], steps_per_epoch: int = 390, **provenance: Any
) -> Attempt:
    """Store a finished training whose curves end at END_TOP1 and END_LOSS; seeds differ a little."""
    method = config["method"]["name"]
    noise = np.random.default_rng(config["seed"])
    epochs = config["train"]["epochs"]
    lines = []
    for epoch in range(1, epochs + 1):
        done = (1 - math.exp(-4 * epoch / epochs)) / (1 - math.exp(-4))
        loss = 2.3 - (2.3 - END_LOSS[method]) * done + 0.01 * noise.standard_normal()
        top1 = 10 + (END_TOP1[method] - 10) * done + 0.3 * noise.standard_normal()
        energy = None if method == "dense" else 0.1 + 0.2 * done
        lines.append(_epoch(epoch, steps_per_epoch, top1, loss, captured_energy=energy, **SENT[method]))
    lines[-1]["test_top1"] = END_TOP1[method] + noise.standard_normal()
    return _written(store, config, "epoch", [lines], **provenance)


def ended(store: Store, config: Mapping[str, Any], top1: float, loss: float) -> Attempt:
    """Store a finished training of two epochs that ends so; seeds differ a little."""
    end = top1 + 0.1 * config["seed"]
    lines = [_epoch(epoch, 100, end - 5 * (2 - epoch), loss, **SENT["dense"]) for epoch in (1, 2)]
    return _written(store, config, "epoch", [lines], {"steps": 200})


def _epoch(epoch: int, steps: int, top1: float, loss: float, **more: Any) -> dict[str, Any]:
    """Return the line of an epoch of so many steps."""
    return {
        "epoch": epoch, "step": epoch * steps, "train_loss": loss, "val_loss": loss, "val_top1": top1,
        "val_top5": 99.0, "wall_s": 20.0 * epoch, "host_syncs": 0, "captured_energy": None, **more,
    }  # fmt: skip


def looked(store: Store, config: Mapping[str, Any], looks: list[dict[str, Any]]) -> Attempt:
    """Store a finished training that was looked at; `looks` as `training.selection_observers` logs them."""
    return _written(store, config, "look", [looks])


def _stepped(
    store: Store,
    config: Mapping[str, Any],
    turns: Sequence[Turn],
    slow: float = 1.0,
    facts: Mapping[str, Any] = MappingProxyType({}),
    **provenance: Any,
) -> Attempt:
    """Store a finished run of which each rank took these steps, each by its number, method and turn."""
    ranks = []
    for rank in range(config["workers"]):
        clock, lines = 100.0 * rank, list[dict[str, Any]]()  # every rank has its own clock
        for step, method, turn in turns:
            line, clock = _step(config, method, rank, step, clock, slow)
            lines.append(line | turn)
        ranks.append(lines)
    return _written(store, config, "step", ranks, facts, **provenance)


def _step(
    config: Mapping[str, Any], method: str, rank: int, step: int, clock: float, slow: float
) -> tuple[dict[str, Any], float]:
    """Return one step, and the clock after it. The last rank is late, and the others wait for it."""
    jitter = 1 + 0.03 * math.sin(1.7 * step) + (0.5 if step < 2 else 0.0)
    phases = {phase: ms * MS * slow * jitter for phase, ms in PHASES_MS[method].items()}
    is_last = rank == config["workers"] - 1
    phases["wait"] = 0.1 * MS
    phases["backward" if is_last else "wait"] += WAIT_MS[method] * MS
    spans = []
    now = clock
    for phase, seconds in phases.items():
        spans.append((phase, now, seconds))
        now += seconds
    now += UNACCOUNTED_MS * MS
    mode = config["timing"]["mode"]
    if mode == "production":
        phases = {phase: phases[phase] for phase in ("wait", "transfer")}
    if mode == "as_published":
        phases["synchronize"] = phases.pop("wait") + phases.pop("transfer")
    line: dict[str, Any] = {
        "step": step, "epoch": 1, "start_s": clock, "step_s": now - clock, "phases": phases, **SENT[method],
        "residual_norm": 0.0, "loss": 2.3 - 0.01 * step, "lr": 0.1,
    }  # fmt: skip
    steps, with_spans = config["train"]["steps"], config["timing"]["span_steps"]
    if mode == "serialised" and (with_spans is None or steps is None or steps - step <= with_spans):
        line["spans"] = spans
    return line, now


def _written(
    store: Store,
    config: Mapping[str, Any],
    kind: str,
    ranks: Sequence[Sequence[Mapping[str, Any]]],
    facts: Mapping[str, Any] = MappingProxyType({}),
    **provenance: Any,
) -> Attempt:
    """Store a finished run of which each rank logged these lines, all of one kind."""
    attempt = store.create_attempt(config)
    for rank, lines in enumerate(ranks):
        with RankLog(attempt.rank_log_path(rank)) as log:
            for line in lines:
                log.add_line(kind, **line)
            log.flush()
    steps = config["train"]["steps"] or 390 * config["train"]["epochs"]
    ended = {"parameters": 14_728_266, "tensors": 54, "steps_per_epoch": 49, "steps": steps, **facts}
    attempt.update_manifest(
        state="ok",
        files=attempt.size_and_digest_by_log(),
        simulated=config["cluster"]["where"] == "virtual",
        provenance=yaml.safe_load(MADE_ON) | provenance,
        **ended,
    )
    return attempt


def frames_with(folder: Path, *configs: Mapping[str, Any]) -> Frames:
    """Store finished runs of these configs, trainings where they validate; return the folder's frames."""
    store = Store(folder)
    for config in configs:
        (learned if config["train"]["validate"] == "epoch" else made)(store, config)
    return frames_of(store)


def item_store(root: Path, seeds: int = 1) -> Store:
    """Store runs for every item: timed in two modes, and trainings with so many seeds."""
    store = Store(root)
    for method in PHASES_MS:
        for mode in ("serialised", "production"):
            timed(store, config(method, timing={"mode": mode, "warmup_steps": 4, "span_steps": 2}))
        for seed in range(seeds):
            learned(store, learning_config(method, seed))
    return store


def frames_of(store: Store) -> Frames:
    """Return the frames of all whole runs of a store."""
    return load_valid_attempts(store.list_newest_valid_attempts())[0]


def key(frames: Frames, method: str, mode: str = "serialised", workers: int = 2) -> str:
    """Return the key of the first run of this kind."""
    words = f"method.name == '{method}' and timing.mode == '{mode}' and workers == {workers}"
    return str(query_runs(frames, words).runs["key"].iloc[0])
