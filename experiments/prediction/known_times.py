"""Times of computing and selecting that are known: from stored runs, benchmarks and published logs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from analysis.pictures import captions, style
from analysis.pictures.numbers import format_count
from analysis.published import block_intervals
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD, mean_communication_ms
from analysis.published.validation_free import validation_free_step_ms
from analysis.records import loading, phases
from analysis.records.frames import Frames, empty_table, select_runs
from analysis.records.loading import OWN
from analysis.records.steps import mean_phase_seconds, warm_steps
from analysis.stats import Estimate
from experiments.bench._runner import read_newest_rows_with_numbers
from experiments.config.folders import ResultFolders
from experiments.prediction.step_times import UncertainTime
from experiments.tasks import REGISTRY as TASKS

NETWORK_SETTINGS = ("width", "layers", "heads")  # settings of a task that change its network
SELECTING = phases.phase_names_in_group(phases.SELECTION)  # searching, packing, merging
COMMUNICATING = phases.phase_names_in_group(phases.COMMUNICATION)
PUBLISHED_TASK = "vgg16_cifar10"  # of Yoon and Oh's logs
PUBLISHED_BATCH = 128
SCALING_FACTOR = 2.0  # by which a time in proportion to another network or batch may be off
# Methods that search as another one does, whose time stands for theirs.
SEARCHES_LIKE = {"gtopk": "topk", "sparcml": "topk", "scalecom": "topk"}
RANKED_METHODS = (
    "topk", "topk-fused", "randomk", "randomk-hash", "blockrandomk", "gaussiank", "dgc", "gtopk", "oktopk",
    "sparcml", "scalecom", "stable_topk",
)  # fmt: skip
# Elements of models that others published: torchvision's documentation; Devlin et al. 2019.
ELEMENTS_BY_MODEL = {
    "resnet50": 25_557_032, "vgg16_imagenet": 138_357_544, "vgg16_cifar10": 14_728_266,
    "resnet18_cifar10": 11_173_962, "bert_large": 340_000_000,
}  # fmt: skip


@dataclass(frozen=True)
class KnownTimes:
    """Known times and sizes for one configuration: of its task, and of the machines of its cluster."""

    config: Mapping[str, Any]
    folders: ResultFolders

    @property
    def gpu(self) -> str:
        return str(self.config["cluster"]["gpu"])

    @property
    def machine_label(self) -> str:
        """The name of the accelerator in sentences."""
        return {"none": "CPUs", "any": "GPUs"}.get(self.gpu) or self.gpu.upper()

    @cached_property
    def serialised_records(self) -> Frames:
        """Runs of real processes whose phases were timed one by one, on any machine."""
        frames = loading.load(self.folders.results, ("runs", "steps"))
        runs = frames.runs
        if not len(runs):
            return frames
        is_serialised = runs["timing.mode"].eq("serialised") & ~_is_simulated(runs)
        return select_runs(frames, runs.loc[is_serialised & runs["key"].isin(frames.steps["key"]), "key"])

    @cached_property
    def serialised_records_on_machine(self) -> Frames:
        """Runs among `serialised_records` on such a machine."""
        return select_runs(
            self.serialised_records,
            self.serialised_records.runs.loc[self._is_on_machine(self.serialised_records.runs), "key"],
        )

    def _has_network(self, runs: pd.DataFrame) -> pd.Series[bool]:
        """Return True for each run of the task's very network, whatever the batch."""
        task = self.config["task"]
        has_network = runs["task.name"].eq(task["name"])
        for name in NETWORK_SETTINGS:
            if name in task and f"task.{name}" in runs:
                has_network &= runs[f"task.{name}"].eq(task[name])
        return has_network.astype(bool)

    def _is_on_machine(self, runs: pd.DataFrame) -> pd.Series[bool]:
        """Return True for each run on the accelerator that the cluster names; on a CPU if it names none."""
        names = runs.get("provenance.gpu", pd.Series(None, runs.index, dtype=object))
        if self.gpu == "none":
            is_without: pd.Series[bool] = names.isna()
            return is_without
        model_part = "" if self.gpu == "any" else self.gpu
        has_name: pd.Series[bool] = names.notna() & names.fillna("").str.lower().str.contains(
            model_part, regex=False
        )
        return has_name

    @cached_property
    def measured_elements_by_task(self) -> dict[str, int]:
        """Elements by task, from the bytes of dense allreduces: 2 (P-1)/P n words."""
        runs = self.serialised_records.runs
        elements_by_task = dict[str, int]()
        if not len(runs):
            return elements_by_task
        for run in runs[runs["method.name"].eq("dense") & runs["workers"].gt(1)].to_dict("records"):
            if run["task.name"] not in elements_by_task:
                steps = self.serialised_records.steps
                wire_bytes = float(steps.loc[steps["key"] == run["key"], "wire_bytes"].median())
                workers = int(run["workers"])
                elements_by_task[run["task.name"]] = round(wire_bytes * workers / (2 * (workers - 1) * 4))
        return elements_by_task

    def find_elements(self) -> int | None:
        """Return the number of elements of the task's model; None where it is not known."""
        task = self.config["task"]
        if "elements" in task:
            return int(task["elements"])
        runs = loading.load(self.folders.results, ("runs",)).runs
        if "parameters" in runs:
            recorded = runs["parameters"][self._has_network(runs)].dropna()
            if len(recorded):
                return int(recorded.iloc[-1])
        return (
            self._described_elements()
            or self.measured_elements_by_task.get(task["name"])
            or ELEMENTS_BY_MODEL.get(task["name"])
        )

    def _described_elements(self) -> int | None:
        """Return the elements that the task's description names, where its network is as described."""
        task = self.config["task"]
        match = re.search(r"([\d,]+) parameters", TASKS.docstring(task["name"]))
        defaults = TASKS.defaults(task["name"])
        is_as_described = all(task.get(name) == defaults.get(name) for name in NETWORK_SETTINGS)
        return int(match[1].replace(",", "")) if match and is_as_described else None

    def find_compute_time(self) -> UncertainTime | None:
        """Return the time of a dense step without communication; None where it is not known.

        Runs of the very network and batch come before others of the task.
        """
        task = self.config["task"]
        serialised = self._select_same_task(self._serialised_dense_runs)
        if len(serialised):
            return summarize_runs(serialised, f" of task={task['name']}")
        is_alike = self._local_step_runs["workers"].eq(self.config["workers"])
        local = self._select_same_task(self._local_step_runs[is_alike])
        if len(local):
            return summarize_runs(local, f" of task={task['name']}", "steps without an exchange of ")
        if (task["name"], task.get("batch_size")) == (PUBLISHED_TASK, PUBLISHED_BATCH):
            return published_compute_and_select_times(self.gpu).get("dense")
        runs = pd.concat([self._serialised_dense_runs, self._local_step_runs], ignore_index=True)
        return self._scale_compute_time(runs)

    def _scale_compute_time(self, runs: pd.DataFrame) -> UncertainTime | None:
        """Return a time in proportion to parameters and batch, from runs of the task with others of these."""
        elements = self.find_elements()
        sized = runs.reindex(columns=["parameters", "task.batch_size"]).astype(float)
        runs = runs[sized.notna().all(axis=1)]
        if elements is None or not len(runs):
            return None
        batch = self.config["task"]["batch_size"]
        work = elements * batch / sized.loc[runs.index].prod(axis=1)
        sizes = {(int(row["parameters"]), int(row["task.batch_size"])) for row in runs.to_dict("records")}
        others = " or ".join(f"{count:,} parameters and batch {size}" for count, size in sorted(sizes))
        of_others = f" of task={self.config['task']['name']} with {others}"
        time = summarize_runs(runs.assign(seconds=runs["seconds"] * work), of_others)
        return time._replace(
            low_s=time.low_s / SCALING_FACTOR,
            high_s=time.high_s * SCALING_FACTOR,
            source=f"{time.source}, in proportion to parameters and batch",
        )

    def _select_same_task(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Return the runs of the task's network with its batch."""
        batch = self.config["task"].get("batch_size")
        if len(runs):
            runs = runs[self._has_network(runs)]
        if len(runs) and batch is not None:
            runs = runs[runs["task.batch_size"].eq(batch)]
        return runs

    @cached_property
    def _serialised_dense_runs(self) -> pd.DataFrame:
        """Dense runs of the task on such a machine, timed phase by phase, and the `seconds` they compute."""
        runs = self.serialised_records_on_machine.runs
        if len(runs):
            runs = runs[runs["task.name"].eq(self.config["task"]["name"])]
        is_dense = [style.method_id(run) == "dense" for run in runs.to_dict("records")]
        runs = runs[pd.Series(is_dense, runs.index, dtype=bool)]
        phases_left_out = (*SELECTING, *COMMUNICATING)
        seconds = [self._mean_phase_s(key, phases_left_out, invert=True) for key in runs["key"]]
        measured: pd.DataFrame = runs.assign(seconds=pd.Series(seconds, runs.index, dtype=float))
        return measured

    @cached_property
    def _local_step_runs(self) -> pd.DataFrame:
        """Runs of the task with local steps, and the mean `seconds` of their steps without an exchange.

        The runs are in real time on such a machine, whose cores their workers may share.
        """
        frames = loading.load(self.folders.results, ("runs", "steps"))
        if not {"method.every", "timing.mode"} <= {*frames.runs}:
            none: pd.DataFrame = empty_table("runs").assign(seconds=pd.Series(dtype=float))
            return none
        runs = frames.runs
        is_timed = runs["timing.mode"].eq("production") & ~_is_simulated(runs) & self._is_on_machine(runs)
        is_of_task = runs["task.name"].eq(self.config["task"]["name"])
        has_steps = runs["method.every"].gt(1) & runs["key"].isin(frames.steps["key"])
        frames = select_runs(frames, runs.loc[is_timed & is_of_task & has_steps, "key"])
        seconds_by_key = {}
        for key in frames.runs["key"]:
            steps = warm_steps(frames, key).steps
            seconds_by_key[key] = steps.loc[steps["wire_bytes"].eq(0), "step_s"].mean()
        runs = frames.runs
        measured: pd.DataFrame = runs.assign(seconds=runs["key"].map(seconds_by_key)).dropna(subset="seconds")
        return measured

    def find_select_time_by_method(self, elements: int) -> dict[str, UncertainTime]:
        """Return the known selection times by method.

        Published times come first, then those of stored runs on such a machine, in proportion to the
        elements, then those of `make bench BENCH=methods`.
        """
        times = self.read_benchmarked_select_times(elements) | self._recorded_select_times(elements)
        if self.config["task"]["name"] == PUBLISHED_TASK:
            times |= {
                name: time
                for name, time in published_compute_and_select_times(self.gpu).items()
                if name != "dense"
            }
        return times

    def _recorded_select_times(self, elements: int) -> dict[str, UncertainTime]:
        rows = []
        for run in self.serialised_records_on_machine.runs.to_dict("records"):
            name = style.method_id(run)
            task = str(run["task.name"])
            measured = (
                int(run["task.elements"]) if task == "vector" else self.measured_elements_by_task.get(task)
            )
            # A method that can't be replayed is not ranked.
            if (
                measured is not None
                and name in RANKED_METHODS
                and name.partition("-")[0] == run["method.name"]
            ):
                seconds = self._mean_phase_s(run["key"], SELECTING) * elements / measured
                rows.append({**run, "seconds": seconds, "ranked_as": name})
        runs = pd.DataFrame(rows)
        return {str(name): summarize_runs(alike) for name, alike in runs.groupby("ranked_as")} if rows else {}

    def read_benchmarked_select_times(self, elements: int) -> dict[str, UncertainTime]:
        """Return times that `make bench BENCH=methods` recorded of the nearest number of elements."""
        device = {"none": "cpu", "any": "cuda"}.get(self.gpu)
        files = sorted((self.folders.results / "bench").glob("methods-*.jsonl"))
        parts = [f"{part}_ms" for part in ("select", "exchange", "retain", "scatter")]
        rows = [row for file in files for row in read_newest_rows_with_numbers(file, ("n", *parts))]
        times = dict[str, UncertainTime]()
        for row in sorted(rows, key=lambda row: abs(row["n"] - elements), reverse=True):
            if row["device"] == device:
                seconds = 1e-3 * sum(row[part] for part in parts) * elements / row["n"]
                source = f"make bench BENCH=methods, n = {row['n']:,}"
                times[row["method"]] = UncertainTime.around(seconds, source)
        return times

    def _mean_phase_s(self, key: str, names: Collection[str], *, invert: bool = False) -> float:
        """Return the mean seconds of a run's steps in these phases, or in all others and outside."""
        seconds = mean_phase_seconds(self.serialised_records_on_machine, [key]).drop("step")
        return float(seconds[seconds.index.isin(names) != invert].sum())


def _is_simulated(runs: pd.DataFrame) -> pd.Series[bool]:
    is_simulated: pd.Series[bool] = runs.reindex(columns=["simulated"])["simulated"].eq(True)
    return is_simulated


def published_compute_and_select_times(gpu: str) -> dict[str, UncertainTime]:
    """Return times from the logs of Yoon and Oh 2022: VGG-16, batch 128, 8 A100 or V100, no validation.

    Of dense it is the time of computing, of another method that of selecting; nothing of other machines.
    """
    jobs = {method: job for (machine, method), job in JOB_BY_GPU_AND_METHOD.items() if machine == gpu.upper()}
    times = dict[str, UncertainTime]()
    for method, job in jobs.items():
        # All of an iteration beyond communicating, wherever their clock put it; of dense it is computing.
        estimate = _without_communication_ms(job)
        if method != "dense":
            dense = _without_communication_ms(jobs["dense"])
            estimate = block_intervals.combine_independent_estimates(
                lambda iteration, dense: iteration - dense, estimate, dense
            )
        assert estimate.low is not None
        assert estimate.high is not None
        source = f"published: logs of Yoon and Oh 2022, 8 {gpu.upper()}"
        times[method] = UncertainTime(
            1e-3 * estimate.low, 1e-3 * estimate.value, 1e-3 * estimate.high, source
        )
    return times


def _without_communication_ms(job: int) -> Estimate:
    waits = block_intervals.jackknife_estimate(mean_communication_ms(job))
    return block_intervals.combine_independent_estimates(
        lambda step, waiting: step - waiting, validation_free_step_ms(job), waits
    )


def summarize_runs(runs: pd.DataFrame, of_what: str = "", what: str = "") -> UncertainTime:
    """Return the `seconds` of the user's own runs among these, or of all where there is none."""
    own = runs[runs["source"].eq(OWN)]
    used = own if len(own) else runs
    time = summarize_times([*used["seconds"]], f"{what}{describe_origin(used, of_what)}")
    return time._replace(is_shipped=not len(own))


def describe_origin(runs: pd.DataFrame, of_what: str = "") -> str:
    """Return '3 own runs'; of shipped ones '33 shipped runs on AMD EPYC (2 cores)', with their machines."""
    count = runs["run_id"].nunique()
    if runs["source"].eq(OWN).all():
        return f"{format_count(count, 'own runs')}{of_what}"
    machines = runs.reindex(columns=["provenance.gpu", "provenance.cpu", "provenance.cores"])
    names = {
        str(gpu) if isinstance(gpu, str) else f"{cpu} ({format_count(int(cores), 'cores')})"
        for gpu, cpu, cores in machines.itertuples(index=False)
    }
    where = captions.join_with_and(sorted(names))
    return f"{format_count(count, 'shipped runs')}{of_what} on {where}"


def summarize_times(seconds: Sequence[float], source: str) -> UncertainTime:
    """Return the median, the quickest and the slowest run; a single time is as uncertain as a given one."""
    if len(seconds) == 1:
        return UncertainTime.around(seconds[0], source)
    return UncertainTime(min(seconds), float(pd.Series(seconds).median()), max(seconds), source)
