"""What was promised of a GPU before one had run the code; and what the parts have found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.bench.gpu_first.parts import PARTS, SIZES
from experiments.bench.gpu_first.state import Result, State

Found = Mapping[str, Any]
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"


class Measured(NamedTuple):
    """A median, and where the values lie; one value alone where there is but one."""

    median: float
    low: float | None = None
    high: float | None = None
    n: int = 1


@dataclass(frozen=True)
class Promise:
    """A number that a GPU must reach.

    Args:
        bound: it is to be at most this, or at least where `at_least`.
        predicted: before the first GPU, from counts of bytes, launches and instructions.
        part: that measures it.
        read: it from what the part printed last, or from its seconds; None where it is not in there.
    """

    text: str
    bound: float
    unit: str
    predicted: str
    part: str
    read: Callable[[Result], Measured | None]
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


class Outcome(NamedTuple):
    promise: Promise
    measured: Measured | None
    word: str
    why: str  # it was not measured


def outcomes(state: State) -> list[Outcome]:
    """What became of each promise. On a CPU nothing is measured, though all can be read."""
    return [outcome(promise, state) for promise in PROMISES]


def outcome(promise: Promise, state: State) -> Outcome:
    result = state.parts.get(promise.part)
    if result is None:
        return Outcome(promise, None, NOT_MEASURED, f"{promise.part} has not run yet")
    if result.state != "ok":
        return Outcome(promise, None, NOT_MEASURED, f"{promise.part}: {result.state}: {result.why}")
    measured = promise.read(result)
    if measured is None:
        why = "had measured its run before" if result.reused else "did not say it"
        return Outcome(promise, None, NOT_MEASURED, f"{promise.part} {why}")
    if state.rehearsal:
        return Outcome(promise, measured, NOT_MEASURED, "a rehearsal")
    return Outcome(promise, measured, MET if promise.is_met(measured.median) else NOT_MET, "")


def of_ratio(n: int, name: str) -> Callable[[Result], Measured | None]:
    """A ratio of BENCH=kernels, at the size that stands where n stands in SIZES."""
    place = SIZES.index(n)

    def read(result: Result) -> Measured | None:
        cases = result.found.get("cases", [])
        return measured(cases[place].get(name)) if place < len(cases) else None

    return read


def printed(name: str) -> Callable[[Result], Measured | None]:
    return lambda result: measured(result.found.get(name))


def measured(value: Any) -> Measured | None:
    """From the way in which benchmarks print: an object of median, low, high, n, or a number."""
    if isinstance(value, Mapping):
        return Measured(value["median"], value["low"], value["high"], value["n"])
    return None if value is None else Measured(value)


def minutes(result: Result) -> Measured | None:
    """Of the whole command over all its calls: start and validation included."""
    return None if result.reused else Measured(result.spent_s / 60)


SMALL, MIDDLE, LARGE = SIZES
OVER_ADD, OVER_EAGER = "fused_over_add", "eager_over_fused"
# Predicted in ratios of a copy, which takes as long as the add or longer: 12 bytes an element, both of them.
PROMISES = (
    Promise("fused step / in-place add, 14.7M", 1.6, "x", "1.7; 1.36 as one kernel", "kernels",
            of_ratio(SMALL, OVER_ADD)),
    Promise("fused step / in-place add, 25.6M", 1.35, "x", "1.47; 1.25 as one kernel", "kernels",
            of_ratio(MIDDLE, OVER_ADD)),
    Promise("fused step / in-place add, 345M", 1.2, "x", "1.13; 1.11 as one kernel", "kernels",
            of_ratio(LARGE, OVER_ADD)),
    Promise("torch.topk's step / fused step, 25.6M", 6, "x", "5 to 6, less if torch.topk is at the roof",
            "kernels", of_ratio(MIDDLE, OVER_EAGER), at_least=True),
    Promise("torch.topk's step / fused step, 345M", 6, "x", "6.0 to 6.5", "kernels",
            of_ratio(LARGE, OVER_EAGER), at_least=True),
    Promise("host time of a fused step", 30, "us", "112 by Triton's launcher, less by kept kernels", "launch",
            printed("host_us")),
    # Where auto is torch the ratio is 1 but for noise, of which the smallest of many is taken.
    Promise("torch / auto, the smallest of all sizes", 0.95, "x", "1", "auto",
            printed("least_torch_over_auto"), at_least=True),
    Promise("compression in % of FP + BP, fp32", 3, "%", "2.4 to 3.2", "paper-fp32",
            printed("compression_percent")),
    Promise("compression in % of FP + BP, tf32", 6, "%", "6 to 8", "paper-tf32",
            printed("compression_percent")),
    Promise("138 epochs of VGG-16, fp32, from 20 iterations", 8, "min", "7", "paper-fp32",
            printed("epochs_138_min")),
    Promise("138 epochs of VGG-16, tf32, from 20 iterations", 4, "min", "3", "paper-tf32",
            printed("epochs_138_min")),
    Promise("138 epochs of VGG-16, fp32, the whole command", 8, "min", "7", "training-fp32", minutes),
    Promise("138 epochs of VGG-16, tf32, the whole command", 4, "min", "3", "training-tf32", minutes),
)  # fmt: skip
assert {promise.part for promise in PROMISES} <= {part.name for part in PARTS}
