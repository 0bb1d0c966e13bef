"""Probes of an emulated link, by the workers, over the network that the run will use."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.records.files import try_read_struct
from experiments.config.machines import LinkSettings
from experiments.worker.hardware_claims import LABEL_ADVICE
from slurm.emulated import counters
from slurm.emulated.network import LONG_DELAY_S
from sparsify.comm import Comm, CountingComm, gather_json
from sparsify.comm.direct import DIRECT_KINDS, DirectComm
from sparsify.cost import TEXTBOOK, CollectiveCost, Link

CPU = torch.device("cpu")
COMPUTED = 2**20  # elements
PASSES = 16  # over these elements: some ms of computing
# What a transfer takes at least, at the bandwidth asked for.
MIN_TRANSFER_S = 0.1
MIN_DELAYS = 20
MIN_BYTES = 2**18
MAX_BYTES = 2**26
TOLERANCE = 0.1  # of the bandwidth asked for; headers take 0.05 of Ethernet's


class ProbeEffort(NamedTuple):
    """The numbers and sizes of what a probe sends."""

    round_trips: int
    transfer_repeats: int
    collective_sizes: tuple[int, ...]  # bytes of one of P parts
    collective_rounds: int  # after a first one in which memory is mapped
    num_sizes_beside_computing: int  # so many of the sizes are tried beside computing as well
    tries_direct: bool = False  # try as well what is sent to everybody at once


# From 1 MiB on, gloo's two directions of a connection may take turns.
NEAR = ProbeEffort(20, 5, (2**9, 2**13, 2**16, 2**18, 2**19), 11, num_sizes_beside_computing=2)
# Waiting for cores is nothing beside a long way.
FAR = ProbeEffort(3, 2, (2**9, 2**17, 2**19), 2, num_sizes_beside_computing=0, tries_direct=True)


class ProbedLink(NamedTuple):
    """The link as the probe found it; the same on all workers."""

    asked_gbit_s: float
    pairs_gbit_s: list[float]  # from each node to the next, one or a few of them at a time
    together_gbit_s: float  # of the slowest, with all nodes sending to the next and receiving at once
    asked_latency_s: float
    latency_s: float  # half of a round trip of a few bytes between two workers, the largest of all pairs
    # As in `CollectiveFits`, if that was asked for.
    kinds: dict[str, tuple[float, float]] | None = None
    computing_s: float | None = None
    direct: dict[str, tuple[float, float]] | None = None
    direct_bytes: dict[str, float] | None = None

    @property
    def slowest_gbit_s(self) -> float:
        """The bandwidth that every node had, whatever the others did."""
        return min(*self.pairs_gbit_s, self.together_gbit_s)

    def to_record(self) -> dict[str, Any]:
        """Return the fields that were asked for, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def probe_link(
    comm: Comm, link: LinkSettings, workers_per_node: int, probes_collectives: bool = True
) -> ProbedLink:
    """Measure bandwidth, delay and collectives of a link. Collective.

    Takes about 5 seconds at 4 nodes and 1 Gbit/s, and several times that over long links.

    Args:
        link: settings with alpha and beta.
        workers_per_node: number of workers on a node, of which the first takes part.
        probes_collectives: measure collectives too, which over a long link takes most of the time.
    """
    beta_s_per_byte = link.beta_s_per_byte
    assert beta_s_per_byte, "the network was refused without it"
    assert link.alpha_s is not None
    senders = range(0, comm.size, workers_per_node)
    ring = [(rank, senders[(index + 1) % len(senders)]) for index, rank in enumerate(senders)]
    effort = NEAR if link.alpha_s < LONG_DELAY_S else FAR
    size = round(
        min(max(max(MIN_TRANSFER_S, MIN_DELAYS * link.alpha_s) / beta_s_per_byte, MIN_BYTES), MAX_BYTES)
    )
    message = torch.zeros(1)
    bulk = torch.zeros(size // 4)
    # Over a long way every second node at once, which takes as long as one: none sends to two, or hears two.
    routes = [*filter(None, (ring[::2], ring[1::2]))] if effort is FAR else [[pair] for pair in ring]
    comm.permute(bulk, ring)  # connections are made, and TCP's windows opened
    round_trips = [partial(ping_pong, comm, message, message, route) for route in routes]
    round_trips_s = _fastest_seconds(comm, round_trips, effort.round_trips)
    transfers = [partial(ping_pong, comm, bulk, message, route) for route in routes]
    transfers_s = _fastest_seconds(comm, transfers, effort.transfer_repeats)
    ring_s = min(
        _fastest_seconds(comm, [partial(comm.permute, bulk, ring)] * effort.transfer_repeats, rounds=1)
    )
    return ProbedLink(
        asked_gbit_s=to_gbit_s(1.0, beta_s_per_byte),
        pairs_gbit_s=[
            to_gbit_s(size, there_s - back_s)
            for there_s, back_s in zip(transfers_s, round_trips_s, strict=True)
        ],
        together_gbit_s=to_gbit_s(size, ring_s - max(round_trips_s)),
        asked_latency_s=link.alpha_s,
        latency_s=max(round_trips_s) / 2,
        **(vars(measure_and_fit_collectives(comm, ring[0], effort)) if probes_collectives else {}),
    )


def ping_pong(comm: Comm, data: Tensor, answer: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Send data and wait for an answer: the senders know from it that the data have come."""
    comm.permute(data, pairs)
    comm.permute(answer, [(receiver, sender) for sender, receiver in pairs])


def _fastest_seconds(comm: Comm, transfers: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the seconds of each transfer, which all workers begin together, until the last has ended it.

    What else the machine does can only make it slower: the fastest of several rounds is the link's.
    """
    seconds_by_transfer = list[list[float]]()
    for transfer in transfers:
        comm.barrier()
        ends = [time.perf_counter()]
        for _ in range(rounds):
            transfer()
            ends.append(time.perf_counter())
        seconds_by_transfer.append(np.diff(ends).tolist())
    seconds_by_worker = np.array(gather_json(comm, seconds_by_transfer, CPU))  # (workers, transfers, rounds)
    fastest: list[float] = seconds_by_worker.max(axis=0).min(axis=-1).tolist()
    return fastest


@dataclass(frozen=True)
class CollectiveFits:
    """Fitted costs of collectives; the same on all workers."""

    kinds: dict[str, tuple[float, float]]  # of each: alpha and beta, fitted to a few sizes
    computing_s: float = 0.0  # that an exchange takes longer where workers compute before and after it
    # Of each that is sent to everybody at once, where a way is long, and the bytes up to which that was
    # quicker, of those tried.
    direct: dict[str, tuple[float, float]] = field(default_factory=dict)
    direct_bytes: dict[str, float] = field(default_factory=dict)


def measure_and_fit_collectives(comm: Comm, pair: tuple[int, int], effort: ProbeEffort) -> CollectiveFits:
    """Fit alpha and beta of each kind of collective to times that all workers measure together. Collective.

    The times include how long workers on this machine's cores wait for each other; who has left a collective
    to compute takes a core from those who still receive. Kinds that may be sent to everybody at once
    (`sparsify.comm.direct`) are also timed so, and the bytes are noted up to which that was quicker than the
    backend's own at every size tried; of two workers, where it is never slower, the largest that was tried.
    Where many bytes come to a worker from all others at once, queues overflow.

    Kinds and sizes are mixed: what one leaves behind in TCP's windows meets another.

    Args:
        pair: from whom to whom a permutation goes.
    """
    direct_kinds = DIRECT_KINDS if effort.tries_direct and not comm.uses_torchcomms() else ()
    senders = [*((comm, kind) for kind in TEXTBOOK), *((DirectComm(comm), kind) for kind in direct_kinds)]
    cases = [
        [ProbeCase.create(sender, kind, size, pair) for size in effort.collective_sizes]
        for sender, kind in senders
    ]
    seconds = np.split(
        _median_seconds(comm, [*chain(*cases)], effort.collective_rounds, passes=0), len(senders)
    )
    backend_seconds = dict(zip(TEXTBOOK, seconds, strict=False))
    fits = CollectiveFits(
        {
            kind: _fit_cases(kind_cases, backend_seconds[kind])
            for kind, kind_cases in zip(backend_seconds, cases, strict=False)
        }
    )
    for kind, kind_cases, kind_seconds in zip(
        direct_kinds, cases[len(backend_seconds) :], seconds[len(backend_seconds) :], strict=True
    ):
        slower = (kind_seconds >= backend_seconds[kind]) & (comm.size > 2)
        num_faster = int(np.argmax(slower)) if slower.any() else len(slower)  # the first so many
        if num_faster:
            fits.direct[kind] = _fit_cases(kind_cases[:num_faster], kind_seconds[:num_faster])
            fits.direct_bytes[kind] = float(kind_cases[num_faster - 1].bytes_per_worker)
    count = effort.num_sizes_beside_computing
    if not count:
        return fits
    small_cases = [case for kind_cases in cases for case in kind_cases[:count]]
    computing_s = _median_seconds(comm, small_cases, effort.collective_rounds, PASSES)
    extra_s = computing_s - np.concatenate([kind_seconds[:count] for kind_seconds in seconds])
    return replace(fits, computing_s=max(0.0, float(np.median(extra_s))))


def _fit_cases(cases: Sequence[ProbeCase], seconds: np.ndarray) -> tuple[float, float]:
    return fit_alpha_beta([case.cost for case in cases], seconds)


def _median_seconds(comm: Comm, cases: Sequence[ProbeCase], rounds: int, passes: int) -> np.ndarray:
    """Return (cases,) seconds from when the last worker enters a collective until the last one leaves it.

    The median of all rounds but the first. The workers are processes of one machine, whose clock they share.
    Collective.

    Args:
        passes: number of passes over memory before each case.
    """
    spans_by_case: list[list[tuple[float, float]]] = [[] for _ in cases]
    order = random.Random(0)  # the same for all workers
    memory = torch.zeros(COMPUTED)
    for _ in range(1 + rounds):  # in the first one, memory is mapped
        for index in order.sample(range(len(cases)), len(cases)):
            for _ in range(passes):
                memory += 1
            comm.barrier()
            started_s = time.perf_counter()
            cases[index].run()
            spans_by_case[index].append((started_s, time.perf_counter()))
    spans_by_worker = np.array(gather_json(comm, spans_by_case, CPU))  # (workers, cases, rounds, 2)
    started_s, ended_s = np.moveaxis(spans_by_worker[:, :, 1:].max(axis=0), -1, 0)
    medians: np.ndarray = np.median(ended_s - started_s, axis=1)
    return medians


class ProbeCase(NamedTuple):
    """A kind of collective at one size."""

    kind: str
    requested_bytes: int
    run: Callable[[], object]
    cost: CollectiveCost
    bytes_per_worker: int  # that a worker brings

    @classmethod
    def create(
        cls,
        comm: Comm,
        kind: str,
        part_bytes: int,
        permuted_pair: tuple[int, int],
        device: torch.device = CPU,
    ) -> ProbeCase:
        """Return a case of a part for each worker; of all_gather a worker brings one, of the others all.

        Only a permutation goes from one of `permuted_pair` to the other.
        """
        share = max(1, part_bytes // 4)  # elements
        data = torch.zeros(share if kind == "all_gather" else share * comm.size, device=device)
        do: Mapping[str, Callable[[], object]] = {
            "all_reduce": partial(comm.all_reduce, data),
            "all_gather": partial(comm.all_gather, data),
            "all_to_all": partial(comm.all_to_all, data, [share] * comm.size, [share] * comm.size),
            "broadcast": partial(comm.broadcast, data),
            "permute": partial(comm.permute, data, [permuted_pair]),
        }
        sent = data.nbytes - 4 * share if kind == "all_to_all" else data.nbytes
        cost = comm.predict_cost(kind, sent, 1 if kind == "permute" else comm.size).cost
        return cls(kind, part_bytes, do[kind], cost, sent)


def fit_alpha_beta(costs: Sequence[CollectiveCost], seconds: np.ndarray) -> tuple[float, float]:
    """Return alpha and beta, neither negative, with the least sum of squared relative errors.

    Args:
        seconds: (cases,) one for each cost.
    """
    from scipy.optimize import nnls  # here, since only emulated links need it, and every worker would load it

    rows = np.array([(cost.messages, cost.sent_bytes) for cost in costs], dtype=float)
    scale = rows.max(axis=0)
    (alpha, beta), _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
    return float(alpha / scale[0]), float(beta / scale[1])


def to_gbit_s(size_bytes: float, seconds: float) -> float:
    """Return the Gbit/s of a transfer, to three digits."""
    return float(f"{8e-9 * size_bytes / seconds:.3g}")


def choose_comm_for_collectives(comm: Comm, collectives: str, probed: Mapping[str, Any] | None) -> Comm:
    """Return the communicator, or a `DirectComm` around it, by the setting `collectives`.

    Args:
        collectives: auto, backend or direct.
        probed: a `ProbedLink` as it is recorded; None where nothing was probed.
    """
    direct = fitted_link_by_kind(probed, "direct")
    if collectives == "direct":
        return DirectComm(comm, links=direct)
    if collectives != "auto" or not probed or not direct:
        return comm
    # Of two workers each has one that sends to it, and no queue overflows, whatever the size.
    return DirectComm(comm, probed["direct_bytes"] if comm.size > 2 else None, direct)


def fitted_link_by_kind(
    probed: Mapping[str, Any] | None, field_name: Literal["kinds", "direct"]
) -> dict[str, Link]:
    """Return the recorded costs of each kind of collective, from a field of a `ProbedLink`; else none."""
    return {kind: Link(*fit) for kind, fit in (probed or {}).get(field_name, {}).items()}


def read_relay_statistics(statistics_file: str | None) -> dict[str, Any]:
    """Return the last statistics of an emulated network's relay, for the record; empty without a relay."""
    statistics_by_name = try_read_struct(Path(statistics_file), dict[str, float]) if statistics_file else None
    return {"relay": statistics_by_name} if statistics_by_name else {}


def describe_bandwidth_mismatch(name: str, probed: ProbedLink, loses_packets: bool = False) -> list[str]:
    """Return a sentence where a link has another bandwidth than asked for; a list without any else.

    Where it loses packets, TCP may be slower.
    """
    deviation = probed.slowest_gbit_s / probed.asked_gbit_s - 1
    if abs(deviation) <= TOLERANCE or (loses_packets and deviation < 0):
        return []
    return [
        f"link={name} was asked for, {probed.asked_gbit_s:g} Gbit/s, and the workers found "
        f"{probed.slowest_gbit_s:g} between nodes; choose a link that this machine's cores can carry, wait "
        f"until it is quiet, {LABEL_ADVICE}"
    ]


# --- bytes of the interface, beside those that were counted


class TrafficMeter(CountingComm):
    """A wrapper of a communicator, which counts the bytes that this worker really sends.

    `sparsify.cost` counts otherwise: in a permutation and a broadcast not all send.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self.counters_at_start = counters.read_interface_counters()
        self.actual_bytes = 0.0
        self.calls = 0

    def permute(self, tensor: Tensor, route: Sequence[tuple[int, int]]) -> Tensor | None:
        self.actual_bytes += tensor.nbytes * sum(source == self.rank for source, _ in route)
        return super().permute(tensor, route)

    def barrier(self) -> None:
        self.calls += 1
        super().barrier()

    def lagged_max(self, number: int) -> int:
        self.calls += 1
        return super().lagged_max(number)

    def _count(self, kind: str, nbytes: int, size: int) -> None:
        super()._count(kind, nbytes, size)
        self.calls += 1
        if kind == "broadcast":  # each of the others gets it once, from whomever
            self.actual_bytes += nbytes * (size - 1) / size
        elif kind != "permute":
            self.actual_bytes += self.predict_cost(kind, nbytes, size).cost.sent_bytes

    def gather_traffic_totals(self) -> dict[str, float] | None:
        """Return the bytes and calls of all workers since the meter was made, for the record. Collective.

        None where the workers are on no nodes of their own.
        """
        now = counters.read_interface_counters()
        if self.counters_at_start is None or now is None:
            return None
        counts = [
            now.sent_bytes - self.counters_at_start.sent_bytes,
            self.actual_bytes,
            now.resent_segments - self.counters_at_start.resent_segments,
            self.calls,
        ]
        sums = np.array(gather_json(self.comm, counts, CPU), dtype=float).sum(axis=0)
        names = ("sent_bytes", "counted_bytes", "resent", "calls")
        return dict(zip(names, map(float, sums), strict=True))
