"""Step times that are predicted from their parts: computing, selecting, and the exchange by the alpha-beta
model; and what stored runs, benchmarks and published logs know of the first two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd
import torch

import sparsify
from analysis.pictures import style
from analysis.published import block_intervals
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD, communication_ms
from analysis.published.validation_free import validation_free_step_ms
from analysis.records import loading, phases
from analysis.records.frames import Frames, select_runs
from analysis.records.steps import mean_phase_seconds, warm_steps
from analysis.stats import Estimate
from experiments.bench._runner import read_rows_with_numbers
from experiments.commands._messages import iterate_with_progress
from experiments.config.folders import ResultFolders
from sparsify.core.synthetic_selections import SelectionStatistics, SyntheticSelections, skewed_shares
from sparsify.cost import Link, Network
from sparsify.replay import ExchangeReplay
from sparsify.types import SparseVector, num_selected

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
    def around(cls, value: float, source: str) -> Range:
        """One as uncertain as a number that was given."""
        return cls(value / GIVEN, value, value * GIVEN, source)

    def at(self, place: int) -> float:
        """The low end at -1, the high one at 1."""
        return (self.middle, self.high, self.low)[place]


@dataclass(frozen=True)
class Question:
    """The question: this model on so many workers, joined like this."""

    elements: int
    workers: int
    density: float
    network: Network
    compute_s: Range  # all of a step but selecting and communicating
    select_s: Mapping[str, Range]  # by method: selecting, packing, merging
    overlap: tuple[float, float, float] = OVERLAP
    skew: float = SKEW
    every: tuple[int, ...] = (1,)  # H, local steps from one exchange to the next

    @property
    def is_local(self) -> bool:
        """True if it asks for local steps as well."""
        return max(self.every) > 1


class Prediction(NamedTuple):
    """One method's step. Times are seconds; intervals combine what each input may be off by."""

    method: str
    step: Estimate
    compute_s: float
    select_s: float
    transfer_s: float
    speedup: Estimate  # over dense
    matters: str  # the input whose range moves the step time most
    every: int = 1  # steps from one exchange to the next


Inputs = Mapping[str, int]  # name of an input -> where in its range it is taken: -1, 0 or 1
INPUTS = COMPUTE, SELECT, ALPHA, BETA, SHARED = (
    "computing time", "selection time", "latency of the link", "bandwidth of the link",
    "overlap of selections",
)  # fmt: skip


def ranked(question: Question) -> list[Prediction]:
    """Dense and every method whose selection time is known, the quickest first."""
    dense = StepTime(question, "dense")
    others = [
        (name, every)
        for every in question.every
        for name in ("dense", *question.select_s)
        if (name, every) != ("dense", 1)
    ]
    steps = (dense, *(StepTime(question, *each) for each in iterate_with_progress(others, "methods")))
    return sorted((predicted(step, dense) for step in steps), key=lambda found: found.step.value)


class StepTime:
    """One method's step time, by what is not known exactly; the mean over a round of local steps."""

    def __init__(self, question: Question, name: str, every: int = 1) -> None:
        self.question, self.name, self.every = question, name, every
        self.select = question.select_s.get(name, Range(0.0, 0.0, 0.0, "dense selects nothing"))
        self.traffic = traffic_seconds(question, name)

    def seconds(self, inputs: Inputs) -> float:
        compute_s = self.question.compute_s.at(inputs.get(COMPUTE, 0))
        return compute_s + self.selecting(inputs) + self.transfer(inputs)

    def selecting(self, inputs: Inputs) -> float:
        return self.select.at(inputs.get(SELECT, 0)) / self.every

    def transfer(self, inputs: Inputs) -> float:
        alpha, beta = LATENCY ** inputs.get(ALPHA, 0), BANDWIDTH ** inputs.get(BETA, 0)

        def slower(link: Link) -> Link:
            propagation_s = link.propagation_s * GIVEN ** inputs.get(ALPHA, 0)
            return replace(
                link,
                alpha_s=link.alpha_s * alpha,
                beta_s_per_byte=link.beta_s_per_byte * beta,
                propagation_s=propagation_s,
            )

        network = self.question.network
        inside = network.intra_node and slower(network.intra_node)
        exchange = self.traffic[inputs.get(SHARED, 0)]
        return (
            exchange(replace(network, inter_node=slower(network.inter_node), intra_node=inside)) / self.every
        )


def predicted(step: StepTime, dense: StepTime) -> Prediction:
    moves = {name: abs(step.seconds({name: 1}) - step.seconds({name: -1})) for name in INPUTS}
    return Prediction(
        step.name,
        combined(step.seconds),
        step.question.compute_s.middle,
        step.selecting({}),
        step.transfer({}),
        combined(lambda inputs: dense.seconds(inputs) / step.seconds(inputs)),
        max(moves, key=lambda name: moves[name]),
        step.every,
    )


def combined(quantity: Callable[[Inputs], float]) -> Estimate:
    """A quantity's value, and how far the inputs move it, varied one at a time.

    They are independent of each other, so that the squares of their logarithms add up. An input moves all
    methods' times together.
    """
    middle = quantity({})
    logs = [[math.log(quantity({name: side}) / middle) for side in (-1, 1)] for name in INPUTS]
    down, up = (math.sqrt(sum(pick(0.0, *pair) ** 2 for pair in logs)) for pick in (min, max))
    return Estimate(middle, middle * math.exp(-down), middle * math.exp(up))


def traffic_seconds(question: Question, name: str) -> dict[int, Callable[[Network], float]]:
    """Network -> seconds that the exchange takes, with selections of low, middle and high overlap, on which
    only exchanges depend that split by region; of these two steps are replayed, for in the first one Ok-Topk
    takes its thresholds. Everything is in one bucket.
    """
    method, n, size = name.partition("-")[0], question.elements, question.workers
    choices = {"density": question.density} if "density" in sparsify.defaults(method) else {}
    built, k = sparsify.build(method, **choices), num_selected(n, question.density)
    if method not in SPLIT:
        parts = [SparseVector(torch.arange(k), torch.ones(k))] * size  # of which only the number counts
        return dict.fromkeys(PLACES, ExchangeReplay(built, n, size).replay_step(parts, k).simulated_seconds)
    shares = skewed_shares(question.skew) if question.skew > 1 else (1.0,)
    found = dict[int, Callable[[Network], float]]()
    for place, overlap in zip(PLACES, question.overlap, strict=True):
        if place == 0 or k * size <= MOST_REPLAYED:
            made = SyntheticSelections(SelectionStatistics(question.density, overlap, shares), n, size)
            replay = ExchangeReplay(built, n, size)
            replay.replay_step(made, k)
            found[place] = replay.replay_step(made, k).simulated_seconds
    return {place: found.get(place, found[0]) for place in PLACES}


SHAPES = ("width", "layers", "heads")  # settings of a task that change its network
SELECTING = phases.names_in_group(phases.SELECTION)  # searching, packing, merging
COMMUNICATING = phases.names_in_group(phases.COMMUNICATION)
PUBLISHED = ("vgg16_cifar10", 128)  # task and batch of Yoon and Oh's logs
# Methods that search as another one does, whose time stands for theirs.
SEARCH_AS = {"gtopk": "topk", "sparcml": "topk", "scalecom": "topk"}
LISTED = (
    "topk", "topk-fused", "randomk", "randomk-hash", "blockrandomk", "gaussiank", "dgc", "gtopk", "oktopk",
    "sparcml", "scalecom", "stable_topk",
)  # fmt: skip
# Elements of models that others published: torchvision's documentation; Devlin et al. 2019.
MODELS = {
    "resnet50": 25_557_032, "vgg16_imagenet": 138_357_544, "vgg16_cifar10": 14_728_266,
    "resnet18_cifar10": 11_173_962, "bert_large": 340_000_000,
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """Knowledge of one configuration: its task, and the machines of its cluster."""

    config: Mapping[str, Any]
    folders: ResultFolders

    @property
    def gpu(self) -> str:
        return str(self.config["cluster"]["gpu"])

    @property
    def machine(self) -> str:
        return {"none": "CPUs", "any": "GPUs"}.get(self.gpu) or self.gpu.upper()

    @cached_property
    def records(self) -> Frames:
        """Runs whose phases were timed one by one, by real processes, on any machine."""
        frames = loading.load(self.folders.results, ("runs", "steps"))
        runs = frames.runs
        if not len(runs):
            return frames
        whole = (
            runs["timing.mode"].eq("serialised")
            & ~_is_simulated(runs)
            & runs["key"].isin(frames.steps["key"])
        )
        return select_runs(frames, runs.loc[whole, "key"])

    def _of_network(self, runs: pd.DataFrame) -> pd.Series[bool]:
        """Which runs are of the task's very network, whatever their batch."""
        task = self.config["task"]
        same = runs["task.name"].eq(task["name"])
        for name in SHAPES:
            if name in task and (column := f"task.{name}") in runs:
                same &= runs[column].eq(task[name])
        return same.astype(bool)

    @cached_property
    def like(self) -> Frames:
        """Those of `records` on such a machine."""
        return select_runs(self.records, self.records.runs.loc[self._on_machine(self.records.runs), "key"])

    def _on_machine(self, runs: pd.DataFrame) -> pd.Series[bool]:
        """Which runs are on the accelerator that the cluster names; without one those on a CPU."""
        names = runs.get("provenance.gpu", pd.Series(None, runs.index, dtype=object))
        wanted = "" if self.gpu == "any" else self.gpu
        has_name = names.notna() & names.fillna("").str.lower().str.contains(wanted, regex=False)
        found: pd.Series[bool] = names.isna() if self.gpu == "none" else has_name
        return found

    @cached_property
    def measured(self) -> dict[str, int]:
        """n of each task, from what dense allreduces of it sent: 2 (P-1)/P n words."""
        runs, found = self.records.runs, dict[str, int]()
        if not len(runs):
            return found
        for run in runs[runs["method.name"].eq("dense") & runs["workers"].gt(1)].to_dict("records"):
            if run["task.name"] not in found:
                sent = self.records.steps.loc[self.records.steps["key"] == run["key"], "wire_bytes"].median()
                size = int(run["workers"])
                found[run["task.name"]] = round(float(sent) * size / (2 * (size - 1) * 4))
        return found

    def elements(self) -> int | None:
        """n of the task; None where it is not known."""
        task = self.config["task"]
        if "elements" in task:
            return int(task["elements"])
        runs = loading.load(self.folders.results, ("runs",)).runs
        if "parameters" in runs and len(told := runs["parameters"][self._of_network(runs)].dropna()):
            return int(told.iloc[-1])
        return self.measured.get(task["name"]) or MODELS.get(task["name"])

    def compute_s(self) -> Range | None:
        """A dense step's time but for what communicating takes; None where it is not known."""
        task, batch = self.config["task"]["name"], self.config["task"].get("batch_size")
        rest = [
            self._seconds(run["key"], (*SELECTING, *COMMUNICATING), without=True)
            for run in self._as_asked(self.like).to_dict("records")
            if style.method_id(run) == "dense"
        ]
        if rest:
            return spread(rest, f"{len(rest)} stored runs of task={task}")
        if alone := self._steps_alone():
            return spread(alone, f"steps without an exchange of {len(alone)} stored runs of task={task}")
        return published(self.gpu).get("dense") if (task, batch) == PUBLISHED else None

    def _as_asked(self, frames: Frames) -> pd.DataFrame:
        """The runs of the task's network with its batch."""
        runs, batch = frames.runs, self.config["task"].get("batch_size")
        if not len(runs):
            return runs
        same = self._of_network(runs)
        found: pd.DataFrame = runs[same if batch is None else same & runs["task.batch_size"].eq(batch)]
        return found

    def _steps_alone(self) -> list[float]:
        """Seconds of a step in which nobody communicates, of runs in real time that have local steps and as
        many workers, which may share a machine's cores.
        """
        frames = loading.load(self.folders.results, ("runs", "steps"))
        runs = self._as_asked(frames)
        if not {"method.every", "timing.mode"} <= {*runs}:
            return []
        runs = runs[
            runs["method.every"].gt(1) & runs["timing.mode"].eq("production") & self._on_machine(runs)
        ]
        runs = runs[~_is_simulated(runs) & runs["workers"].eq(self.config["workers"])]
        runs = runs[runs["key"].isin(frames.steps["key"])]
        each = [warm_steps(frames, key).steps for key in runs["key"]]
        alone = [steps.loc[steps["wire_bytes"].eq(0), "step_s"] for steps in each]
        return [float(seconds.mean()) for seconds in alone if len(seconds)]

    def select_s(self, elements: int) -> dict[str, Range]:
        """Seconds by method: as stored runs on such a machine took (in proportion to the elements), as `make
        bench BENCH=methods` found it, or as published.
        """
        found = {**self._benched(elements), **self._recorded(elements)}
        if self.config["task"]["name"] == PUBLISHED[0]:
            found |= {name: took for name, took in published(self.gpu).items() if name != "dense"}
        return found

    def _recorded(self, elements: int) -> dict[str, Range]:
        samples = defaultdict[str, list[float]](list)
        for run in self.like.runs.to_dict("records"):
            name, task = style.method_id(run), str(run["task.name"])
            own = int(run["task.elements"]) if task == "vector" else self.measured.get(task)
            # One that can't be replayed is none of those listed.
            if own is not None and name in LISTED and name.partition("-")[0] == run["method.name"]:
                took = self._seconds(run["key"], SELECTING)
                samples[name].append(took * elements / own)
        return {name: spread(took, f"{len(took)} stored runs") for name, took in samples.items()}

    def _benched(self, elements: int) -> dict[str, Range]:
        """Rows that `make bench BENCH=methods` recorded, of the number of elements that is nearest."""
        device, found = {"none": "cpu", "any": "cuda"}.get(self.gpu), dict[str, Range]()
        stores = sorted((self.folders.results / "bench").glob("methods-*.jsonl"))
        parts = [f"{part}_ms" for part in ("select", "exchange", "retain", "scatter")]
        rows = [row for store in stores for row in read_rows_with_numbers(store, ("n", *parts))]
        for row in sorted(rows, key=lambda row: abs(row["n"] - elements), reverse=True):
            if row["device"] == device:
                took = sum(row[part] for part in parts)
                source = f"make bench BENCH=methods, n = {row['n']:,}"
                found[row["method"]] = spread([1e-3 * took * elements / row["n"]], source)
        return found

    def _seconds(self, key: str, counted: Collection[str], without: bool = False) -> float:
        """Mean seconds of a run's step in these phases, or in all others, `unaccounted` among them."""
        took = mean_phase_seconds(self.like, [key]).drop("step")
        return float(took[took.index.isin(counted) != without].sum())


def _is_simulated(runs: pd.DataFrame) -> pd.Series[bool]:
    found: pd.Series[bool] = runs.reindex(columns=["simulated"])["simulated"].eq(True)
    return found


def published(gpu: str) -> dict[str, Range]:
    """Times of Yoon and Oh 2022, from their own logs: VGG-16, batch 128, 8 A100 or V100, no validation.

    Of dense what computing takes, of a method what selecting does; nothing of other machines.
    """
    jobs = {method: job for (machine, method), job in JOB_BY_GPU_AND_METHOD.items() if machine == gpu.upper()}
    found = dict[str, Range]()
    for method, job in jobs.items():
        # What an iteration takes beyond communicating, wherever their clock put it; of dense it is computing.
        took = _beyond_communicating(job)
        if method != "dense":
            took = block_intervals.combine_estimates(
                lambda ours, dense: ours - dense, took, _beyond_communicating(jobs["dense"])
            )
        took = took.scale_by(1e-3)
        assert took.low is not None
        assert took.high is not None
        source = f"published: logs of Yoon and Oh 2022, 8 {gpu.upper()}"
        found[method] = Range(took.low, took.value, took.high, source)
    return found


def _beyond_communicating(job: int) -> Estimate:
    """Milliseconds."""
    waits = block_intervals.jackknife_estimate(communication_ms(job))
    return block_intervals.combine_estimates(
        lambda step, waiting: step - waiting, validation_free_step_ms(job), waits
    )


def spread(seconds: Sequence[float], source: str) -> Range:
    """The median, from the quickest to the slowest run."""
    if len(seconds) == 1:
        return Range.around(seconds[0], source)
    return Range(min(seconds), float(pd.Series(seconds).median()), max(seconds), source)
