"""Replays of an exchange against what the exchange sent, on virtual ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter

import sparsify
from sparsify.comm import virtual
from sparsify.cost import Link, Network
from sparsify.method import Method
from sparsify.replay import BucketTraffic, ExchangeReplay
from sparsify.types import SparseVector
from sparsify.wrappers.aggregator import Aggregator
from tests.sparsify import laws
from tests.sparsify.comm.test_virtual import Instant
from tests.sparsify.laws import parse_choices

N = 1600
DENSITY = 0.05
STEPS = 6
NETWORK = Network(Link(1e-4, 1e-8))
# Words that change what travels, beside every method's own.
CASES = """
    dense
    topk
    topk index=delta16 value=bf16
    topk packed=false
    randomk
    randomk exchange=allreduce shared=true
    blockrandomk
    blockrandomk exchange=allreduce
    gaussiank
    gaussiank rule=published
    dgc scope=global
    hardthreshold
    sidco
    gtopk
    sparcml
    sparcml value=fp16
    sparcml dense_at=0.01
    oktopk
    oktopk threshold_every=2 regions_every=3
    oktopk balance=false value=bf16 index=int64
    scalecom
    stable_topk block=16 every=2
"""


def build(name: str, **choices: Any) -> Method:
    return laws.build(name, DENSITY, **{"scope": sparsify.defaults(name).get("scope"), **choices})


class Lived(NamedTuple):
    """Steps of one rank."""

    parts: list[SparseVector]
    sent_bytes: list[int]
    seconds: float  # charged


def live(method: Method, size: int, skew: float = 0.0) -> list[Lived]:
    """Make some steps on random gradients, larger in front, that have more in common the larger `skew` is."""

    def body(comm: virtual.VirtualComm) -> Lived:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(N // 10, 10)))], comm, select="torch")
        own, common = (torch.Generator().manual_seed(seed) for seed in (comm.rank + 1, 0))
        parts, sent = list[SparseVector](), list[int]()
        start = comm.record_mark()
        for _ in range(STEPS):
            gradient = torch.randn(N, generator=own) + skew * torch.randn(N, generator=common)
            aggregator.gradients.flat.copy_(gradient * torch.linspace(1 + skew, 1, N))
            report = aggregator.aggregate(
                selection_hook=lambda acc, part: parts.append(SparseVector(*map(torch.clone, part)))
            )
            sent.append(report.wire_bytes)
        return Lived(parts, sent, start.elapsed_time(comm.record_mark()) / 1e3)

    return virtual.run(size, body, NETWORK, record_event=lambda: Instant(0.0))


def replay(method: Method, lived: list[Lived]) -> list[BucketTraffic]:
    replay = ExchangeReplay(method, N, len(lived))
    return [replay.replay_step([rank.parts[step] for rank in lived if rank.parts]) for step in range(STEPS)]


@pytest.mark.parametrize(("name", "choices"), [*map(parse_choices, CASES.strip().splitlines())])
def test_a_replay_counts_what_the_exchange_sent(name: str, choices: dict[str, Any]) -> None:
    method = build(name, **choices)
    for size, skew in ((1, 0.0), (2, 2.0), (4, 0.0), (7, 2.0), (8, 0.0), (8, 2.0)):
        lived = live(method, size, skew)
        for step, traffic in enumerate(replay(method, lived)):
            assert traffic.sent_bytes == [rank.sent_bytes[step] for rank in lived], (size, skew, step)


@pytest.mark.parametrize("name", ["dense", "topk", "gtopk", "sparcml", "oktopk", "scalecom"])
def test_its_time_is_what_virtual_ranks_are_charged(name: str) -> None:
    method = build(name)
    lived = live(method, 8, skew=1.0)
    seconds = sum(step.simulated_seconds(NETWORK) for step in replay(method, lived))
    assert seconds == pytest.approx(lived[0].seconds, rel=1e-12)


def test_what_exchanges_no_selections_is_refused() -> None:
    with pytest.raises(ValueError, match="exchanges no selections"):
        ExchangeReplay(build("powersgd"), N, 2)
    with pytest.raises(ValueError, match="ExDyna chooses by what the gradient holds"):
        ExchangeReplay(build("exdyna"), N, 2).replay_step([])
