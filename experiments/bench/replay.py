"""Exchanges of many workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

import sparsify
from experiments.bench._gradients import train_briefly
from experiments.bench._runner import Bench, Record
from experiments.bench._timing import device_of, facts
from experiments.bench.bytes import has_density, named, published
from experiments.config import data_root
from experiments.config.compose import resolve
from experiments.tasks import REGISTRY
from experiments.training import datasets
from experiments.training.task import Task
from sparsify.core.synthetic_selections import (
    SelectionStatistics,
    SyntheticSelections,
    measure_statistics,
    skewed_shares,
)
from sparsify.cost import Link, Network
from sparsify.ranges import PositiveInt
from sparsify.replay import ExchangeReplay, check_replayable, load_imbalance

RESNET50 = 25_600_000  # parameters, rounded
METHODS = "dense,topk,gaussiank,randomk,blockrandomk,gtopk,sparcml,scalecom,oktopk"
STEPS = 2


def replay(
    *,
    workers: str = "8,64,256,1024",
    n: PositiveInt = RESNET50,
    density: float = 0.001,
    overlap: float = 0.3,
    skew: float = 4.0,
    task: str | None = None,
    record: PositiveInt = 8,
    steps: PositiveInt = 20,
    methods: str = METHODS,
    link: str = "ethernet_10g",
) -> Bench:
    """Exchanges on scales where no models fit: words, balance and time, from selections alone.

    Selections are made up with a given density, overlap between workers and skew between regions
    (sparsify/core/selections.py), or with those that a short training has (--task, on virtual workers). Every
    exchange is worked out to the byte (sparsify/replay.py) for two steps: Ok-Topk takes its thresholds and
    borders in the first one and re-uses them in the second, which is shown. *Words* are of 4 bytes, of the
    worker that sends most; *published*, the literature's bandwidth term; *balance*, the largest worker's
    share over the mean, of what they send and of what they receive. *Time* is simulated by the alpha-beta
    model on the link.

    Args:
        workers: numbers of workers, with commas.
        n: elements of the gradient.
        overlap: two workers' selections have this share in common, from 0 to 1.
        skew: fullest of 64 slices over the mean.
        task: take overlap and skew from a short training of it.
        record: virtual workers of that training.
        steps: of that training.
        methods: names, with commas.
        link: a file of conf/link.
    """
    device = device_of("cpu", threads=1)  # many short operations, to which a second thread only comes late
    sizes, names = workers.split(","), named(methods)
    if not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"--workers {workers}: whole numbers of 1 or more, with commas, as 8,64,1024")
    fields = resolve(["cluster=virtual", f"link={link}"])["cluster"]["link"]
    network = Network(Link(fields["alpha_s"], fields["beta_s_per_byte"]))
    for name in names:
        check_replayable(sparsify.build(name))
    if task is None:
        shares = skewed_shares(skew) if skew > 1 else (1.0,)
        statistics, source = SelectionStatistics(density, overlap, shares), "given"
    else:
        trained: Task = REGISTRY.build(task, {})
        data = datasets.load(trained.dataset, data_root.root_of(None), device)
        selected = train_briefly(trained, data, device, record, steps, density)
        statistics = measure_statistics(*selected)._replace(density=density)
        source = f"step {steps} of {task}, Top-k at density {density:g} on {record} virtual workers"

    @cache
    def parts_of(size: int) -> SyntheticSelections:
        return SyntheticSelections(statistics, n, size)

    def measure(case: Record) -> Iterator[Record]:
        """The last of some steps."""
        name, size = case["method"], case["workers"]
        parts, began = parts_of(size), time.perf_counter()
        method = sparsify.build(name, **({"density": density} if has_density(name) else {}))
        exchange = ExchangeReplay(method, n, size)
        traffic = [exchange.replay_step(parts, parts.k) for _ in range(STEPS)][-1]
        yield {
            "k": parts.k,
            "words": max(traffic.sent_bytes) // 4,
            "published": published(name, n, parts.k, size),
            "balance_sent": load_imbalance(traffic.sent_bytes),
            "balance_received": load_imbalance(traffic.received_bytes),
            "messages": traffic.messages,
            "simulated_ms": 1e3 * traffic.simulated_seconds(network),
            "took_s": (time.perf_counter() - began) / STEPS,
        }

    return Bench(
        about=facts(device),
        head=f"n = {n:,}, density {density:g}; overlap {statistics.overlap:.3f} and skew "
        f"{statistics.skew:.2f}: {source}; times simulated on {link}",
        cases=[{"method": name, "workers": int(size)} for size in sizes for name in names],
        setting={"n": n, "link": link, "statistics": [*statistics]},
        measure=measure,
        heading="method | P | k | words | published | balance sent | received | messages | "
        "time (ms) | took (s)",
        row="{method} | {workers} | {k:,} | {words:,} | {published:,.0f} | {balance_sent:.3f} | "
        "{balance_received:.3f} | {messages:,} | {simulated_ms:,.2f} | {took_s:.1f}",
    )
