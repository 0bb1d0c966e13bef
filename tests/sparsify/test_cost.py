"""Counted bytes against the literature's words, for float32 gradients: words of 4 bytes."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import sparsify
from sparsify import cost
from sparsify.comm import CountingComm, virtual
from sparsify.core.selections import Generated, Statistics
from sparsify.cost import Link, Network
from sparsify.methods.oktopk import SplitReduceBalance
from sparsify.replay import Replay
from sparsify.types import BucketContext, Sparse
from tests.sparsify.laws import gradient, live

ANNOUNCED = 8  # bytes of a length


def counted(name: str, size: int, make: Any, n: int, steps: int = 1, **choices: Any) -> int:
    lived = live(sparsify.build(name, **choices), size, steps, make, [(n,)], dtype=torch.float32)
    return max(rank.counted_bytes[-1] for rank in lived)


def words(scheme: str, n: int, k: int, size: int) -> tuple[int, int]:
    """The published bandwidth terms in whole bytes."""
    least, most, _ = cost.published(scheme, n, k, size)
    return int(4 * least), int(4 * most)


@pytest.mark.parametrize("k", [16, 160])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("scheme", "name", "choices"),
    [
        ("dense", "dense", {}),
        ("topka", "topk", {}),
        ("gaussiank", "gaussiank", {}),
        ("gtopk", "gtopk", {}),
        ("randomk allgather", "randomk", {}),
        ("randomk allreduce", "randomk", {"exchange": "allreduce", "shared": True}),
        ("blockrandomk allgather", "blockrandomk", {}),
        ("blockrandomk allreduce", "blockrandomk", {"exchange": "allreduce"}),
        ("scalecom", "scalecom", {}),
    ],
)
def test_counted_bytes_are_the_published_words(
    scheme: str, name: str, choices: dict[str, Any], size: int, k: int
) -> None:
    n = 1600
    if name != "dense":
        choices = {**choices, "density": k / n}
    least, most = words(scheme, n, k, size)
    assert least == most == counted(name, size, gradient, n, **choices)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sparcml_reaches_both_ends_of_its_published_words(size: int) -> None:
    """All workers choose alike and evenly: pairs. All choose differently: dense regions."""
    n, k = 3200, 160
    announced = 2 * ANNOUNCED * (size - 1)
    evenly = torch.zeros(n)
    evenly[:: n // k] = 1.0
    least, _ = words("topkdsa", n, k, size)
    alike = counted("sparcml", size, lambda r, s, shape: evenly, n, density=k / n)
    assert alike - announced == least
    k = n // 2
    own = [torch.arange(n).remainder(2).eq(rank % 2).float() for rank in range(size)]
    apart = counted("sparcml", size, lambda r, s, shape: own[r], n, density=0.5)
    assert apart - announced == words("topkdsa", n, k, size)[1]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sparcml_is_dense_where_padded_pairs_would_be_longer(size: int) -> None:
    """All select the whole of one region: few in all, but everybody's message is as long as its owner's."""
    n = 3200
    k = n // size
    first = torch.arange(n).lt(k).float()
    found = counted("sparcml", size, lambda r, s, shape: first, n, density=k / n)
    away = 2 * k  # words of pairs; a worker that owns nothing of what it selected sends all of it
    assert found - 2 * ANNOUNCED * (size - 1) == 4 * (away + n * (size - 1) // size)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16])
def test_oktopks_exact_step_stays_within_the_published_words(size: int) -> None:
    """On random gradients. Beside the words: three announcements (proposed borders; lengths of pieces; how
    many are left), and the sums that the global threshold is taken from.
    """
    n, k = 3200, 160

    def body(comm: virtual.VirtualComm) -> tuple[int, list[int], torch.Tensor]:
        own = torch.Generator().manual_seed(comm.rank)
        acc, exchange = torch.randn(n, generator=own), SplitReduceBalance()
        chosen = acc.abs().topk(k).indices
        state = exchange.init(acc, BucketContext(0, comm.rank, 0))
        counting = CountingComm(comm)
        exchange.exchange(Sparse(chosen, acc[chosen]), n, k, counting, state)
        everybodys = torch.cat(comm.all_gather(chosen)).unique()
        return counting.sent_bytes, state.borders, everybodys

    for sent_bytes, borders, everybodys in virtual.run(size, body):
        owned = torch.diff(torch.searchsorted(everybodys, torch.tensor(borders)))
        sums = 4 * int(owned.max()) * (size - 1)
        announced = ANNOUNCED * (size - 1) * (size - 1) + 2 * ANNOUNCED * (size - 1)
        assert sent_bytes - sums - announced <= words("oktopk", n, k, size)[1]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_oktopk_reaches_the_published_upper_end_and_not_more(size: int) -> None:
    """Everybody's large values lie in region 0, at places of their own, and as many small ones in each of the
    other regions: worker 0 sends pairs to all owners, then most of what it owns, then its share.
    """
    n, k = 3200, 160
    share, length = k // size, n // size
    made = torch.zeros(size, n)
    for rank in range(size):
        made[rank, torch.arange(share) * size + rank] = 100.0
        for region in range(1, size):
            made[rank, region * length + torch.arange(share)] = 1.0
    found = counted("oktopk", size, lambda r, s, shape: made[r], n, steps=2, density=k / n)
    announced = 2 * ANNOUNCED * (size - 1)
    assert found - announced == words("oktopk", n, k, size)[1]


def test_oktopk_reaches_the_published_lower_end() -> None:
    """Two workers that select in their own halves only, a half of it large: nothing to send to owners."""
    n, k = 3200, 160
    made = torch.zeros(2, n)
    for rank in range(2):
        made[rank, rank * n // 2 + torch.arange(k)] = 1.0
        made[rank, rank * n // 2 + torch.arange(0, k, 2)] = 100.0
    found = counted("oktopk", 2, lambda r, s, shape: made[r], n, steps=2, density=k / n)
    assert found - 2 * ANNOUNCED == words("oktopk", n, k, 2)[0]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_oktopks_volume_settles_within_the_published_words(size: int) -> None:
    """On random gradients, whose residuals grow at first: a threshold is too low after a step already."""
    n, k, steps = 1600, 80, 30
    lived = live(sparsify.build("oktopk", density=k / n), size, steps, gradient, [(n,)], dtype=torch.float32)
    announced = 2 * ANNOUNCED * (size - 1)
    settled = [max(rank.counted_bytes[step] for rank in lived) - announced for step in range(15, steps)]
    assert statistics.median(settled) <= words("oktopk", n, k, size)[1]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("name", "scheme", "least", "most"),
    [
        ("dense", "dense", 1, 1),
        ("topk", "topka", 1, 1),
        ("gtopk", "gtopk", 1, 1),
        ("gaussiank", "gaussiank", 0.5, 0.5),  # it sends exactly k: no lengths need to be gathered first
        ("sparcml", "topkdsa", 1, 2),  # lengths are announced before pieces are sent
        ("oktopk", "oktopk", 0.8, 2),  # and of two workers none has pieces to hand on
    ],
)
def test_latency_terms_are_the_published_ones(
    name: str, scheme: str, least: float, most: float, size: int
) -> None:
    n, k = 3200, 160
    replay = Replay(sparsify.build(name, **({} if name == "dense" else {"density": k / n})), n, size)
    selections = Generated(Statistics(k / n, 0.3), n, size)
    replay.next(selections)  # thresholds, which are re-used
    expected = cost.published(scheme, n, k, size).messages
    assert least * expected <= replay.next(selections).messages <= most * expected


def test_unknown_schemes_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no scheme 'ring'; there are: dense, topka, topkdsa, gtopk"):
        cost.published("ring", 1, 1, 1)


def test_the_cost_table_of_vgg16_on_8_workers() -> None:
    """n = 14,728,266, k = 14,728: megabytes as tabulated in the literature's forms."""
    n, k, size = 14_728_266, 14_728, 8
    table = {
        "dense": (103.1e6, 103.1e6),
        "topka": (824.8e3, 824.8e3),
        "topkdsa": (206e3, 51.7e6),
        "gtopk": (707e3, 707e3),
        "oktopk": (103e3, 309e3),
        "randomk allreduce": (103.1e3, 103.1e3),
        "blockrandomk allgather": (412.4e3, 412.4e3),
    }
    for scheme, (least, most) in table.items():
        found = cost.published(scheme, n, k, size)
        assert float(4 * found.least) == pytest.approx(least, rel=5e-3)
        assert float(4 * found.most) == pytest.approx(most, rel=5e-3)


SLOW, FAST = Link(50e-6, 8e-9), Link(2e-6, 1e-10)
CALLS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize(
    ("alpha", "beta"), [(-1e-6, 0.0), (0.0, -1e-9), (0.0, float("inf")), (float("nan"), 0.0)]
)
def test_links_without_a_bandwidth_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match=r"out of range: it must be a number of at least 0"):
        Link(alpha, beta)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_flat_network_is_its_link(call: str, size: int) -> None:
    price = SLOW.seconds(cost.TEXTBOOK[call](1000, size))
    assert Network(SLOW).seconds(call, 1000, size) == price
    assert Network(SLOW, per_node=4).seconds(call, 1000, size) == price


@pytest.mark.parametrize("call", CALLS)
def test_a_network_is_flat_where_all_workers_share_a_node_or_none_do(call: str) -> None:
    inside, between = (link.seconds(cost.TEXTBOOK[call](1000, 4)) for link in (FAST, SLOW))
    assert Network(SLOW, FAST, 4).seconds(call, 1000, 4) == inside
    assert Network(SLOW, FAST, 8).seconds(call, 1000, 4) == inside
    assert Network(SLOW, FAST, 1).seconds(call, 1000, 4) == between


BYTE = Link(0.0, 1.0)  # seconds are bytes
NONE = Link(0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "inside", "between"),
    [
        ("all_reduce", 2 * 1200 * 3 // 4, 2 * 1200 * 1 // 2),
        ("all_gather", 3 * 2 * 1200, 4 * 1200),  # 7 m arrive at each worker: one over its link, 6 inside
        ("all_to_all", 1200 * 3 // 7, 4 * (1200 - 1200 * 3 // 7)),  # 4 of 7 others are on the other node
        ("broadcast", 2 * 1200, 1200),
    ],
)
def test_bytes_over_both_links_of_two_nodes_of_four(call: str, inside: int, between: int) -> None:
    assert Network(NONE, BYTE, 4).seconds(call, 1200, 8) == inside
    assert Network(BYTE, NONE, 4).seconds(call, 1200, 8) == between


def test_a_way_is_paid_as_often_as_an_algorithm_waits_for_it() -> None:
    far = Link(0.0, 0.0, way_s=1.0)
    ways = {
        name: [Network(far, algorithm=name).seconds(call, 100, 8) for call in ("all_reduce", "all_gather")]
        for name in cost.ALGORITHMS
    }
    assert ways == {"textbook": [6, 3], "gloo": [28, 14], "direct": [4, 2]}
    assert Network(far, algorithm="direct").permute_seconds(100, [(0, 1)]) == 2
    assert Network(far, algorithm="direct").seconds("all_reduce", 100, 2) == 2
    assert Network(far).permute_seconds(100, []) == 0
    # Between two nodes of four workers as between two workers; inside there is none.
    assert Network(far, Link(0.0, 0.0), 4, "gloo").seconds("all_reduce", 100, 8) == 4


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
def test_one_worker_has_no_way_to_go(algorithm: str) -> None:
    far = Network(Link(1.0, 1.0, 1.0, 10.0), algorithm=algorithm)
    assert all(far.seconds(call, 100, 1) == 0 for call in ("all_reduce", "all_gather", "broadcast"))


def test_a_window_doubles_until_it_holds_what_the_link_does() -> None:
    link = Link(0.0, 1.0, way_s=8.0, first_bytes=2.0)  # a round trip carries 16 bytes
    # It sends 2 and waits for 14 seconds, 4 and waits for 12, 8 and waits for 8; 16 fill the round trip.
    assert [link.opening_s(sent) for sent in (2, 3, 6, 7, 14, 15, 1000)] == [0, 14, 14, 26, 26, 34, 34]
    assert link.opening_s(1000, connections=2) == 12 + 8  # as if it had begun with 4
    assert Link(0.0, 1.0, way_s=8.0).opening_s(1000) == 0
    assert Network(link).seconds("all_reduce", 1000, 2) == 1000 + 34 + 2 * 8


def test_a_permutation_takes_as_long_as_its_busiest_node() -> None:
    within, across = [(0, 1), (2, 3)], [(0, 2), (1, 3), (2, 0)]
    network = Network(BYTE, Link(0.0, 0.5), 2)
    assert network.permute_seconds(100, within) == 50
    assert network.permute_seconds(100, across) == 200  # two leave node 0; what arrives does not slow them
    assert network.permute_seconds(100, within + across) == 200
    assert network.permute_seconds(100, []) == 0
    assert Network(SLOW).permute_seconds(100, across) == SLOW.seconds(cost.Cost(1, 100))


def test_gloo_pays_a_latency_for_every_step_of_its_rings() -> None:
    one = Link(1.0, 0.0)
    gloo, textbook = Network(one, algorithm="gloo"), Network(one)
    assert [gloo.seconds("all_reduce", 100, size) for size in (1, 2, 4, 8)] == [0, 2, 6, 14]
    assert [textbook.seconds("all_reduce", 100, size) for size in (1, 2, 4, 8)] == [0, 2, 4, 6]
    assert [gloo.seconds("all_gather", 100, size) for size in (1, 2, 4, 8)] == [0, 1, 3, 7]


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_algorithm_sends_other_bytes_than_are_counted(algorithm: str, size: int) -> None:
    forms = cost.ALGORITHMS[algorithm]
    assert forms.keys() == cost.TEXTBOOK.keys()
    for call, form in forms.items():
        assert form(1000, size).sent_bytes == cost.TEXTBOOK[call](1000, size).sent_bytes


def test_impossible_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="per_node=0: a node has at least one worker"):
        Network(SLOW, FAST, 0)
    with pytest.raises(ValueError, match="no algorithm 'tree'; there are: textbook, gloo, direct"):
        Network(SLOW, algorithm="tree")


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("textbook", 2 * 3 + 3 + 3 + 1), ("gloo", 14 + 7 + 3 + 1)]
)
def test_latency_terms_are_counted_as_the_backend_pays_them(algorithm: str, expected: int) -> None:
    """Of an allreduce, an allgather, a broadcast and a permutation, on 8 workers."""

    def body(comm: virtual.VirtualComm) -> int:
        comm.algorithm = algorithm
        counting, one = CountingComm(comm), torch.ones(1)
        counting.all_reduce(one)
        counting.all_gather(one)
        counting.broadcast(one)
        counting.permute(one, [(0, 1)])
        return counting.messages

    assert virtual.run(8, body) == [expected] * 8


def test_what_collectives_should_take_is_added_up_where_links_are_known() -> None:
    links = {"all_reduce": Link(1.0, 0.0), "broadcast": Link(0.0, 1.0)}

    def body(comm: virtual.VirtualComm) -> float:
        comm.links = links
        counting, one = CountingComm(comm), torch.ones(1)
        counting.all_reduce(one)
        counting.broadcast(one)
        counting.all_gather(one)  # of which nothing is known
        return counting.predicted_s

    assert virtual.run(4, body) == [4.0 + 8.0] * 4
