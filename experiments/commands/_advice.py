"""Step times that are predicted from their parts: computing, selecting, and the exchange by the alpha-beta
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

import sparsify
from analysis.stats import Value
from sparsify.cost import Link, Network
from sparsify.method import num_selected
from sparsify.replay import Replay
from sparsify.selections import Generated, Statistics, skewed
from sparsify.types import Sparse

# What the model is trusted to: by these factors a link's numbers may be off, either way.
LATENCY, BANDWIDTH = 2.0, 1.25  # small messages are the ones that it predicts worst
GIVEN = 1.1  # and a number that was given without a range
OVERLAP, SKEW = (0.05, 0.3, 0.9), 4.0  # of selections, where none were recorded: low, middle, high
MOST_REPLAYED = 2**22  # selected elements of all workers, up to which three overlaps are worked out
SPLIT = ("oktopk", "sparcml")  # exchange by regions, so that it counts who selected what
PLACES = (-1, 0, 1)  # in a range: low, middle, high


class Range(NamedTuple):
    """A number that is not known exactly."""

    low: float
    middle: float
    high: float
    source: str  # where it comes from, in words

    @classmethod
    def of(cls, value: Value, source: str) -> Range:
        """A measured one; without an interval it is taken to be as uncertain as a given one."""
        if value.low is None or value.high is None:
            return cls.around(value.value, source)
        return cls(value.low, value.value, value.high, source)

    @classmethod
    def around(cls, value: float, source: str, factor: float = GIVEN) -> Range:
        return cls(value / factor, value, value * factor, source)

    def times(self, factor: float, source: str | None = None) -> Range:
        return Range(self.low * factor, self.middle * factor, self.high * factor, source or self.source)


@dataclass(frozen=True)
class Question:
    """What is asked: this model on so many workers, joined like this."""

    elements: int
    workers: int
    density: float
    network: Network
    compute_s: Range  # all of a step but selecting and communicating
    select_s: Mapping[str, Range]  # by method: selecting, packing, merging
    overlap: tuple[float, float, float] = OVERLAP
    skew: float = SKEW


class Prediction(NamedTuple):
    """One method's step. Times are seconds; intervals combine what each input may be off by."""

    method: str
    step: Value
    compute_s: float
    select_s: float
    transfer_s: float
    speedup: Value  # over dense
    matters: str  # the input whose range moves the step time most


Inputs = Mapping[str, float]  # name of an input -> where in its range it is taken: -1, 0 or 1
COMPUTE, SELECT, ALPHA, BETA, SHARED = (
    "computing time", "selection time", "latency of the link", "bandwidth of the link",
    "overlap of selections",
)  # fmt: skip


def ranked(question: Question) -> list[Prediction]:
    """Dense and every method whose selection time is known, the quickest first."""
    dense = StepTime(question, "dense")
    steps = [dense, *(StepTime(question, name) for name in question.select_s if name != "dense")]
    return sorted((predicted(step, dense) for step in steps), key=lambda found: found.step.value)


class StepTime:
    """How one method's step time depends on what is not known exactly."""

    def __init__(self, question: Question, name: str) -> None:
        self.question, self.name = question, name
        self.select = question.select_s.get(name, Range(0.0, 0.0, 0.0, "dense selects nothing"))
        self.traffic = traffic_seconds(question, name)

    def seconds(self, inputs: Inputs) -> float:
        return (
            at(self.question.compute_s, inputs.get(COMPUTE, 0))
            + at(self.select, inputs.get(SELECT, 0))
            + self.transfer(inputs)
        )

    def transfer(self, inputs: Inputs) -> float:
        exchange = self.traffic[int(inputs.get(SHARED, 0))]
        alpha, beta = LATENCY ** inputs.get(ALPHA, 0), BANDWIDTH ** inputs.get(BETA, 0)
        return exchange(scaled(self.question.network, alpha, beta))


def predicted(step: StepTime, dense: StepTime) -> Prediction:
    names = (COMPUTE, SELECT, ALPHA, BETA, SHARED)
    moves = {name: abs(step.seconds({name: 1}) - step.seconds({name: -1})) for name in names}
    return Prediction(
        step.name,
        combined(step.seconds, names),
        step.question.compute_s.middle,
        step.select.middle,
        step.transfer({}),
        combined(lambda inputs: dense.seconds(inputs) / step.seconds(inputs), names),
        max(moves, key=lambda name: moves[name]),
    )


def combined(quantity: Callable[[Inputs], float], names: tuple[str, ...]) -> Value:
    """Its value, and how far the inputs move it that are varied one at a time: independent of each other, so
    that the squares of their logarithms add up. An input moves all methods' times together.
    """
    middle = quantity({})
    logs = [[math.log(quantity({name: side}) / middle) for side in (-1, 1)] for name in names]
    down, up = (math.sqrt(sum(pick(0.0, *pair) ** 2 for pair in logs)) for pick in (min, max))
    return Value(middle, middle * math.exp(-down), middle * math.exp(up))


def at(number: Range, place: float) -> float:
    """-1: its low end, 1: its high one."""
    return (number.middle, number.high, number.low)[int(place)]


def scaled(network: Network, alpha: float, beta: float) -> Network:
    """Every link slower by these factors."""

    def slower(link: Link) -> Link:
        return Link(link.alpha_s * alpha, link.beta_s_per_byte * beta)

    inside = None if network.inside is None else slower(network.inside)
    return Network(slower(network.between), inside, network.per_node, network.algorithm)


def traffic_seconds(question: Question, name: str) -> dict[int, Callable[[Network], float]]:
    """Network -> seconds that the exchange takes, with selections of low, middle and high overlap, on which
    only exchanges depend that split by region; of these two steps are replayed, for in the first one Ok-Topk
    takes its thresholds. Everything is in one bucket.
    """
    method, n, size = name.partition("-")[0], question.elements, question.workers
    choices = {"density": question.density} if "density" in sparsify.defaults(method) else {}
    built, k = sparsify.build(method, **choices), num_selected(n, question.density)
    if method not in SPLIT:
        parts = [Sparse(torch.arange(k), torch.ones(k))] * size  # of which only the number counts
        exchange = Replay(built, n, size).next(parts, k).seconds
        return dict.fromkeys(PLACES, exchange)
    shares = skewed(question.skew) if question.skew > 1 else (1.0,)
    found = dict[int, Callable[[Network], float]]()
    for place, overlap in zip(PLACES, question.overlap, strict=True):
        if place and k * size > MOST_REPLAYED:
            continue
        made, replay = (
            Generated(Statistics(question.density, overlap, shares), n, size),
            Replay(built, n, size),
        )
        replay.next(made, k)
        found[place] = replay.next(made, k).seconds
    return {place: found.get(place, found[0]) for place in PLACES}
