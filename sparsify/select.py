"""Selectors: rules that choose k of n. They see the accumulated gradient and answer with indices, nothing
more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Generator, Tensor


class Place(NamedTuple):
    """Which bucket of which worker a state belongs to: what its own random numbers are seeded with."""

    seed: int
    rank: int
    bucket: int


class Selector(Protocol):
    shared: ClassVar[bool]  # do all workers choose alike?

    def init(self, like: Tensor, place: Place) -> Any:
        """The state for a bucket like this one."""

    def select(self, acc: Tensor, k: int, state: Any) -> Tensor:
        """(n,) -> (k,) distinct indices in [0, n), int64."""


@dataclass(frozen=True)
class TopK:
    """The k largest by absolute value, exactly. Published operator: torch.topk; the reference for faster
    ones.
    """

    shared: ClassVar[bool] = False

    def init(self, like: Tensor, place: Place) -> None:
        return None

    def select(self, acc: Tensor, k: int, state: None) -> Tensor:
        return acc.abs().topk(k, sorted=False).indices


@dataclass(frozen=True)
class RandomK:
    """k uniformly random indices without replacement, each worker its own.

    Published operator: the head of torch.randperm(n), a sort of n random keys; it costs O(n).
    """

    shared: ClassVar[bool] = False

    def init(self, like: Tensor, place: Place) -> Generator:
        return generator(like.device, place)

    def select(self, acc: Tensor, k: int, state: Generator) -> Tensor:
        return torch.randperm(acc.numel(), generator=state, device=acc.device)[:k]


@dataclass(frozen=True)
class FirstK:
    """The first k. It looks at nothing and computes nothing: a control for what the harness itself costs."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, place: Place) -> Tensor:
        return torch.arange(like.numel(), device=like.device)

    def select(self, acc: Tensor, k: int, state: Tensor) -> Tensor:
        return state[:k]


def generator(device: torch.device, place: Place) -> Generator:
    """A generator of one's own; the global one stays untouched, it belongs to the user's model and data."""
    own = Generator(device=device)
    # Distinct odd multipliers keep neighbouring (seed, rank, bucket) triples apart in the 64-bit seed.
    mixed = (
        place.seed * 0x9E3779B97F4A7C15 + place.rank * 0xBF58476D1CE4E5B9 + place.bucket * 0x94D049BB133111EB
    )
    own.manual_seed(mixed % 2**63)
    return own
