"""What a replay says of an exchange against what the exchange sent, on virtual ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter

import sparsify
from sparsify.comm import virtual
from sparsify.cost import Link, Network
from sparsify.method import Method
from sparsify.replay import BucketTraffic, ExchangeReplay, load_imbalance
from sparsify.types import SparseVector
from sparsify.wrappers.aggregator import Aggregator

N = 1600
DENSITY = 0.05
STEPS = 6
NETWORK = Network(Link(1e-4, 1e-8))
# Words that change what travels, beside every method's own.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("topk", {}),
    ("topk", {"index": "delta16", "value": "bf16"}),
    ("topk", {"packed": False}),
    ("randomk", {}),
    ("randomk", {"exchange": "allreduce", "shared": True}),
    ("blockrandomk", {}),
    ("blockrandomk", {"exchange": "allreduce"}),
    ("gaussiank", {}),
    ("gaussiank", {"rule": "published"}),
    ("dgc", {"scope": "global"}),
    ("hardthreshold", {}),
    ("sidco", {}),
    ("gtopk", {}),
    ("sparcml", {}),
    ("sparcml", {"value": "fp16"}),
    ("sparcml", {"dense_at": 0.01}),
    ("oktopk", {}),
    ("oktopk", {"threshold_every": 2, "regions_every": 3}),
    ("oktopk", {"balance": False, "value": "bf16", "index": "int64"}),
    ("scalecom", {}),
    ("stable_topk", {"block": 16, "every": 2}),
]


def build(name: str, **words: Any) -> Method:
    if "density" in sparsify.defaults(name):
        words["density"] = DENSITY
    method: Method = sparsify.build(name, **words)
    return method


class Lived(NamedTuple):
    """One rank's steps."""

    parts: list[SparseVector]
    sent_bytes: list[int]


def live(method: Method, size: int, skew: float = 0.0) -> list[Lived]:
    """Make some steps on random gradients that have more in common the larger `skew` is, and are larger in
    front.
    """

    def body(comm: virtual.VirtualComm) -> Lived:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(N // 10, 10)))], comm, select="torch")
        own, common = (torch.Generator().manual_seed(seed) for seed in (comm.rank + 1, 0))
        parts, sent = list[SparseVector](), list[int]()
        for _ in range(STEPS):
            gradient = torch.randn(N, generator=own) + skew * torch.randn(N, generator=common)
            aggregator.gradients.flat.copy_(gradient * torch.linspace(1 + skew, 1, N))
            report = aggregator.aggregate(
                selection_hook=lambda acc, part: parts.append(SparseVector(*map(torch.clone, part)))
            )
            sent.append(report.wire_bytes)
        return Lived(parts, sent)

    return virtual.run(size, body, NETWORK)


def replay(method: Method, lived: list[Lived]) -> list[BucketTraffic]:
    replay = ExchangeReplay(method, N, len(lived))
    return [replay.replay_step([rank.parts[step] for rank in lived if rank.parts]) for step in range(STEPS)]


@pytest.mark.parametrize(("name", "words"), CASES)
def test_a_replay_counts_what_the_exchange_sent(name: str, words: dict[str, Any]) -> None:
    method = build(name, **words)
    for size, skew in ((1, 0.0), (2, 2.0), (4, 0.0), (7, 2.0), (8, 0.0), (8, 2.0)):
        lived = live(method, size, skew)
        for step, traffic in enumerate(replay(method, lived)):
            assert traffic.sent_bytes == [rank.sent_bytes[step] for rank in lived], (size, skew, step)


@pytest.mark.parametrize("name", ["dense", "topk", "gtopk", "sparcml", "oktopk", "scalecom"])
def test_its_time_is_what_virtual_ranks_are_charged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prices = list[float]()
    meet = virtual.VirtualCluster.carry_out_collective

    def complete(cluster: virtual.VirtualCluster) -> None:
        prices.append(max(call.cost_s or 0.0 for call in cluster.calls.values()))
        meet(cluster)

    monkeypatch.setattr(virtual.VirtualCluster, "carry_out_collective", complete)
    method = build(name)
    traffic = replay(method, live(method, 8, skew=1.0))
    assert sum(step.simulated_seconds(NETWORK) for step in traffic) == pytest.approx(sum(prices), rel=1e-12)


def test_messages_are_the_latency_terms_of_the_collectives() -> None:
    """Merges, then a broadcast: the last merge and one round of the broadcast go between nodes of four."""
    traffic = ExchangeReplay(build("gtopk"), N, 8).replay_step([])
    assert traffic.messages == 3 + 3
    assert traffic.simulated_seconds(Network(Link(1.0, 0.0))) == 6
    two_nodes = Network(Link(1.0, 0.0), Link(1e-6, 0.0), workers_per_node=4)
    assert traffic.simulated_seconds(two_nodes) == pytest.approx(2, abs=1e-4)


def test_balance_is_the_largest_share_over_the_mean() -> None:
    assert [load_imbalance(loads) for loads in ([1, 1, 1, 1], [4, 0, 0, 0], [0, 0])] == [1, 4, 1]


def test_what_exchanges_no_selections_is_refused() -> None:
    with pytest.raises(ValueError, match="exchanges no selections"):
        ExchangeReplay(build("powersgd"), N, 2)
    with pytest.raises(ValueError, match="ExDyna chooses by what the gradient holds"):
        ExchangeReplay(build("exdyna"), N, 2).replay_step([])
