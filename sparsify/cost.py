"""Closed forms: the bytes that one worker sends, the latency terms, and the alpha-beta time of every
collective.

Functions such as `all_reduce` are the textbook's: rings for allreduce and allgather with the latency terms of
a tree, a binomial tree for broadcast. They are the forms that Li and Hoefler 2022 (PPoPP, eqs. 1 to 3) and
the table of Zhang's Stable Top-K slides use, here in bytes. `ALGORITHMS` has others. `Network` turns a
collective into seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

LENGTH_BYTES = 8  # bytes of the int64 that announces a length


class CollectiveCost(NamedTuple):
    """Cost of one collective, for each worker."""

    messages: int  # latency terms, alpha each
    sent_bytes: int  # bandwidth terms, beta each: bytes that a worker on the critical path sends

    def __add__(self, other: Any) -> CollectiveCost:
        return CollectiveCost(self.messages + other.messages, self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True)
class Link:
    """A network in the alpha-beta model: seconds to start a message, and for each byte of it; finite, 0 or
    more.

    Args:
        propagation_s: seconds that a byte travels, of a link with distance. Messages that are in flight together
            share it: a collective takes `PROPAGATIONS` of them.
        initial_window_bytes: TCP's window where a connection begins, or begins anew after a pause. Infinite where
            windows stay as open as the link needs them.
    """

    alpha_s: float
    beta_s_per_byte: float
    propagation_s: float = 0.0
    initial_window_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "propagation_s"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise ValueError(
                    f"{name}={seconds} is out of range: it must be a number of at least 0; a negative or "
                    "zero bandwidth carries nothing"
                )

    def seconds(self, cost: CollectiveCost) -> float:
        """Seconds that a collective of this cost takes, but for its way."""
        return cost.messages * self.alpha_s + cost.sent_bytes * self.beta_s_per_byte

    def slow_start_s(self, nbytes: int, connections: int = 1) -> float:
        """Seconds in which nothing is sent, because TCP's window is smaller than what is under way: it begins
        with `initial_window_bytes`, doubles with each round trip (slow start), and waits for the rest of it until it
        holds what the link does. Cardwell, Savage and Anderson 2000, section II, without loss.

        Args:
            nbytes: of all connections together, which share the link.
        """
        window, stalled_s, sent, round_trip_s = self.initial_window_bytes * connections, 0.0, 0.0, 2 * self.propagation_s
        while sent + window < nbytes and window * self.beta_s_per_byte < round_trip_s:
            stalled_s += round_trip_s - window * self.beta_s_per_byte
            sent, window = sent + window, 2 * window
        return stalled_s


def num_tree_rounds(size: int) -> int:
    """ceil(log2 P)."""
    return (size - 1).bit_length()


def all_reduce(nbytes: int, size: int) -> CollectiveCost:
    """2 log P alpha + 2 (P-1)/P m beta, for a tensor of m bytes; the last fraction of a byte is dropped."""
    return CollectiveCost(2 * num_tree_rounds(size), 2 * nbytes * (size - 1) // size)


def all_gather(nbytes: int, size: int) -> CollectiveCost:
    """log P alpha + (P-1) m beta, where each worker brings m bytes."""
    return CollectiveCost(num_tree_rounds(size), nbytes * (size - 1))


def broadcast(nbytes: int, size: int) -> CollectiveCost:
    """log P (alpha + m beta); a worker on the critical path forwards the tensor log P times."""
    return CollectiveCost(num_tree_rounds(size), nbytes * num_tree_rounds(size))


def all_to_all(nbytes: int, size: int) -> CollectiveCost:
    """(P-1) alpha + m beta, for a worker that sends m bytes to all others together."""
    return CollectiveCost(size - 1, nbytes)


def permute(nbytes: int, pairs: int) -> CollectiveCost:
    """alpha + m beta: tensors of m bytes travel along all pairs at once. No pairs: nothing."""
    return CollectiveCost(1, nbytes) if pairs else CollectiveCost(0, 0)


def gather_uneven(longest_nbytes: int, size: int) -> CollectiveCost:
    """Lengths first, one int64 each; then all tensors, padded to the longest."""
    lengths, padded = all_gather(LENGTH_BYTES, size), all_gather(longest_nbytes, size)
    return lengths + padded if longest_nbytes else lengths


def exchange_pieces(nbytes: int, size: int) -> CollectiveCost:
    """Lengths first, one int64 to each other worker; then m bytes to all others together."""
    return all_to_all(LENGTH_BYTES * (size - 1), size) + all_to_all(nbytes, size)


def ring_all_reduce(nbytes: int, size: int) -> CollectiveCost:
    """Bytes of `all_reduce`, in 2 (P-1) steps around the ring."""
    return CollectiveCost(2 * (size - 1), all_reduce(nbytes, size).sent_bytes)


def ring_all_gather(nbytes: int, size: int) -> CollectiveCost:
    """Bytes of `all_gather`, in P-1 steps around the ring."""
    return CollectiveCost(size - 1, all_gather(nbytes, size).sent_bytes)


def direct_all_reduce(nbytes: int, size: int) -> CollectiveCost:
    """Bytes of `all_reduce`; a message to each other worker, twice; between two once
    (`sparsify.comm.direct`).
    """
    return CollectiveCost((1 if size == 2 else 2) * (size - 1), all_reduce(nbytes, size).sent_bytes)


def direct_all_gather(nbytes: int, size: int) -> CollectiveCost:
    """Bytes of `all_gather`; a message to each other worker, all at once."""
    return CollectiveCost(size - 1, all_gather(nbytes, size).sent_bytes)


CostFunction = Callable[[int, int], CollectiveCost]  # of bytes and workers; for `permute`, of bytes and pairs
RING_COLLECTIVES = ("all_reduce", "all_gather")  # of gloo
TEXTBOOK: Mapping[str, CostFunction] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "permute": permute,
}
# What each backend does, by the names of `sparsify.comm.Comm`. All send the same bytes; latency terms differ.
ALGORITHMS: Mapping[str, Mapping[str, CostFunction]] = {
    "textbook": TEXTBOOK,
    # facebookincubator/gloo: allreduce.cc and allgather.cc are rings of two segments in flight, broadcast.cc
    # a binomial tree, alltoallv.cc P-1 messages to each other worker in turn. torch's ProcessGroupGloo calls
    # them with their defaults.
    "gloo": {**TEXTBOOK, "all_reduce": ring_all_reduce, "all_gather": ring_all_gather},
    "direct": {**TEXTBOOK, "all_reduce": direct_all_reduce, "all_gather": direct_all_gather},
}
# How many ways a collective of P workers takes one after the other. In gloo's rings who sends waits for the
# word of who receives, which is a way as well; so it is of an all-to-all and a permutation, if all come at
# the same time. Those below in a broadcast's tree have sent their word long before.
Ways = Callable[[int], int]
_DISTANT: Mapping[str, Ways] = {
    "all_to_all": lambda size: 2 * (size > 1), "broadcast": lambda size: num_tree_rounds(size) + (size > 1),
    "permute": lambda size: 2,
}  # fmt: skip
PROPAGATIONS: Mapping[str, Mapping[str, Ways]] = {
    "textbook": {
        "all_reduce": lambda size: 2 * num_tree_rounds(size), "all_gather": num_tree_rounds,
        "all_to_all": lambda size: int(size > 1), "broadcast": num_tree_rounds, "permute": lambda size: 1,
    },
    "gloo": {
        **_DISTANT, "all_reduce": lambda size: 4 * (size - 1), "all_gather": lambda size: 2 * (size - 1),
    },
    "direct": {
        **_DISTANT, "all_reduce": lambda size: 2 * (size > 1) + 2 * (size > 2),
        "all_gather": lambda size: 2 * (size > 1),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """Network of P workers: one link, or a fast one inside each node and a slower one between nodes.

    Workers fill nodes in order of rank, `workers_per_node` to each. `between` belongs to a node: its workers share
    it. A collective over several nodes takes the part between nodes and the part inside one after another:

    - all_reduce: reduce-scatter inside, allreduce between nodes, allgather inside (Goyal et al. 2017,
      arXiv:1706.02677, section 4; Horovod's hierarchical allreduce). Inside m bytes over the p workers of a
      node, between m bytes over N nodes.
    - all_gather: each worker gathers from those of its own place on other nodes, p m bytes a node; then what
      each has inside, N m bytes.
    - broadcast: to one worker of each node, then inside.
    - all_to_all: the bytes that stay inside a node and those that leave it; a worker sends the same to each
      other one. The p workers of a node send p times as much over `between`.
    - permute: pairs inside and pairs between nodes at once. The busiest node sets the pace of the latter.

    Args:
        inside: None: as `between`, so that all workers are alike.
        workers_per_node: workers to a node; without `inside` it makes no difference.
        algorithm: whose latency terms, of `ALGORITHMS`.

    Raises:
        ValueError: no workers to a node, or an unknown algorithm.
    """

    between: Link
    inside: Link | None = None
    workers_per_node: int = 1
    algorithm: str = "textbook"

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise ValueError(f"workers_per_node={self.workers_per_node}: a node has at least one worker")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"no algorithm {self.algorithm!r}; there are: {', '.join(ALGORITHMS)}")

    def seconds(self, call: str, nbytes: int, size: int) -> float:
        """Seconds of one collective over `size` workers.

        Args:
            call: all_reduce, all_gather, all_to_all or broadcast. For `permute` see `permute_seconds`.
            nbytes: of the tensor that each worker brings; of all_to_all, of what it sends to others.
        """
        form = ALGORITHMS[self.algorithm][call]
        if self.intra_node is None:
            return self.inter_node.transfer_seconds(form(nbytes, size)) + self._propagation_s(call, nbytes, size)
        local, nodes = min(self.workers_per_node, size), -(-size // self.workers_per_node)
        if nodes == 1:
            return self.intra_node.transfer_seconds(form(nbytes, size))
        if call == "all_to_all":  # `local` - 1 messages inside the node, and one to each worker elsewhere
            stays = nbytes * (local - 1) // (size - 1)
            leaves = CollectiveCost(size - local, (nbytes - stays) * local)
            inside = self.intra_node.transfer_seconds(CollectiveCost(local - 1, stays))
            return inside + self.inter_node.transfer_seconds(leaves) + self._propagation_s(call, leaves.sent_bytes, nodes)
        inner, outer = (nodes, local) if call == "all_gather" else (1, 1)
        inside, nbytes = self.intra_node.transfer_seconds(form(inner * nbytes, local)), outer * nbytes
        return inside + self.inter_node.transfer_seconds(form(nbytes, nodes)) + self._propagation_s(call, nbytes, nodes)

    def _propagation_s(self, call: str, nbytes: int, nodes: int) -> float:
        """Seconds on the way, and those in which TCP's windows open: what goes to all others has a connection
        to each, a ring and a tree have one to send by.
        """
        if not self.inter_node.propagation_s:
            return 0.0
        ways = PROPAGATIONS[self.algorithm][call](nodes)
        to_all = call == "all_to_all" or (self.algorithm == "direct" and call in RING_COLLECTIVES)
        connections = max(1, nodes - 1) if to_all else 1
        sent = ALGORITHMS[self.algorithm][call](nbytes, nodes).sent_bytes
        return ways * self.inter_node.propagation_s + self.inter_node.slow_start_s(sent, connections)

    def permute_seconds(self, nbytes: int, route: Sequence[tuple[int, int]]) -> float:
        """Seconds of tensors of `nbytes` along each (source, destination) of `route`."""
        if self.intra_node is None:
            return self._permute_s(nbytes, len(route))
        nodes = [(source // self.workers_per_node, to // self.workers_per_node) for source, to in route]
        leaving = [pair for pair in nodes if pair[0] != pair[1]]
        # Of each node how many leave and how many arrive; a link carries both ways at once.
        loads = Counter(source for source, _ in leaving), Counter(to for _, to in leaving)
        busiest = max((count for load in loads for count in load.values()), default=0)
        return max(
            self.intra_node.transfer_seconds(permute(nbytes, len(nodes) - len(leaving))),
            self._permute_s(busiest * nbytes, len(leaving)),
        )

    def _permute_s(self, nbytes: int, pairs: int) -> float:
        between, ways = self.inter_node, PROPAGATIONS[self.algorithm]["permute"](2)
        apart_s = ways * between.propagation_s + between.slow_start_s(nbytes) if pairs and between.propagation_s else 0.0
        return between.transfer_seconds(permute(nbytes, pairs)) + apart_s


class PublishedCost(NamedTuple):
    """Cost of a scheme for each worker, by the literature."""

    least: Fraction  # words: numbers or indices of one width
    most: Fraction
    messages: int  # latency terms


@cache  # a map of bandwidths asks for the same ones again and again
def published_cost(scheme: str, n: int, k: int, size: int) -> PublishedCost:
    """Bandwidth and latency of dense and sparse allreduces of k of n elements over P workers.

    The first six are Table 1 of Zhang's Stable Top-K slides, which takes it from Li and Hoefler 2022; the
    others are what Eghlidi and Jaggi 2020 and Chen et al. 2020 describe, in the same terms. log P is taken as
    the rounds that there are, ceil(log2 P). What a scheme spends on announcing lengths is not in it.

    Raises:
        ValueError: an unknown scheme; the message lists those there are.
    """
    others, log = Fraction(size - 1), num_tree_rounds(size)
    share = others / size
    forms = {
        "dense": (2 * n * share, 2 * n * share, 2 * log),
        "topka": (2 * k * others, 2 * k * others, log),
        "topkdsa": (4 * k * share, (2 * k + n) * share, size + 2 * log),
        "gtopk": (Fraction(4 * k * log), Fraction(4 * k * log), 2 * log),
        "gaussiank": (2 * k * others, 2 * k * others, 2 * log),
        "oktopk": (2 * k * share, 6 * k * share, 2 * size + 2 * log),
        "randomk allgather": (2 * k * others, 2 * k * others, log),
        "randomk allreduce": (2 * k * share, 2 * k * share, 2 * log),
        "blockrandomk allgather": ((k + 1) * others, (k + 1) * others, log),
        "blockrandomk allreduce": (2 * k * share, 2 * k * share, 2 * log),
        "scalecom": (k * log + 2 * k * share, k * log + 2 * k * share, 3 * log),
    }
    if scheme not in forms:
        raise ValueError(f"no scheme {scheme!r}; there are: {', '.join(forms)}")
    return PublishedCost(*forms[scheme])
