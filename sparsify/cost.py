"""Closed forms: the bytes that one worker sends, the latency terms, and the alpha-beta time of every
collective.

Rings for allreduce and allgather, a binomial tree for broadcast: the forms that Li and Hoefler 2022 (PPoPP,
eqs. 1 to 3) and the table of Zhang's Stable Top-K slides use, here in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """What one collective costs each worker."""

    messages: int  # latency terms, alpha each
    sent_bytes: int  # bandwidth terms, beta each


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
