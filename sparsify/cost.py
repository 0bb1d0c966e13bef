"""Closed forms: the bytes that one worker sends, the latency terms, and the alpha-beta time of every
collective.

Rings for allreduce and allgather, a binomial tree for broadcast: the forms that Li and Hoefler 2022 (PPoPP,
eqs. 1 to 3) and the table of Zhang's Stable Top-K slides use, here in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

LENGTH = 8  # bytes of the int64 that announces a length


class Cost(NamedTuple):
    """What one collective costs each worker."""

    messages: int  # latency terms, alpha each
    sent_bytes: int  # bandwidth terms, beta each: bytes that a worker on the critical path sends

    def __add__(self, other: Any) -> Cost:
        return Cost(self.messages + other.messages, self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True)
class Link:
    """A network in the alpha-beta model: seconds to start a message, and seconds for each byte of it."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, cost: Cost) -> float:
        return cost.messages * self.alpha_s + cost.sent_bytes * self.beta_s_per_byte


def rounds(size: int) -> int:
    """ceil(log2 P)."""
    return (size - 1).bit_length()


def all_reduce(nbytes: int, size: int) -> Cost:
    """2 log P alpha + 2 (P-1)/P m beta, for a tensor of m bytes; the last fraction of a byte is dropped."""
    return Cost(2 * rounds(size), 2 * nbytes * (size - 1) // size)


def all_gather(nbytes: int, size: int) -> Cost:
    """log P alpha + (P-1) m beta, where each worker brings m bytes."""
    return Cost(rounds(size), nbytes * (size - 1))


def broadcast(nbytes: int, size: int) -> Cost:
    """log P (alpha + m beta); a worker on the critical path forwards the tensor log P times."""
    return Cost(rounds(size), nbytes * rounds(size))


def all_to_all(nbytes: int, size: int) -> Cost:
    """(P-1) alpha + m beta, for a worker that sends m bytes to all others together."""
    return Cost(size - 1, nbytes)


def permute(nbytes: int, pairs: int) -> Cost:
    """alpha + m beta: tensors of m bytes travel along all pairs at once. No pairs: nothing."""
    return Cost(1, nbytes) if pairs else Cost(0, 0)


def gather_uneven(longest_nbytes: int, size: int) -> Cost:
    """Lengths first, one int64 each; then all tensors, padded to the longest."""
    lengths, padded = all_gather(LENGTH, size), all_gather(longest_nbytes, size)
    return lengths + padded if longest_nbytes else lengths


def exchange_pieces(nbytes: int, size: int) -> Cost:
    """Lengths first, one int64 to each other worker; then m bytes to all others together."""
    return all_to_all(LENGTH * (size - 1), size) + all_to_all(nbytes, size)


def tree(nbytes: int, size: int) -> Cost:
    """gTop-k: m bytes in each of ceil(log2 P) rounds of merging, then a broadcast."""
    return Cost(rounds(size), nbytes * rounds(size)) + broadcast(nbytes, size)


class Published(NamedTuple):
    """What the literature says a scheme costs each worker."""

    least: Fraction  # words: numbers or indices of one width
    most: Fraction
    messages: int  # latency terms


def published(scheme: str, n: int, k: int, size: int) -> Published:
    """Bandwidth and latency of dense and sparse allreduces of k of n elements over P workers.

    The first six are Table 1 of Zhang's Stable Top-K slides, which takes it from Li and Hoefler 2022; the
    others are what Eghlidi and Jaggi 2020 and Chen et al. 2020 describe, in the same terms. log P is taken as
    the rounds that there are, ceil(log2 P). What a scheme spends on announcing lengths is not in it.

    Raises:
        ValueError: an unknown scheme; the message lists those there are.
    """
    others, log = Fraction(size - 1), rounds(size)
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
    return Published(*forms[scheme])
