"""What a replay says of an exchange against what the exchange sent, on virtual ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter

import sparsify
from sparsify.comm import virtual
from sparsify.cost import Link, Network
from sparsify.doors.aggregator import Aggregator
from sparsify.method import Method
from sparsify.replay import BucketTraffic, Replay, balance
from sparsify.types import Sparse

N, DENSITY, STEPS = 1600, 0.05, 6
LINK = Link(1e-4, 1e-8)
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


class Lived(NamedTuple):
    """One rank's steps."""

    parts: list[Sparse]
    sent_bytes: list[int]


def live(method: Method, size: int, skew: float = 0.0) -> list[Lived]:
    """Some steps on random gradients that have more in common the larger `skew` is, and are larger in
    front.
    """

    def body(comm: virtual.VirtualComm) -> Lived:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(N // 10, 10)))], comm, select="torch")
        own, common = torch.Generator().manual_seed(comm.rank + 1), torch.Generator().manual_seed(0)
        parts, sent = list[Sparse](), list[int]()
        for _ in range(STEPS):
            noise, shared = torch.randn(N, generator=own), torch.randn(N, generator=common)
            aggregator.gradients.flat.copy_((noise + skew * shared) * torch.linspace(1 + skew, 1, N))
            sent.append(aggregator.aggregate(watch=lambda acc, part: parts.append(part)).wire_bytes)
        return Lived([Sparse(*(field.clone() for field in part)) for part in parts], sent)

    return virtual.run(size, body, Network(LINK))


def replayed(method: Method, lived: list[Lived]) -> list[BucketTraffic]:
    replay = Replay(method, N, len(lived))
    steps = range(STEPS)
    return [replay.next([rank.parts[step] for rank in lived] if lived[0].parts else []) for step in steps]


@pytest.mark.parametrize("skew", [0.0, 2.0])
@pytest.mark.parametrize("size", [1, 2, 4, 7, 8])
@pytest.mark.parametrize(("name", "words"), CASES)
def test_a_replay_counts_what_the_exchange_sent(
    name: str, words: dict[str, Any], size: int, skew: float
) -> None:
    known = sparsify.defaults(name)
    own = {"density": DENSITY, **words} if "density" in known else words
    method = sparsify.build(name, **own)
    lived = live(method, size, skew)
    for step, traffic in enumerate(replayed(method, lived)):
        assert traffic.sent_bytes == [rank.sent_bytes[step] for rank in lived], step


@pytest.mark.parametrize("name", ["dense", "topk", "gtopk", "sparcml", "oktopk", "scalecom"])
def test_its_time_is_what_virtual_ranks_are_charged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, prices = 8, list[float]()
    meet = virtual.Cluster.complete

    def complete(cluster: virtual.Cluster) -> None:
        prices.append(max(call.price_s or 0.0 for call in cluster.calls.values()))
        meet(cluster)

    monkeypatch.setattr(virtual.Cluster, "complete", complete)
    method = sparsify.build(name, **({"density": DENSITY} if name != "dense" else {}))
    traffic = replayed(method, live(method, size, skew=1.0))
    assert sum(step.seconds(Network(LINK)) for step in traffic) == pytest.approx(sum(prices), rel=1e-12)


def test_messages_are_the_latency_terms_of_the_collectives() -> None:
    (traffic,) = [Replay(sparsify.build("gtopk", density=DENSITY), N, 8).next([])]
    assert traffic.messages == 3 + 3  # merges, then a broadcast
    assert traffic.seconds(Network(Link(1.0, 0.0))) == 6


def test_a_network_of_nodes_is_asked_for_each_collective() -> None:
    """Two nodes of four: the last merge and one round of the broadcast go between them."""
    network = Network(Link(1.0, 0.0), Link(1e-6, 0.0), per_node=4)
    traffic = Replay(sparsify.build("gtopk", density=DENSITY), N, 8).next([])
    assert traffic.seconds(network) == pytest.approx(2, abs=1e-4)


def test_oktopk_balances_what_owners_receive() -> None:
    """All select in the first tenth, which with regions of equal length is one owner's."""
    size, k = 4, 80
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    chosen = [torch.randperm(N // 10, generator=own)[:k] for own in generators]
    parts = [Sparse(indices, torch.ones(k)) for indices in chosen]
    loads = dict[str, float]()
    for name in ("sparcml", "oktopk"):
        traffic = Replay(sparsify.build(name, density=k / N), N, size).next(parts)
        pieces = max((one.arriving for one in traffic.collectives if one.arriving), key=sum)
        loads[name] = balance(pieces)
    assert loads["oktopk"] < 1.3
    assert loads["sparcml"] == size


def test_balance_is_the_largest_share_over_the_mean() -> None:
    assert balance([1, 1, 1, 1]) == 1
    assert balance([4, 0, 0, 0]) == 4
    assert balance([0, 0]) == 1


def test_what_exchanges_no_selections_is_refused() -> None:
    with pytest.raises(ValueError, match="exchanges no selections"):
        Replay(sparsify.build("powersgd"), N, 2)
    with pytest.raises(ValueError, match="ExDyna chooses by what the gradient holds"):
        Replay(sparsify.build("exdyna", density=DENSITY), N, 2).next([])
