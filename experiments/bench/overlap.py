"""Training with overlap on a slow network."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import truediv
from typing import Any, Literal

from torch import Tensor

import sparsify
from experiments.bench._launches import LaunchPlan, TimedVariant, run_launches, time_variants
from experiments.bench._runner import Benchmark, Record, summarise_median_and_range
from experiments.bench._step_variants import (
    Step,
    TrainingStepSetup,
    make_distributed_optimizer_step,
    make_registered_ddp_step,
    make_topk_factory,
)
from experiments.bench._timing import describe_single_thread_cpu_machine
from sparsify.comm import Comm, CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.cost import CollectiveCost, Link
from sparsify.method import Method
from sparsify.ranges import PositiveFloat, PositiveFraction, PositiveInt

LINK = "simulated link: injected delay"
# dense under DDP is left to DDP, whose collectives can't be delayed.
RowName = Literal["dense-distribute", "topk-distribute", "topk-register"]
CALIBRATION_TURNS = 7  # backward passes whose median counts
SETTLING_STEPS = 2  # before one whose messages are counted


class DelayedComm(CountingComm):
    """A communicator that sleeps as long as a link would take, and adds up the cost of its collectives."""

    link = Link(0.0, 0.0)
    total_cost = CollectiveCost(0, 0)

    def _count(self, kind: str, nbytes: int, size: int) -> None:
        super()._count(kind, nbytes, size)
        cost = self.predict_cost(kind, nbytes, size).cost
        self.total_cost += cost
        time.sleep(self.link.transfer_seconds(cost))


def overlap(
    *,
    rows: Sequence[RowName] = ("dense-distribute", "topk-distribute", "topk-register"),
    ratios: Sequence[PositiveFloat] = (0.25, 1.0, 4.0),
    latency_ms: PositiveFloat = 0.1,
    density: PositiveFraction = 0.01,
    bucket_mb: PositiveFloat = 4.0,
    network: Literal["vgg16", "small_cnn"] = "vgg16",
    batch: PositiveInt = 8,
    workers: PositiveInt = 2,
    repeats: PositiveInt = 9,
) -> Benchmark:
    """Time whole training steps on a slow network with overlap and without, side by side.

    Worker processes of one thread each train VGG-16 on random images over loopback. *simulated link: injected
    delay*: before each collective a worker sleeps as long as a link of that latency and bandwidth would take
    (`sparsify.cost`). The bandwidth is set so that the communication of a step takes `--ratios` times as long
    as its backward pass, which is measured first, without delay. In every repetition all pairs take a step
    each, in random order; ratios are taken within the pair. A step takes as long as its slowest worker. The
    last line is for the ratio nearest to 1.

    Args:
        rows: methods with their wrappers.
        ratios: time of communication / time of the backward pass.
        latency_ms: latency of each message.
        density: k/n of topk.
        bucket_mb: size of the buckets that are aggregated together.
        network: vgg16 or small_cnn.
        batch: images a worker and step.
        workers: number of processes, of one thread each.
        repeats: number of timed steps of each kind.
    """
    nearest_ratio = min(ratios, key=lambda ratio: abs(math.log(ratio)))
    training: dict[str, Any] = {
        "network": network, "batch": batch, "density": density, "bucket_mb": bucket_mb,
        "latency_ms": latency_ms,
    }  # fmt: skip
    sweep: dict[str, Any] = {"rows": [*rows], "ratios": [*ratios]}

    def measure(case: Record) -> Iterator[Record]:
        (report,) = run_launches(plan_overlap, 1, workers, repeats, **training, **sweep)
        for row in report["rows"]:
            with_ms, without_ms = (
                report["samples_ms"][name]["wall"] for name in overlap_and_plain_variant_names(row)
            )
            yield row | {
                "without_ms": summarise_median_and_range(without_ms),
                "with_ms": summarise_median_and_range(with_ms),
                "without_over_with": summarise_median_and_range([*map(truediv, without_ms, with_ms)]),
                "samples_ms": [*zip(without_ms, with_ms, strict=True)],
            }

    return Benchmark(
        machine=describe_single_thread_cpu_machine(f"{workers} workers of 1 thread"),
        description=f"{network}, {batch} images a worker; {LINK}",
        cases=[{"link": LINK, **training}],
        settings={**sweep, "workers": workers, "repeats": repeats},
        measure=measure,
        header="row | backward, ms | communication, ms | link, Mbit/s | without overlap, ms | with, ms | "
        "without / with | n",
        row_format="{row} | {backward_ms:.0f} | {communication_ms:.0f} | {link_mbit_per_s:.3g} | "
        "{without_ms[median]:.0f} | {with_ms[median]:.0f} | {without_over_with:.2f} | {without_over_with[n]}",
        summarise=lambda rows: {
            "link": LINK,
            **training,
            "communication_over_backward": nearest_ratio,
            "without_over_with": {
                row["row"]: row["without_over_with"] for row in rows if row["asked_ratio"] == nearest_ratio
            },
        },
    )


def overlap_and_plain_variant_names(row: Record) -> tuple[str, str]:
    """Return the names of a row's variants with overlap and without."""
    name = f"{row['row']} at {row['asked_ratio']:g}"
    return f"{name}, overlap", name


def plan_overlap(comm: Comm, options: Any) -> LaunchPlan:
    """Measure a backward pass, and plan to time pairs of steps over links that are slow beside it."""
    setup = TrainingStepSetup(
        options.network, 0, options.density, options.bucket_mb, comm.rank, options.batch
    )
    backward_s = measure_slowest_backward_s(comm, setup)
    variants = dict[str, TimedVariant]()
    rows = list[Record]()
    for name in options.rows:
        delayed, step = make_delayed_step(name, setup, overlap=False)
        overlap_delayed, overlap_step = make_delayed_step(name, setup, overlap=True)
        for _ in range(SETTLING_STEPS):
            overlap_step()
            delayed.total_cost = CollectiveCost(0, 0)
            step()
        cost = delayed.total_cost
        for ratio in options.ratios:
            link = link_for_duration(ratio * backward_s, cost, options.latency_ms / 1e3)
            row = {
                "row": name,
                "asked_ratio": ratio,
                "backward_ms": 1e3 * backward_s,
                "communication_ms": 1e3 * link.transfer_seconds(cost),
                **cost._asdict(),
                "link_latency_ms": 1e3 * link.alpha_s,
                "link_mbit_per_s": 8e-6 / link.beta_s_per_byte,
            }
            rows.append(row)
            overlap_name, plain_name = overlap_and_plain_variant_names(row)
            variants[overlap_name] = TimedVariant(
                overlap_step, partial(setattr, overlap_delayed, "link", link)
            )
            variants[plain_name] = TimedVariant(step, partial(setattr, delayed, "link", link))
    return LaunchPlan(
        variants,
        lambda: {"rows": rows},
        adjacent_groups=[overlap_and_plain_variant_names(row) for row in rows],
    )


def measure_slowest_backward_s(comm: Comm, setup: TrainingStepSetup) -> float:
    """Return the median seconds of a backward pass of the slowest worker, without averaging."""
    model, loss_of = setup.make_model_and_loss()
    losses = list[Tensor]()
    variant = TimedVariant(lambda: losses.pop().backward(), lambda: losses.append(loss_of(model)))
    samples = time_variants(comm, LaunchPlan({"backward": variant}), CALIBRATION_TURNS, seed=0)
    return statistics.median(samples["backward"]["wall"]) / 1e3


def make_delayed_step(name: str, setup: TrainingStepSetup, overlap: bool) -> tuple[DelayedComm, Step]:
    """Return a training step of a row, and the communicator that it uses."""
    comm = DelayedComm(TorchComm.with_new_group())
    setup = replace(setup, comm=comm)
    if name == "topk-register":
        return comm, make_registered_ddp_step(setup, make_topk_factory("layer"), overlap, setup.bucket_mb)
    make_method = make_dense_method_of_buckets if name == "dense-distribute" else make_topk_factory(None)
    return comm, make_distributed_optimizer_step(setup, make_method, overlap)


def make_dense_method_of_buckets(setup: TrainingStepSetup) -> Method:
    method: Method = sparsify.build("dense", scope=setup.bucket_mb)
    return method


def link_for_duration(seconds: float, cost: CollectiveCost, max_latency_s: float) -> Link:
    """Return the link on which messages of this cost take so long; its latency is at most half of that."""
    latency_s = min(max_latency_s, seconds / 2 / cost.messages)
    return Link(latency_s, (seconds - cost.messages * latency_s) / cost.sent_bytes)
