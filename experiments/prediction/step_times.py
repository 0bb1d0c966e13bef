"""Step times predicted from their parts: computing, selecting, and the exchange by the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

import sparsify
from analysis.stats import Estimate
from sparsify.core.synthetic_selections import SelectionStatistics, SyntheticSelections, skewed_shares
from sparsify.cost import Link, Network
from sparsify.replay import ExchangeReplay
from sparsify.types import SparseVector, num_selected

# Factors by which numbers may be off, either way: those of a link, and a number without a range.
LATENCY_FACTOR = 2.0  # small messages are the ones that the model predicts worst
BANDWIDTH_FACTOR = 1.25
GIVEN_FACTOR = 1.1
DEFAULT_OVERLAP = (0.05, 0.3, 0.9)  # of two workers' selections: low, middle, high
DEFAULT_SKEW = 4.0
MAX_REPLAYED = 2**22  # selected elements of all workers, up to which three overlaps are replayed
SPLIT_BY_REGION = ("oktopk", "sparcml")  # the exchange depends on the overlap of selections
ENDS = (-1, 0, 1)  # of a range: low, middle, high
COMPUTE = "computing time"
SELECT = "selection time"
ALPHA = "latency of the link"
BETA = "bandwidth of the link"
SHARED = "overlap of selections"
INPUTS = (COMPUTE, SELECT, ALPHA, BETA, SHARED)
EndByInput = Mapping[str, int]  # by input, the end of its range that is taken; the middle if it is left out


class UncertainTime(NamedTuple):
    """Seconds that are not known exactly."""

    low_s: float
    middle_s: float
    high_s: float
    source: str  # in words
    is_shipped: bool = False  # measured by the repository's runs, on another machine than the user's

    @classmethod
    def around(cls, seconds: float, source: str) -> UncertainTime:
        """Return a time as uncertain as a number that was given."""
        return cls(seconds / GIVEN_FACTOR, seconds, seconds * GIVEN_FACTOR, source)

    def at_end(self, end: int) -> float:
        """Return the low end for -1, the middle for 0, the high end for 1."""
        return (self.middle_s, self.high_s, self.low_s)[end]


@dataclass(frozen=True)
class Scenario:
    """A model on so many workers that are joined by a network."""

    elements: int
    workers: int
    density: float
    network: Network
    compute_time: UncertainTime  # of a step without selecting and communicating
    select_time_by_method: Mapping[str, UncertainTime]  # selecting, packing, merging
    overlap: tuple[float, float, float] = DEFAULT_OVERLAP  # low, middle, high
    skew: float = DEFAULT_SKEW
    every: tuple[int, ...] = (1,)  # H, local steps from one exchange to the next

    @property
    def has_local_steps(self) -> bool:
        """True if methods with local steps are compared, too."""
        return max(self.every) > 1


class StepPrediction(NamedTuple):
    """The predicted step of one method. Intervals combine the uncertainty of all inputs."""

    method: str
    step: Estimate  # seconds
    compute_s: float
    select_s: float
    transfer_s: float
    speedup: Estimate  # over dense
    widest_input: str  # the input whose range moves the step time most
    every: int = 1  # steps from one exchange to the next


def rank_methods(
    scenario: Scenario,
    show_progress: Callable[[Sequence[tuple[str, int]]], Iterable[tuple[str, int]]] = iter,
) -> list[StepPrediction]:
    """Return predictions for dense and every method whose selection time is known, the quickest first.

    Args:
        show_progress: passes on the methods, each with the steps from one exchange to the next.
    """
    dense = StepTimeModel(scenario, "dense")
    cases = [(name, every) for every in scenario.every for name in ("dense", *scenario.select_time_by_method)]
    other_cases = [case for case in cases if case != ("dense", 1)]
    models = [dense, *(StepTimeModel(scenario, *case) for case in show_progress(other_cases))]
    return sorted(
        (model.predict_against(dense) for model in models), key=lambda prediction: prediction.step.value
    )


class StepTimeModel:
    """The step time of one method as a function of its uncertain inputs; the mean over local steps."""

    def __init__(self, scenario: Scenario, method: str, every: int = 1) -> None:
        self.scenario = scenario
        self.method = method
        self.every = every
        self.select_time = scenario.select_time_by_method.get(method, UncertainTime(0.0, 0.0, 0.0, ""))
        self.exchange_by_overlap = make_exchange_model_by_overlap_end(scenario, method)

    def step_s(self, end_by_input: EndByInput) -> float:
        """Return the seconds of a step."""
        compute_s = self.scenario.compute_time.at_end(end_by_input.get(COMPUTE, 0))
        return compute_s + self.select_s(end_by_input) + self.transfer_s(end_by_input)

    def select_s(self, end_by_input: EndByInput) -> float:
        """Return the seconds of selecting, per step."""
        return self.select_time.at_end(end_by_input.get(SELECT, 0)) / self.every

    def transfer_s(self, end_by_input: EndByInput) -> float:
        """Return the seconds of the exchange, per step."""
        network = self.scenario.network
        inside = network.intra_node and scale_link(network.intra_node, end_by_input)
        scaled = replace(network, inter_node=scale_link(network.inter_node, end_by_input), intra_node=inside)
        return self.exchange_by_overlap[end_by_input.get(SHARED, 0)](scaled) / self.every

    def predict_against(self, dense: StepTimeModel) -> StepPrediction:
        """Return the prediction for this method, with its speedup over dense."""
        moves = {name: abs(self.step_s({name: 1}) - self.step_s({name: -1})) for name in INPUTS}
        return StepPrediction(
            self.method,
            propagate_uncertainty(self.step_s),
            self.scenario.compute_time.middle_s,
            self.select_s({}),
            self.transfer_s({}),
            propagate_uncertainty(
                lambda end_by_input: dense.step_s(end_by_input) / self.step_s(end_by_input)
            ),
            max(moves, key=lambda name: moves[name]),
            self.every,
        )


def scale_link(link: Link, end_by_input: EndByInput) -> Link:
    """Return a link with latency and bandwidth at these ends of their ranges."""
    latency_end = end_by_input.get(ALPHA, 0)
    return replace(
        link,
        alpha_s=link.alpha_s * LATENCY_FACTOR**latency_end,
        beta_s_per_byte=link.beta_s_per_byte * BANDWIDTH_FACTOR ** end_by_input.get(BETA, 0),
        propagation_s=link.propagation_s * GIVEN_FACTOR**latency_end,
    )


def propagate_uncertainty(quantity: Callable[[EndByInput], float]) -> Estimate:
    """Return a quantity's value, and how far the inputs move it, varied one at a time.

    The inputs are independent of each other, so that the squares of their logarithms add up. An input moves
    the times of all methods together.
    """
    middle = quantity({})
    logs = [[math.log(quantity({name: end}) / middle) for end in (-1, 1)] for name in INPUTS]
    down, up = (math.sqrt(sum(pick(0.0, *pair) ** 2 for pair in logs)) for pick in (min, max))
    return Estimate(middle, middle * math.exp(-down), middle * math.exp(up))


def make_exchange_model_by_overlap_end(
    scenario: Scenario, method_name: str
) -> dict[int, Callable[[Network], float]]:
    """Return functions from a network to the seconds of a method's exchange, by the overlap's end.

    The exchange is replayed with synthetic selections in one bucket. Only exchanges by regions depend on the
    overlap; of these two steps are replayed, for Ok-Topk takes its thresholds in the first one.
    """
    method = method_name.partition("-")[0]
    num_workers = scenario.workers
    options = {"density": scenario.density} if "density" in sparsify.defaults(method) else {}
    built_method = sparsify.build(method, **options)
    k = num_selected(scenario.elements, scenario.density)
    if method not in SPLIT_BY_REGION:
        replay = ExchangeReplay(built_method, scenario.elements, num_workers)
        selections = [SparseVector(torch.arange(k), torch.ones(k))] * num_workers  # only the number counts
        return dict.fromkeys(ENDS, replay.replay_step(selections, k).simulated_seconds)
    shares = skewed_shares(scenario.skew) if scenario.skew > 1 else (1.0,)
    models = dict[int, Callable[[Network], float]]()
    for end, overlap in zip(ENDS, scenario.overlap, strict=True):
        if end == 0 or k * num_workers <= MAX_REPLAYED:
            statistics = SelectionStatistics(scenario.density, overlap, shares)
            synthetic = SyntheticSelections(statistics, scenario.elements, num_workers)
            replay = ExchangeReplay(built_method, scenario.elements, num_workers)
            replay.replay_step(synthetic, k)
            models[end] = replay.replay_step(synthetic, k).simulated_seconds
    return {end: models.get(end, models[0]) for end in ENDS}
