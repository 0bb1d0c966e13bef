"""Predicted times of steps: measured or published computing, and exchanges by the alpha-beta model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.published.rederived import JOB_BY_GPU_AND_METHOD, mean_communication_ms
from analysis.published.validation_free import validation_free_step_ms
from analysis.records import phases
from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import mean_phase_seconds
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import TIMED, scaled_settings, settings_by_variant, with_density_except_dense
from sparsify import cost

# Method -> its scheme in `sparsify.cost.published_cost`.
SCHEMES = {
    "dense": "dense", "topk": "topka", "topk-fused": "topka", "dgc": "topka", "gaussiank": "gaussiank",
    "randomk-hash": "randomk allgather", "oktopk": "oktopk",
    "stable_topk": "randomk allreduce",  # values without indices
}  # fmt: skip
SELECTION_PHASES = phases.phase_names_in_group(phases.SELECTION)  # searching, packing, merging
COMMUNICATION_PHASES = phases.phase_names_in_group(phases.COMMUNICATION)
WORD_BYTES = 4
ALPHA_S = 5e-5  # seconds to start a message on Ethernet, as conf/link/ethernet_10g.yaml has it
VGG16_PARAMETERS = 14_728_266  # for CIFAR-10
SIMULATED = (
    "*Simulated*: no gradient travelled; communicating takes what the alpha-beta model (sparsify/cost.py) "
    "says, at 50 us a message; nothing overlaps, and nobody is late."
)
DENSITY = 0.001
METHODS = settings_by_variant("predicted")  # of shi-scaling and stable-dgc, all in turns


class ComputeAndSelectSeconds(NamedTuple):
    """Seconds of a step in computing and in selecting; communicating is left out."""

    compute_s: float
    select_s: float


def ethernet_link(gbit_s: float) -> cost.Link:
    """Return an Ethernet link of this bandwidth."""
    return cost.Link(ALPHA_S, 8e-9 / gbit_s)


FAST = "NVLink 3"  # as conf/link/nvlink3.yaml has it
LINKS = {"1 Gbit/s": ethernet_link(1), "10 Gbit/s": ethernet_link(10), FAST: cost.Link(3.4e-6, 4.17e-12)}


def predicted_exchange_s(method: str, elements: int, density: float, workers: int, link: cost.Link) -> float:
    """Return the seconds of an exchange by the published numbers of words.

    Of Ok-Topk by their upper end, which its exchange keeps to (stable-costs).
    """
    published = _published_cost(method, elements, density, workers)
    return link.transfer_seconds(cost.CollectiveCost(published.messages, int(WORD_BYTES * published.most)))


def predicted_break_even_gbit_s(
    method: str,
    select_s: float,
    density: float,
    workers: int,
    elements: int = VGG16_PARAMETERS,
    dense_hidden_s: float = 0.0,
) -> float:
    """Return the bandwidth up to which a method selects and exchanges in less time than dense exchanges.

    0 where it does nowhere, infinite where it does everywhere.

    Args:
        dense_hidden_s: of dense's exchange, behind backward.
    """
    dense, sparse = (_published_cost(name, elements, density, workers) for name in ("dense", method))
    saved_bits = 8 * WORD_BYTES * float(dense.most - sparse.most)
    spent_s = dense_hidden_s + select_s + ALPHA_S * (sparse.messages - dense.messages)
    if spent_s <= 0:
        return np.inf if saved_bits > 0 else 0.0
    return max(0.0, saved_bits / spent_s / 1e9)


def _published_cost(method: str, elements: int, density: float, workers: int) -> cost.PublishedCost:
    return cost.published_cost(SCHEMES[method], elements, max(1, int(density * elements)), workers)


@cache_by_frames
def measured_compute_and_select(
    frames: Frames, method: str, scale_to_elements: int | None = None
) -> ComputeAndSelectSeconds | None:
    """Return what a method's steps take on real processes but for communicating; None without runs.

    Args:
        scale_to_elements: to which selecting is scaled from those of task=vector.
    """
    keys = yoon2022.method_run_keys(frames, method)
    if not keys:
        return None
    seconds = mean_phase_seconds(frames, keys).drop(labels="step")
    select_s = float(sum(took for phase, took in seconds.items() if phase in SELECTION_PHASES))
    if scale_to_elements is not None:
        timed_elements = frames.runs.loc[frames.runs["key"] == keys[0], "task.elements"].iloc[0]
        select_s *= scale_to_elements / float(timed_elements)
    compute_s = seconds[~seconds.index.isin([*SELECTION_PHASES, *COMMUNICATION_PHASES])].sum()
    return ComputeAndSelectSeconds(float(compute_s), select_s)


def published_compute_and_select(method: str) -> ComputeAndSelectSeconds:
    """Return what a step takes but for communicating, by the logs of Yoon and Oh 2022.

    Of 8 A100 with batch 128, validation taken out.

    Computing is what a dense iteration takes but for communicating, selecting what another method's takes
    beyond that.
    """
    dense_ms, method_ms = (
        validation_free_step_ms(job).value - float(mean_communication_ms(job)[0])
        for job in (JOB_BY_GPU_AND_METHOD["A100", "dense"], JOB_BY_GPU_AND_METHOD["A100", method])
    )
    return ComputeAndSelectSeconds(1e-3 * dense_ms, 1e-3 * (method_ms - dense_ms))


def predicted_vgg16_step_s(
    work: ComputeAndSelectSeconds, method: str, density: float, worker_counts: Sequence[int], link: cost.Link
) -> np.ndarray:
    """Return the seconds of a step of VGG-16 by the number of workers."""
    exchanges = [
        predicted_exchange_s(method, VGG16_PARAMETERS, density, workers, link) for workers in worker_counts
    ]
    return sum(work) + np.array(exchanges)


def predicted_timing_runs(profile: str) -> list[Run]:
    """Return the run in which all of METHODS take turns."""
    shared = scaled_settings(TIMED, "predicted", profile) | {"cluster": "local", "workers": 2}
    return [Run(shared, with_density_except_dense(METHODS, DENSITY if profile != "smoke" else 0.01))]


def measured_compute_and_select_by_method(frames: Frames) -> dict[str, ComputeAndSelectSeconds]:
    """Return computing and selecting of each of METHODS that has runs; nothing without dense.

    Computing is the same for all: what is measured as dense's counts, else its noise would be the methods'.
    """
    dense = measured_compute_and_select(frames, "dense")
    works = {name: measured_compute_and_select(frames, name) for name in METHODS}
    return {
        name: ComputeAndSelectSeconds(dense.compute_s, work.select_s)
        for name, work in works.items()
        if dense and work
    }
