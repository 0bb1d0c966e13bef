"""What an emulated link really carries: asked by the workers, over the network that the run will use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.worker.hardware_claims import OTHERWISE
from sparsify.comm import Comm, gather_json

CPU = torch.device("cpu")
ROUND_TRIPS, COLLECTIVES = 20, 50
TRANSFER_S = 0.1  # that the transfer of a probe takes at the bandwidth asked for
LEAST_BYTES, MOST_BYTES = 2**18, 2**26
REPEATS = 5
TOLERANCE = 0.1  # of the bandwidth asked for; headers take 0.05 of Ethernet's


class Found(NamedTuple):
    """What the probe found; the same on all workers."""

    asked_gbit_s: float
    pairs_gbit_s: list[float]  # from each node to the next, one after the other
    together_gbit_s: float  # of the slowest, with all nodes sending to the next and receiving at once
    asked_latency_s: float
    latency_s: float  # half of a round trip of a few bytes between two workers, the largest of all pairs
    step_s: float  # of an all_reduce of one number, which takes 2 (P-1) such steps: its median / 2 (P-1)

    @property
    def gbit_s(self) -> float:
        """The bandwidth that every node had, whatever the others did."""
        return min(*self.pairs_gbit_s, self.together_gbit_s)


def probe(comm: Comm, link: Mapping[str, Any], per_node: int) -> Found:
    """Collective. Takes about a second at 4 nodes.

    Args:
        link: a choice of conf/link, with alpha and beta.
        per_node: workers on a node; its first one takes part.
    """
    first = range(0, comm.size, per_node)
    ring = [(node, first[(at + 1) % len(first)]) for at, node in enumerate(first)]
    size = round(min(max(TRANSFER_S / link["beta_s_per_byte"], LEAST_BYTES), MOST_BYTES))
    few, many = torch.zeros(1), torch.zeros(size // 4)
    send(comm, many, ring)  # connections are made, and TCP's windows opened
    ping_pong = [_fastest(comm, partial(there_and_back, comm, few, few, pair), ROUND_TRIPS) for pair in ring]
    pairs = [_fastest(comm, partial(there_and_back, comm, many, few, pair), REPEATS) for pair in ring]
    together = _fastest(comm, partial(send, comm, many, ring), REPEATS)
    return Found(
        asked_gbit_s=gbit_s(1.0, link["beta_s_per_byte"]),
        pairs_gbit_s=[gbit_s(size, seconds) for seconds in pairs],
        together_gbit_s=gbit_s(size, together),
        asked_latency_s=link["alpha_s"],
        latency_s=max(ping_pong) / 2,
        step_s=_typical(comm, partial(comm.all_reduce, few), COLLECTIVES) / (2 * (comm.size - 1)),
    )


def send(comm: Comm, data: Tensor, route: Sequence[tuple[int, int]]) -> None:
    comm.permute(data, route)


def there_and_back(comm: Comm, data: Tensor, answer: Tensor, pair: tuple[int, int]) -> None:
    """The sender knows from the answer that the data have come."""
    comm.permute(data, [pair])
    comm.permute(answer, [pair[::-1]])


def _fastest(comm: Comm, transfer: Callable[[], object], rounds: int) -> float:
    """Seconds of a transfer that all workers begin together, until the last one has ended it. What else the
    machine does can only make it slower: the fastest of several is the link's.
    """
    return min(map(max, _rounds(comm, transfer, rounds)))


def _typical(comm: Comm, collective: Callable[[], object], rounds: int) -> float:
    """Seconds of a collective, with all that the workers on this machine's cores wait for each other: the
    mean over workers, of the median round.
    """
    return statistics.median(map(statistics.fmean, _rounds(comm, collective, rounds)))


def _rounds(comm: Comm, transfer: Callable[[], object], rounds: int) -> list[tuple[float, ...]]:
    """Each worker's seconds of each round, which all workers begin together."""
    taken = []
    for _ in range(rounds):
        comm.barrier()
        began = time.perf_counter()
        transfer()
        taken.append(time.perf_counter() - began)
    return list(zip(*gather_json(comm, taken, CPU), strict=True))


def gbit_s(size: float, seconds: float) -> float:
    """Of so many bytes in so many seconds."""
    return float(f"{8e-9 * size / seconds:.3g}")


def mismatches(name: str, found: Found) -> list[str]:
    """A sentence where the link is not what was asked for."""
    if abs(found.gbit_s / found.asked_gbit_s - 1) <= TOLERANCE:
        return []
    return [
        f"link={name} was asked for, {found.asked_gbit_s:g} Gbit/s, and the workers found {found.gbit_s:g} "
        "between nodes; choose a link that this machine's cores can carry, wait until it is quiet, "
        f"{OTHERWISE}"
    ]
