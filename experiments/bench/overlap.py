"""Does overlapping gain on a slow network? Whole training steps with overlap and without, side by side.

make bench BENCH=overlap [ARGS="--ratios 1 4 --rows topk-register"]

Worker processes of one thread each train VGG-16 on random images over loopback. *simulated link: injected
delay*: before each collective a worker sleeps as long as a link of that latency and bandwidth would take
(`sparsify.cost`). The bandwidth is set so that the communication of a step takes `--ratios` times as long as
its backward pass, which is measured first, without delay. In every repetition all pairs take a step each, in
random order; ratios are taken within the pair. A step takes as long as its slowest worker.

The last line is one JSON object, for the ratio nearest to 1; all samples are appended to
results/bench/overlap.jsonl.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import sparsify
from analysis.records import now
from experiments.bench._case import spread
from experiments.bench.launch import append, positive
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.training import networks
from experiments.worker.provenance import provenance
from sparsify.comm import CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.cost import Cost, Link

LINK = "simulated link: injected delay"
NETWORKS = {"vgg16": networks.vgg16, "small_cnn": networks.small_cnn}
PIXELS, CLASSES = 32, 10
# Method and entry. dense under DDP is left to DDP, whose collectives can't be delayed.
ROWS = {
    "dense-distribute": ("dense", sparsify.distribute),
    "topk-distribute": ("topk", sparsify.distribute),
    "topk-register": ("topk", sparsify.register),
}
CALIBRATIONS, WARM_UP = 7, 2  # backward passes whose median counts; steps before anything is counted
PUBLIC = ("cpu", "cores", "memory_gib", "platform", "versions", "commit", "dirty")


class SlowComm(CountingComm):
    """A communicator that is as slow as a link, and adds up what it was asked to send."""

    link = Link(0.0, 0.0)
    asked = Cost(0, 0)

    def _count(self, kind: str, nbytes: int, size: int) -> None:
        super()._count(kind, nbytes, size)
        collective = self.forms[kind](nbytes, size)
        self.asked += collective
        time.sleep(self.link.seconds(collective))


class Row(NamedTuple):
    """A model that is trained in one way."""

    comm: SlowComm
    step: Callable[[], None]


class Case(NamedTuple):
    """A row at one speed of the link."""

    row: str
    ratio: float  # communication / backward pass
    backward_s: float
    sent: Cost
    link: Link


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=overlap", description=__doc__.partition("\n")[0])
    words.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="method and entry")
    words.add_argument(
        "--ratios", nargs="+", type=above_0, default=[0.25, 1.0, 4.0], help="communication / backward pass"
    )
    words.add_argument("--latency-ms", type=above_0, default=0.1, help="of each message")
    words.add_argument("--density", type=share, default=0.01, help="k/n of topk")
    words.add_argument("--bucket-mb", type=above_0, default=4.0, help="of what is aggregated together")
    words.add_argument("--network", choices=NETWORKS, default="vgg16")
    words.add_argument("--batch", type=positive, default=8, help="images a worker and step")
    words.add_argument("--workers", type=positive, default=2, help="processes, of one thread each")
    words.add_argument("--repeats", type=positive, default=9, help="steps of each kind that are timed")
    words.add_argument("--ship", action="store_true", help="copy the records into results/shipped")
    asked = words.parse_args()
    about = provenance("", "", torch.device("cpu"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (asked, folder), nprocs=asked.workers)
        found = json.loads((Path(folder) / "found.json").read_text())
    setting: dict[str, Any] = {
        "bench": "overlap",
        "link": LINK,
        "device": f"{about['cpu']}, {asked.workers} workers of 1 thread",
        **{name: getattr(asked, name) for name in ("network", "batch", "density", "bucket_mb", "latency_ms")},
    }
    lines = [setting | pair for pair in found]
    print(f"{setting['device']}; {asked.network}, {asked.batch} images a worker; {LINK}\n\n{table(lines)}")
    public = {name: value for name, value in about.items() if name in PUBLIC}
    facts = {"at": now(), "kind": "overlap", **code_version.origin(), "provenance": public}
    folders = Folders()
    for results in (folders.results, *([folders.shipped] if asked.ship else ())):
        for line in lines:
            append(results / "bench" / "overlap.jsonl", facts | line)
    nearest = min(asked.ratios, key=lambda ratio: abs(math.log(ratio)))
    gains = {line["row"]: line["without_over_with"] for line in lines if line["asked_ratio"] == nearest}
    print(json.dumps(setting | {"communication_over_backward": nearest, "without_over_with": gains}))
    return 0


def above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return number


def share(text: str) -> float:
    if above_0(text) > 1:
        raise argparse.ArgumentTypeError(f"{text} does not lie in (0, 1]")
    return float(text)


def work(rank: int, asked: argparse.Namespace, folder: str) -> None:
    """One worker; rank 0 writes what was found."""
    torch.set_num_threads(1)
    comm = TorchComm.start(f"file://{folder}/rendezvous", rank, asked.workers, torch.device("cpu"))
    backward_s = backward_of(asked, rank, comm)
    rows = {
        (name, overlap): row(name, overlap, asked, rank) for name in asked.rows for overlap in (False, True)
    }
    cases = []
    for name in asked.rows:
        for _ in range(WARM_UP):
            rows[name, True].step()
        sent = sent_by(rows[name, False])
        links = (link_of(ratio * backward_s, sent, asked.latency_ms / 1e3) for ratio in asked.ratios)
        cases += [
            Case(name, ratio, backward_s, sent, link) for ratio, link in zip(asked.ratios, links, strict=True)
        ]
    took: dict[tuple[Case, bool], list[float]] = {}
    order = random.Random(0)  # the same for all workers
    for _ in range(asked.repeats):
        for case in order.sample(cases, len(cases)):
            for overlap in order.sample([False, True], 2):
                comm_, step = rows[case.row, overlap]
                comm_.link = case.link
                took.setdefault((case, overlap), []).append(seconds_of(step, comm))
    if rank == 0:
        found = [line_of(case, took[case, False], took[case, True]) for case in cases]
        (Path(folder) / "found.json").write_text(json.dumps(found))
    comm.barrier()
    comm.close()


def seconds_of(do: Callable[[], object], comm: TorchComm) -> float:
    """Of the slowest worker; all begin together."""
    comm.barrier()
    began = time.perf_counter()
    do()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    return max(float(theirs) for theirs in comm.all_gather(took))


def backward_of(asked: argparse.Namespace, rank: int, comm: TorchComm) -> float:
    """Seconds of a backward pass, without averaging."""
    model, loss_of = network(asked, rank)
    took = [seconds_of(loss_of(model).backward, comm) for _ in range(WARM_UP + CALIBRATIONS)]
    return statistics.median(took[WARM_UP:])


def sent_by(each: Row) -> Cost:
    """In one step."""
    for _ in range(WARM_UP):  # the last one counts
        each.comm.asked = Cost(0, 0)
        each.step()
    return each.comm.asked


def network(asked: argparse.Namespace, rank: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The same on all workers; and the loss on this one's images."""
    torch.manual_seed(0)
    model = NETWORKS[asked.network](3, PIXELS, CLASSES)
    own = torch.Generator().manual_seed(rank)
    images = torch.randn(asked.batch, 3, PIXELS, PIXELS, generator=own)
    labels = torch.randint(CLASSES, (asked.batch,), generator=own)
    return model, lambda called: nn.functional.cross_entropy(called(images), labels)


def row(name: str, overlap: bool, asked: argparse.Namespace, rank: int) -> Row:
    model, loss_of = network(asked, rank)
    optimiser: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    method_name, entry = ROWS[name]
    choices = {} if method_name == "dense" else {"density": asked.density}
    scope = "layer" if entry is sparsify.register else asked.bucket_mb
    method, comm = sparsify.build(method_name, scope=scope, **choices), SlowComm(TorchComm.beside())
    if entry is sparsify.register:
        model = DistributedDataParallel(model, bucket_cap_mb=asked.bucket_mb)
        sparsify.register(model, method, optimiser, comm, overlap=overlap)
    else:
        optimiser = sparsify.distribute(optimiser, model, method, comm, overlap=overlap)

    def step() -> None:
        optimiser.zero_grad()
        loss_of(model).backward()
        optimiser.step()

    return Row(comm, step)


def link_of(seconds: float, sent: Cost, latency_s: float) -> Link:
    """On which all that a step sends takes so long; with less latency where that alone would take longer."""
    latency_s = min(latency_s, seconds / 2 / sent.messages)
    return Link(latency_s, (seconds - sent.messages * latency_s) / sent.sent_bytes)


def line_of(case: Case, without: list[float], with_: list[float]) -> dict[str, Any]:
    """What is recorded of a case, given the seconds of its steps."""
    return {
        "row": case.row,
        "asked_ratio": case.ratio,
        "backward_ms": 1e3 * case.backward_s,
        "communication_ms": 1e3 * case.link.seconds(case.sent),
        "messages": case.sent.messages,
        "sent_bytes": case.sent.sent_bytes,
        "link_latency_ms": 1e3 * case.link.alpha_s,
        "link_mbit_per_s": 8e-6 / case.link.beta_s_per_byte,
        "without_ms": spread([1e3 * seconds for seconds in without]),
        "with_ms": spread([1e3 * seconds for seconds in with_]),
        "without_over_with": spread([a / b for a, b in zip(without, with_, strict=True)]),
        "samples_ms": [[1e3 * a, 1e3 * b] for a, b in zip(without, with_, strict=True)],
    }


def table(lines: list[dict[str, Any]]) -> str:
    head = (
        "row", "backward, ms", "communication, ms", "link, Mbit/s", "without overlap, ms", "with, ms",
        "without / with", "n",
    )  # fmt: skip
    out = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for line in lines:
        cells = [line["row"], f"{line['backward_ms']:.0f}", f"{line['communication_ms']:.0f}"]
        cells += [f"{line['link_mbit_per_s']:.3g}", f"{line['without_ms']['median']:.0f}"]
        gain = line["without_over_with"]
        cells += [f"{line['with_ms']['median']:.0f}"]
        cells += [f"{gain['median']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}]", str(gain["n"])]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.exit(main())
