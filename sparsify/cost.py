"""Costs of collectives by closed forms: bytes that a worker sends, latency terms, and seconds on a network.

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

LENGTH_BYTES = 8  # of the int64 that announces a length


class CollectiveCost(NamedTuple):
    """The cost of one collective for each worker."""

    messages: int  # latency terms, each of alpha
    sent_bytes: int  # bandwidth terms, each of beta: bytes that a worker on the critical path sends

    def __add__(self, other: Any) -> CollectiveCost:
        return CollectiveCost(self.messages + other.messages, self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True)
class Link:
    """A network link in the alpha-beta model.

    Args:
        alpha_s: seconds to start a message.
        beta_s_per_byte: seconds for each byte of a message.
        propagation_s: seconds that a byte travels over the distance. Messages that are in flight together
            share this delay: a collective takes `PROPAGATION_COUNTS` of them.

    Raises:
        ValueError: seconds below 0, or infinite.
    """

    alpha_s: float
    beta_s_per_byte: float
    propagation_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "propagation_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ValueError(
                    f"{name}={seconds} is out of range: it must be a number of at least 0; a negative or "
                    "zero bandwidth carries nothing"
                )

    def transfer_seconds(self, cost: CollectiveCost) -> float:
        """Return the seconds of a collective of this cost, without propagation delays."""
        return cost.messages * self.alpha_s + cost.sent_bytes * self.beta_s_per_byte


def num_tree_rounds(size: int) -> int:
    """Return the number of rounds of a binary tree over P workers, ceil(log2 P)."""
    return (size - 1).bit_length()


def all_reduce(nbytes: int, size: int) -> CollectiveCost:
    """Return 2 log P alpha + 2 (P-1)/P m beta for a tensor of m bytes, rounded down to whole bytes."""
    return CollectiveCost(2 * num_tree_rounds(size), 2 * nbytes * (size - 1) // size)


def all_gather(nbytes: int, size: int) -> CollectiveCost:
    """Return log P alpha + (P-1) m beta, where each worker brings m bytes."""
    return CollectiveCost(num_tree_rounds(size), nbytes * (size - 1))


def broadcast(nbytes: int, size: int) -> CollectiveCost:
    """Return log P (alpha + m beta): a worker on the critical path forwards the tensor log P times."""
    return CollectiveCost(num_tree_rounds(size), nbytes * num_tree_rounds(size))


def all_to_all(nbytes: int, size: int) -> CollectiveCost:
    """Return (P-1) alpha + m beta, for a worker that sends m bytes to all others together."""
    return CollectiveCost(size - 1, nbytes)


def permute(nbytes: int, pairs: int) -> CollectiveCost:
    """Return alpha + m beta: tensors of m bytes travel along all pairs at once, if there are any."""
    return CollectiveCost(1, nbytes) if pairs else CollectiveCost(0, 0)


def gather_uneven(longest_nbytes: int, size: int) -> CollectiveCost:
    """Return the cost of gathering lengths, one int64 each, and then all tensors, padded to the longest."""
    lengths = all_gather(LENGTH_BYTES, size)
    return lengths + all_gather(longest_nbytes, size) if longest_nbytes else lengths


def exchange_pieces(nbytes: int, size: int) -> CollectiveCost:
    """Return the cost of an int64 to each other worker, and then of m bytes to all others together."""
    return all_to_all(LENGTH_BYTES * (size - 1), size) + all_to_all(nbytes, size)


CostFunction = Callable[[int, int], CollectiveCost]  # of bytes and workers; for `permute`, of bytes and pairs
CountFunction = Callable[[int], int]  # of workers; for `permute`, of pairs


def _with_messages(textbook: CostFunction, num_messages: CountFunction) -> CostFunction:
    """Return a cost function with the bytes of `textbook` and another number of messages."""
    return lambda nbytes, size: CollectiveCost(num_messages(size), textbook(nbytes, size).sent_bytes)


TEXTBOOK: Mapping[str, CostFunction] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "permute": permute,
}
# The cost functions of each backend, by the names of `sparsify.comm.Comm`. All send the same number of bytes;
# latency terms differ.
ALGORITHMS: Mapping[str, Mapping[str, CostFunction]] = {
    "textbook": TEXTBOOK,
    # In facebookincubator/gloo, allreduce.cc and allgather.cc are rings with two segments in flight,
    # broadcast.cc is a binomial tree, and alltoallv.cc sends P-1 messages to the other workers in turn.
    # torch's ProcessGroupGloo calls them with their defaults.
    "gloo": {
        **TEXTBOOK,
        "all_reduce": _with_messages(all_reduce, lambda size: 2 * (size - 1)),
        "all_gather": _with_messages(all_gather, lambda size: size - 1),
    },
    # `sparsify.comm.direct` sends a message to each other worker, and of an allreduce a second one with the
    # sums, except between two workers.
    "direct": {
        **TEXTBOOK,
        "all_reduce": _with_messages(all_reduce, lambda size: (1 if size == 2 else 2) * (size - 1)),
        "all_gather": _with_messages(all_gather, lambda size: size - 1),
    },
}
# The number of propagation delays that a collective of P workers takes one after the other. In gloo a sender
# waits until the receiver says that it is ready, which costs a delay of its own: in each step of a ring, in
# an all-to-all, and in a permutation if all workers arrive at the same time. In a broadcast's tree the lower
# workers have said so long before.
_GLOO_AND_DIRECT: Mapping[str, CountFunction] = {
    "all_to_all": lambda size: 2 * (size > 1), "broadcast": lambda size: num_tree_rounds(size) + (size > 1),
    "permute": lambda pairs: 2 * (pairs > 0),
}  # fmt: skip
PROPAGATION_COUNTS: Mapping[str, Mapping[str, CountFunction]] = {
    "textbook": {
        "all_reduce": lambda size: 2 * num_tree_rounds(size), "all_gather": num_tree_rounds,
        "all_to_all": lambda size: int(size > 1), "broadcast": num_tree_rounds,
        "permute": lambda pairs: int(pairs > 0),
    },
    "gloo": {
        **_GLOO_AND_DIRECT, "all_reduce": lambda size: 4 * (size - 1),
        "all_gather": lambda size: 2 * (size - 1),
    },
    "direct": {
        **_GLOO_AND_DIRECT, "all_reduce": lambda size: 2 * (size > 1) + 2 * (size > 2),
        "all_gather": lambda size: 2 * (size > 1),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A network of P workers with one link, or with a fast link inside nodes and a slower one between nodes.

    Workers fill nodes in the order of ranks. The workers of a node share its `inter_node` link. A collective
    over several nodes takes its two parts, between nodes and inside nodes, one after the other:

    - all_reduce: reduce-scatter inside, allreduce between nodes, allgather inside (Goyal et al. 2017,
      arXiv:1706.02677, section 4; Horovod's hierarchical allreduce). Inside, m bytes over the p workers of a
      node; between, m bytes over N nodes.
    - all_gather: each worker gathers from the workers with its local rank on other nodes, p m bytes a node;
      then, inside the node, from its other workers, N m bytes.
    - broadcast: to one worker of each node, then inside.
    - all_to_all: the bytes that stay inside a node, and the bytes that leave it; a worker sends the same to
      each other worker. The p workers of a node send p times as many bytes over its `inter_node` link.
    - permute: pairs inside nodes and pairs between nodes at the same time. The busiest node determines the
      seconds of the pairs between nodes.

    Args:
        inter_node: the link between nodes, or between all workers.
        intra_node: the link inside nodes; None if it is `inter_node`, too.
        workers_per_node: the number of workers on a node; irrelevant without `intra_node`.
        algorithm: one of `ALGORITHMS`, which determines the latency terms.

    Raises:
        ValueError: no workers on a node, or an unknown algorithm.
    """

    inter_node: Link
    intra_node: Link | None = None
    workers_per_node: int = 1
    algorithm: str = "textbook"

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise ValueError(f"workers_per_node={self.workers_per_node}: a node has at least one worker")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"no algorithm {self.algorithm!r}; there are: {', '.join(ALGORITHMS)}")

    def collective_seconds(self, kind: str, nbytes: int, size: int) -> float:
        """Return the seconds of one collective over `size` workers.

        Args:
            kind: all_reduce, all_gather, all_to_all or broadcast. For `permute` see `permute_seconds`.
            nbytes: of the tensor that each worker brings; of all_to_all, the bytes that it sends to others.
        """
        if self.intra_node is None:
            return self._inter_node_s(kind, nbytes, size)
        cost_of = ALGORITHMS[self.algorithm][kind]
        local_size = min(self.workers_per_node, size)
        nodes = -(-size // self.workers_per_node)
        if nodes == 1:
            return self.intra_node.transfer_seconds(cost_of(nbytes, size))
        if kind == "all_to_all":
            # A message to each other worker of the node, and to each worker of other nodes.
            inner = CollectiveCost(local_size - 1, nbytes * (local_size - 1) // (size - 1))
            outer = CollectiveCost(size - local_size, (nbytes - inner.sent_bytes) * local_size)
        else:
            is_gather = kind == "all_gather"
            inner = cost_of(nodes * nbytes if is_gather else nbytes, local_size)
            outer = cost_of(local_size * nbytes if is_gather else nbytes, nodes)
        transfer_s = self.intra_node.transfer_seconds(inner) + self.inter_node.transfer_seconds(outer)
        return transfer_s + self._propagation_s(kind, nodes)

    def _inter_node_s(self, kind: str, nbytes: int, size: int) -> float:
        """Return the seconds of a collective over the link between nodes alone."""
        transfer_s = self.inter_node.transfer_seconds(ALGORITHMS[self.algorithm][kind](nbytes, size))
        return transfer_s + self._propagation_s(kind, size)

    def _propagation_s(self, kind: str, nodes: int) -> float:
        """Return the seconds of propagation over the link between nodes."""
        return PROPAGATION_COUNTS[self.algorithm][kind](nodes) * self.inter_node.propagation_s

    def permute_seconds(self, nbytes: int, route: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of tensors of `nbytes` along each (source, destination) of `route`."""
        if self.intra_node is None:
            return self._inter_node_s("permute", nbytes, len(route))
        node_pairs = [(source // self.workers_per_node, to // self.workers_per_node) for source, to in route]
        leaving = [pair for pair in node_pairs if pair[0] != pair[1]]
        # The tensors that leave each node, and that arrive there. A link carries both directions at once.
        loads = Counter(("from", source) for source, _ in leaving) + Counter(("to", to) for _, to in leaving)
        busiest = max(loads.values(), default=0)
        return max(
            self.intra_node.transfer_seconds(permute(nbytes, len(node_pairs) - len(leaving))),
            self._inter_node_s("permute", busiest * nbytes, len(leaving)),
        )


class PublishedCost(NamedTuple):
    """The cost of a scheme for each worker, by the literature."""

    least: Fraction  # words: numbers or indices of one width
    most: Fraction  # words
    messages: int  # latency terms


@cache  # a map of bandwidths computes the same costs many times
def published_cost(scheme: str, n: int, k: int, size: int) -> PublishedCost:
    """Return the published cost of a dense or sparse allreduce of k of n elements over P workers.

    The first six schemes are Table 1 of Zhang's Stable Top-K slides, taken from Li and Hoefler 2022. The
    others are described in the same terms by Eghlidi and Jaggi 2020 and Chen et al. 2020. log P is the number
    of rounds, ceil(log2 P). The announcement of lengths is not included.

    Raises:
        ValueError: an unknown scheme.
    """
    others = Fraction(size - 1)
    rounds = num_tree_rounds(size)
    share = others / size
    dense = 2 * n * share
    gathered = 2 * k * others
    reduced = 2 * k * share
    forms = {
        "dense": (dense, dense, 2 * rounds),
        "topka": (gathered, gathered, rounds),
        "topkdsa": (2 * reduced, (2 * k + n) * share, size + 2 * rounds),
        "gtopk": (Fraction(4 * k * rounds), Fraction(4 * k * rounds), 2 * rounds),
        "gaussiank": (gathered, gathered, 2 * rounds),
        "oktopk": (reduced, 3 * reduced, 2 * size + 2 * rounds),
        "randomk allgather": (gathered, gathered, rounds),
        "randomk allreduce": (reduced, reduced, 2 * rounds),
        "blockrandomk allgather": ((k + 1) * others, (k + 1) * others, rounds),
        "blockrandomk allreduce": (reduced, reduced, 2 * rounds),
        "scalecom": (k * rounds + reduced, k * rounds + reduced, 3 * rounds),
    }
    if scheme not in forms:
        raise ValueError(f"no scheme {scheme!r}; there are: {', '.join(forms)}")
    return PublishedCost(*forms[scheme])
