"""Training with overlap on a slow network."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from operator import truediv
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import sparsify
from experiments.bench._runner import Bench, Record, spread
from experiments.bench._timing import device_of, facts
from experiments.training import networks
from sparsify.comm import CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.cost import CollectiveCost, Link
from sparsify.ranges import PositiveFloat, PositiveFraction, PositiveInt

LINK = "simulated link: injected delay"
NETWORKS = {"vgg16": networks.vgg16, "small_cnn": networks.small_cnn}
PIXELS, CLASSES = 32, 10
# Method and entry. dense under DDP is left to DDP, whose collectives can't be delayed.
ENTRIES = {
    "dense-distribute": ("dense", sparsify.distribute),
    "topk-distribute": ("topk", sparsify.distribute),
    "topk-register": ("topk", sparsify.register),
}
EntryName = Literal["dense-distribute", "topk-distribute", "topk-register"]
CALIBRATIONS, WARM_UP = 7, 2  # backward passes whose median counts; steps before anything is counted


class SlowComm(CountingComm):
    """A communicator that is as slow as a link, and adds up what it was asked to send."""

    link = Link(0.0, 0.0)
    asked = CollectiveCost(0, 0)

    def _count(self, kind: str, nbytes: int, size: int) -> None:
        super()._count(kind, nbytes, size)
        collective = self.predict_cost(kind, nbytes, size).cost
        self.asked += collective
        time.sleep(self.link.transfer_seconds(collective))


def overlap(
    *,
    rows: Sequence[EntryName] = ("dense-distribute", "topk-distribute", "topk-register"),
    ratios: Sequence[PositiveFloat] = (0.25, 1.0, 4.0),
    latency_ms: PositiveFloat = 0.1,
    density: PositiveFraction = 0.01,
    bucket_mb: PositiveFloat = 4.0,
    network: Literal["vgg16", "small_cnn"] = "vgg16",
    batch: PositiveInt = 8,
    workers: PositiveInt = 2,
    repeats: PositiveInt = 9,
) -> Bench:
    """The gain of overlapping on a slow network: whole training steps with overlap and without, side by side.

    Worker processes of one thread each train VGG-16 on random images over loopback. *simulated link: injected
    delay*: before each collective a worker sleeps as long as a link of that latency and bandwidth would take
    (`sparsify.cost`). The bandwidth is set so that the communication of a step takes `--ratios` times as long
    as its backward pass, which is measured first, without delay. In every repetition all pairs take a step
    each, in random order; ratios are taken within the pair. A step takes as long as its slowest worker. The
    last line is for the ratio nearest to 1.

    Args:
        rows: method and entry.
        ratios: communication / backward pass.
        latency_ms: of each message.
        density: k/n of topk.
        bucket_mb: of what is aggregated together.
        network: vgg16 or small_cnn.
        batch: images a worker and step.
        workers: processes, of one thread each.
        repeats: steps of each kind that are timed.
    """
    asked = SimpleNamespace(**locals())  # what the workers are told
    about = facts(device_of("cpu"), threads=1)
    nearest = min(ratios, key=lambda ratio: abs(math.log(ratio)))
    setting = {
        name: getattr(asked, name) for name in ("network", "batch", "density", "bucket_mb", "latency_ms")
    }
    return Bench(
        about=about | {"name": f"{about['cpu']}, {workers} workers of 1 thread"},
        head=f"{network}, {batch} images a worker; {LINK}",
        cases=[{"link": LINK, **setting}],
        setting={"rows": [*rows], "ratios": [*ratios], "workers": workers, "repeats": repeats},
        measure=lambda case: measure(asked),
        heading="row | backward, ms | communication, ms | link, Mbit/s | without overlap, ms | with, ms | "
        "without / with | n",
        row="{row} | {backward_ms:.0f} | {communication_ms:.0f} | {link_mbit_per_s:.3g} | "
        "{without_ms[median]:.0f} | {with_ms[median]:.0f} | {without_over_with:.2f} | {without_over_with[n]}",
        last=lambda found: {
            "link": LINK,
            **setting,
            "communication_over_backward": nearest,
            "without_over_with": {
                row["row"]: row["without_over_with"] for row in found if row["asked_ratio"] == nearest
            },
        },
    )


def measure(asked: SimpleNamespace) -> list[Record]:
    """The rows that the first worker found."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (asked, folder), nprocs=asked.workers)
        found: list[Record] = json.loads((Path(folder) / "found.json").read_text())
    return found


def work(rank: int, asked: SimpleNamespace, folder: str) -> None:
    """One worker; rank 0 writes what was found."""
    torch.set_num_threads(1)
    comm = TorchComm.join(f"file://{folder}/rendezvous", rank, asked.workers, torch.device("cpu"))
    model, loss_of = network(asked, rank)
    alone_s = [seconds_of(loss_of(model).backward, comm) for _ in range(WARM_UP + CALIBRATIONS)]
    backward_s = statistics.median(alone_s[WARM_UP:])  # without averaging
    ways = {
        (name, overlap): trained(name, overlap, asked, rank)
        for name in asked.rows
        for overlap in (False, True)
    }
    cases = list[tuple[str, float, CollectiveCost, Link]]()
    for name in asked.rows:
        slow, step = ways[name, False]
        for _ in range(WARM_UP):  # what the last one sends counts
            ways[name, True][1]()
            slow.asked = CollectiveCost(0, 0)
            step()
        for ratio in asked.ratios:
            link = link_of(ratio * backward_s, slow.asked, asked.latency_ms / 1e3)
            cases.append((name, ratio, slow.asked, link))
    took = {(at, overlap): list[float]() for at in range(len(cases)) for overlap in (False, True)}
    order = random.Random(0)  # the same for all workers
    for _ in range(asked.repeats):
        for at in order.sample(range(len(cases)), len(cases)):
            for overlap in order.sample([False, True], 2):
                name, *_, link = cases[at]
                slow, step = ways[name, overlap]
                slow.link = link
                took[at, overlap].append(1e3 * seconds_of(step, comm))
    if rank == 0:
        found = [
            {
                "row": name,
                "asked_ratio": ratio,
                "backward_ms": 1e3 * backward_s,
                "communication_ms": 1e3 * link.transfer_seconds(sent),
                **sent._asdict(),
                "link_latency_ms": 1e3 * link.alpha_s,
                "link_mbit_per_s": 8e-6 / link.beta_s_per_byte,
                "without_ms": spread(took[at, False]),
                "with_ms": spread(took[at, True]),
                "without_over_with": spread(list(map(truediv, took[at, False], took[at, True]))),
                "samples_ms": [*zip(took[at, False], took[at, True], strict=True)],
            }
            for at, (name, ratio, sent, link) in enumerate(cases)
        ]
        (Path(folder) / "found.json").write_text(json.dumps(found))
    comm.barrier()
    comm.close()


def seconds_of(do: Callable[[], object], comm: TorchComm) -> float:
    """Seconds of the slowest worker; all begin together."""
    comm.barrier()
    began = time.perf_counter()
    do()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    return max(float(theirs) for theirs in comm.all_gather(took))


def network(asked: SimpleNamespace, rank: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The same on all workers; and the loss on this one's images."""
    torch.manual_seed(0)
    model = NETWORKS[asked.network](3, PIXELS, CLASSES)
    own = torch.Generator().manual_seed(rank)
    images = torch.randn(asked.batch, 3, PIXELS, PIXELS, generator=own)
    labels = torch.randint(CLASSES, (asked.batch,), generator=own)
    return model, lambda called: nn.functional.cross_entropy(called(images), labels)


def trained(
    name: str, overlap: bool, asked: SimpleNamespace, rank: int
) -> tuple[SlowComm, Callable[[], None]]:
    """A model with its optimiser, to be trained in one way: its communicator, and a step."""
    model, loss_of = network(asked, rank)
    optimiser: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    method_name, entry = ENTRIES[name]
    choices = {} if method_name == "dense" else {"density": asked.density}
    scope = "layer" if entry is sparsify.register else asked.bucket_mb
    method, comm = sparsify.build(method_name, scope=scope, **choices), SlowComm(TorchComm.with_new_group())
    if entry is sparsify.register:
        model = DistributedDataParallel(model, bucket_cap_mb=asked.bucket_mb)
        sparsify.register(model, method, optimiser, comm, overlap=overlap)
    else:
        optimiser = sparsify.distribute(optimiser, model, method, comm, overlap=overlap)

    def step() -> None:
        optimiser.zero_grad()
        loss_of(model).backward()
        optimiser.step()

    return comm, step


def link_of(seconds: float, sent: CollectiveCost, latency_s: float) -> Link:
    """The link on which all that a step sends takes so long; its latency is at most half of that."""
    latency_s = min(latency_s, seconds / 2 / sent.messages)
    return Link(latency_s, (seconds - sent.messages * latency_s) / sent.sent_bytes)
