"""Counted bytes against the literature's words, of 4 bytes for float32 gradients; and prices of networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsify import cost
from sparsify.comm import CountingComm, virtual
from sparsify.core.synthetic_selections import SelectionStatistics, SyntheticSelections
from sparsify.cost import Link, Network
from sparsify.replay import ExchangeReplay
from tests.sparsify.laws import Make, build, gradient, live, parse_choices

ANNOUNCED = 8  # bytes of a length
SIZES = [2, 4, 8, 16]
N = 3200
K = 160


def count(name: str, size: int, make: Make, k: int = K, steps: int = 1, **choices: Any) -> int:
    """Return the most bytes that a worker sent in the last step."""
    lived = live(build(name, k / N, **choices), size, steps, make, [(N,)], torch.float32)
    return max(rank.counted_bytes[-1] for rank in lived)


def words(scheme: str, size: int, k: int = K) -> tuple[int, int]:
    """Return the published bandwidth terms in whole bytes."""
    published = cost.published_cost(scheme, N, k, size)
    return int(4 * published.least), int(4 * published.most)


@pytest.mark.parametrize(
    ("scheme", "of"),
    [
        ("dense", "dense"),
        ("topka", "topk"),
        ("gaussiank", "gaussiank"),
        ("gtopk", "gtopk"),
        ("randomk allgather", "randomk"),
        ("randomk allreduce", "randomk exchange=allreduce shared=true"),
        ("blockrandomk allgather", "blockrandomk"),
        ("blockrandomk allreduce", "blockrandomk exchange=allreduce"),
        ("scalecom", "scalecom"),
    ],
)
def test_counted_bytes_are_the_published_words(scheme: str, of: str) -> None:
    name, choices = parse_choices(of)
    for size in SIZES:
        for k in (16, 160):
            least, most = words(scheme, size, k)
            assert least == most == count(name, size, gradient, k, **choices), (size, k)


@pytest.mark.parametrize("size", SIZES)
def test_sparcml_reaches_both_ends_of_its_published_words(size: int) -> None:
    announced = 2 * ANNOUNCED * (size - 1)
    places = torch.arange(N)
    evenly = places.remainder(N // K).eq(0).float()  # all choose alike: pairs
    assert count("sparcml", size, lambda *where: evenly) - announced == words("topkdsa", size)[0]
    # All choose differently: dense regions.
    apart = count("sparcml", size, lambda rank, *where: places.remainder(2).eq(rank % 2).float(), N // 2)
    assert apart - announced == words("topkdsa", size, N // 2)[1]
    # All choose the whole of one region: few in all, but padded pairs would be as long as its owner's. A
    # worker that owns nothing of what it selected sends all of it, in 2k words.
    k = N // size
    one_region = count("sparcml", size, lambda *where: places.lt(k).float(), k)
    assert one_region - announced == 4 * (2 * k + N * (size - 1) // size)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_oktopk_reaches_the_published_upper_end_and_not_more(size: int) -> None:
    """Everybody's large values lie in region 0, at places of their own.

    As many small ones lie in each of the other regions: worker 0 sends pairs to all owners, then most of what
    it owns, then its share.
    """
    made = torch.zeros(size, size, N // size)
    for rank in range(size):
        made[rank, 1:, : K // size] = 1.0
        made[rank, 0, rank:K:size] = 100.0
    sent = count("oktopk", size, lambda rank, *where: made[rank].flatten(), steps=2)
    assert sent - 2 * ANNOUNCED * (size - 1) == words("oktopk", size)[1]


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
def test_latency_terms_are_the_published_ones(name: str, scheme: str, least: float, most: float) -> None:
    for size in SIZES:
        replay = ExchangeReplay(build(name, K / N), N, size)
        selections = SyntheticSelections(SelectionStatistics(K / N, 0.3), N, size)
        replay.replay_step(selections)  # thresholds, which are re-used
        expected = cost.published_cost(scheme, N, K, size).messages
        assert least * expected <= replay.replay_step(selections).messages <= most * expected, size


SLOW, FAST = Link(50e-6, 8e-9), Link(2e-6, 1e-10)
SECOND = Link(1.0, 0.0)  # seconds are messages
BYTE = Link(0.0, 1.0)  # seconds are bytes
NONE = Link(0.0, 0.0)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_a_network_is_one_link_where_all_workers_share_a_node_or_none_do(call: str) -> None:
    for size in (1, 2, 3, 8):
        inside, between = (link.transfer_seconds(cost.TEXTBOOK[call](1000, size)) for link in (FAST, SLOW))
        for flat in (Network(SLOW), Network(SLOW, workers_per_node=4), Network(SLOW, FAST, 1)):
            assert size == 1 or flat.collective_seconds(call, 1000, size) == between
        for per_node in (size, 8):
            assert Network(SLOW, FAST, per_node).collective_seconds(call, 1000, size) == inside


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
    assert Network(NONE, BYTE, 4).collective_seconds(call, 1200, 8) == inside
    assert Network(BYTE, NONE, 4).collective_seconds(call, 1200, 8) == between


# Of 1, 2, 4 and 8 workers.
MESSAGES_AND_WAYS = """
    textbook all_reduce   0 2 4 6   0 2 4 6
    textbook all_gather   0 1 2 3   0 1 2 3
    textbook all_to_all   0 1 3 7   0 1 1 1
    textbook broadcast    0 1 2 3   0 1 2 3
    gloo     all_reduce   0 2 6 14  0 4 12 28
    gloo     all_gather   0 1 3 7   0 2 6 14
    gloo     all_to_all   0 1 3 7   0 2 2 2
    gloo     broadcast    0 1 2 3   0 2 3 4
    direct   all_reduce   0 1 6 14  0 2 4 4
    direct   all_gather   0 1 3 7   0 2 2 2
    direct   all_to_all   0 1 3 7   0 2 2 2
    direct   broadcast    0 1 2 3   0 2 3 4
"""


@pytest.mark.parametrize("row", MESSAGES_AND_WAYS.strip().splitlines())
def test_messages_and_ways_are_those_of_an_algorithm_and_bytes_of_all(row: str) -> None:
    algorithm, call, *numbers = row.split()
    ways = list(map(int, numbers[4:]))
    far = Link(0.0, 0.0, propagation_s=1.0)
    networks = [Network(link, algorithm=algorithm) for link in (SECOND, far)]
    found = [network.collective_seconds(call, 100, size) for network in networks for size in (1, 2, 4, 8)]
    assert found == list(map(int, numbers))
    # Between two nodes of four workers as between two workers; inside there is no way.
    assert Network(far, NONE, 4, algorithm).collective_seconds(call, 100, 8) == ways[1]
    for size in (1, 2, 3, 8):
        assert (
            cost.ALGORITHMS[algorithm][call](1000, size).sent_bytes
            == cost.TEXTBOOK[call](1000, size).sent_bytes
        )


def test_a_permutation_takes_as_long_as_its_busiest_node() -> None:
    within, across = [(0, 1), (2, 3)], [(0, 2), (1, 3), (2, 0)]
    network = Network(BYTE, Link(0.0, 0.5), 2)
    assert network.permute_seconds(100, within) == 50
    assert network.permute_seconds(100, across) == 200  # two leave node 0; what arrives does not slow them
    assert network.permute_seconds(100, within + across) == 200
    assert network.permute_seconds(100, []) == 0
    assert Network(SLOW).permute_seconds(100, across) == SLOW.transfer_seconds(cost.CollectiveCost(1, 100))
    for algorithm, ways in (("textbook", 1), ("gloo", 2), ("direct", 2)):
        far = Network(Link(0.0, 0.0, propagation_s=1.0), algorithm=algorithm)
        assert [far.permute_seconds(100, route) for route in ([], within)] == [0, ways]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no scheme 'ring'; there are: dense, topka, topkdsa, gtopk"):
        cost.published_cost("ring", 1, 1, 1)
    with pytest.raises(ValueError, match="workers_per_node=0: a node has at least one worker"):
        Network(SLOW, FAST, 0)
    with pytest.raises(ValueError, match="no algorithm 'tree'; there are: textbook, gloo, direct"):
        Network(SLOW, algorithm="tree")
    for alpha, beta in ((-1e-6, 0.0), (0.0, -1e-9), (0.0, float("inf")), (float("nan"), 0.0)):
        with pytest.raises(ValueError, match=r"out of range: it must be a number of at least 0"):
            Link(alpha, beta)


def test_latency_terms_are_counted_as_the_backend_pays_them() -> None:
    """Count an allreduce, an allgather, a broadcast and a permutation, on 8 workers.

    Also check what these should take, where links are known.
    """

    def body(comm: virtual.VirtualComm) -> tuple[int, float]:
        comm.algorithm = "gloo"
        comm.links = {"all_reduce": SECOND, "broadcast": Link(0.0, 0.25)}
        counting = CountingComm(comm)
        tensor = torch.ones(1)
        counting.all_reduce(tensor)
        counting.all_gather(tensor)
        counting.broadcast(tensor)
        counting.permute(tensor, [(0, 1)])
        return counting.messages, counting.predicted_s

    assert virtual.run(8, body) == [(14 + 7 + 3 + 1, 14 + 3.0)] * 8
