"""Exchanges on scales where no models fit: words, balance and time, from selections alone.

make bench BENCH=replay [ARGS="--workers 8,1024 --n 25600000 --methods oktopk --link ethernet_10g"]

Selections are made up with a given density, overlap between workers and skew between regions
(sparsify/selections.py), or with those that a short training has (--task, on virtual workers). Every exchange
is worked out to the byte (sparsify/replay.py) for two steps: Ok-Topk takes its thresholds and borders in the
first one and re-uses them in the second, which is shown. *Words* are of 4 bytes, of the worker that sends
most; *published*, the literature's bandwidth term; *balance*, the largest worker's share over the mean, of
what they send and of what they receive. *Time* is simulated by the alpha-beta model on the link.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import time
from pathlib import Path

import torch

import sparsify
from experiments.bench._recorded import recorded
from experiments.bench.bytes import SCHEMES
from experiments.config import data_root
from experiments.config.compose import resolve
from experiments.tasks import REGISTRY
from sparsify import cost
from sparsify.cost import Link, Network
from sparsify.ranges import unknown
from sparsify.replay import Replay, Traffic, balance, sparse_part
from sparsify.selections import SLICES, Generated, Statistics, measured, skewed

RESNET50 = 25_600_000  # parameters, rounded
METHODS = ("dense", "topk", "gaussiank", "randomk", "blockrandomk", "gtopk", "sparcml", "scalecom", "oktopk")
STEPS = 2
HEAD = (
    "method", "P", "k", "words", "published", "balance sent", "received", "messages", "time (ms)", "took (s)",
)  # fmt: skip


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=replay", description=__doc__.partition("\n")[0])
    words.add_argument("--workers", default="8,64,256,1024", help="numbers of workers, with commas")
    words.add_argument("--n", type=int, default=RESNET50, help="elements of the gradient")
    words.add_argument("--density", type=float, default=0.001)
    words.add_argument("--overlap", type=float, default=0.3, help="of two workers' selections, from 0 to 1")
    words.add_argument("--skew", type=float, default=4.0, help=f"fullest of {SLICES} slices over the mean")
    words.add_argument("--task", default=None, help="take overlap and skew from a short training of it")
    words.add_argument("--record", type=int, default=8, help="virtual workers of that training")
    words.add_argument("--steps", type=int, default=20, help="of that training")
    words.add_argument("--methods", default=",".join(METHODS), help="names, with commas")
    words.add_argument("--link", default="ethernet_10g", help="a file of conf/link")
    asked = words.parse_args()
    try:
        return report(asked)
    except ValueError as error:
        words.error(str(error))


def report(asked: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: words that do not fit.
    """
    network, sizes = network_of(asked.link), numbers(asked.workers)
    names = asked.methods.split(",")
    for name in names:
        if name not in sparsify.names():
            raise ValueError(unknown("method", name, sparsify.names()))
        sparse_part(sparsify.build(name))
    statistics, source = statistics_of(asked)
    print(f"n = {asked.n:,}, density {asked.density:g}; overlap {statistics.overlap:.3f} and skew "
          f"{statistics.skew:.2f}: {source}\ntimes simulated on {asked.link}\n")  # fmt: skip
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for size in sizes:
        parts = Generated(statistics, asked.n, size)
        for name in names:
            began = time.perf_counter()
            traffic = replayed(name, asked.density, parts)
            took_s = (time.perf_counter() - began) / STEPS
            print(line(name, asked.n, parts.k, traffic, network, took_s), flush=True)
    return 0


def numbers(text: str) -> list[int]:
    found = text.split(",")
    if not all(word.isdigit() and int(word) for word in found):
        raise ValueError(f"--workers {text}: whole numbers of 1 or more, with commas, as 8,64,1024")
    return [int(word) for word in found]


def network_of(link: str) -> Network:
    """A link's alpha and beta, as a configuration has them."""
    fields = resolve(["cluster=virtual", f"link={link}"])["cluster"]["link"]
    return Network(Link(fields["alpha_s"], fields["beta_s_per_byte"]))


def statistics_of(asked: argparse.Namespace) -> tuple[Statistics, str]:
    """Of the selections to be made, and where the numbers come from."""
    if asked.task is None:
        shares = skewed(asked.skew) if asked.skew > 1 else (1.0,)
        return Statistics(asked.density, asked.overlap, shares), "given"
    REGISTRY.check_name(asked.task)
    root: Path = data_root.root_of(None)
    made = recorded(asked.task, asked.density, asked.record, asked.steps, root)
    return measured(made.parts, made.n)._replace(density=asked.density), made.source


def replayed(name: str, density: float, parts: Generated) -> Traffic:
    """The last of some steps."""
    choices = {"density": density} if "density" in sparsify.defaults(name) else {}
    replay = Replay(sparsify.build(name, **choices), parts.n, len(parts))
    return [replay.next(parts, parts.k) for _ in range(STEPS)][-1]


def line(name: str, n: int, k: int, traffic: Traffic, network: Network, took_s: float) -> str:
    sent, size = traffic.sent_bytes, traffic.size
    cells = (
        name, size, f"{k:,}", f"{max(sent) // 4:,}", published(name, n, k, size), f"{balance(sent):.3f}",
        f"{balance(traffic.received_bytes):.3f}", f"{traffic.messages:,}",
        f"{1e3 * traffic.seconds(network):,.2f}", f"{took_s:.1f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def published(name: str, n: int, k: int, size: int) -> str:
    """The literature's words, or the range of them; empty where it has none."""
    if name not in SCHEMES:
        return ""
    least, most, _ = cost.published(SCHEMES[name], n, k, size)
    return f"{float(least):,.0f}" + (f" to {float(most):,.0f}" if most != least else "")


if __name__ == "__main__":
    torch.set_num_threads(1)  # many short operations, to which a second thread only comes late
    sys.exit(main())
