"""What the items share whose times are predicted: measured or published computing and selecting, and an
exchange by the alpha-beta model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.published.rederived import JOB, communication_ms
from analysis.published.unvalidated import step_ms
from analysis.records import phases
from analysis.records.frames import Frames, cache_by_frames
from analysis.records.steps import mean_phase_seconds
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import TIMED, scale, variants, with_density
from sparsify import cost

# Method -> its scheme in `sparsify.cost.published_cost`.
SCHEMES = {
    "dense": "dense", "topk": "topka", "topk-fused": "topka", "dgc": "topka", "gaussiank": "gaussiank",
    "randomk-hash": "randomk allgather", "oktopk": "oktopk",
    "stable_topk": "randomk allreduce",  # values without indices
}  # fmt: skip
SELECTING = phases.names_in_group(phases.SELECTION)  # searching, packing, merging
COMMUNICATING = phases.names_in_group(phases.COMMUNICATION)
WORD = 4  # bytes
ALPHA_S = 5e-5  # seconds to start a message on Ethernet, as conf/link/ethernet_10g.yaml has it
MODEL = 14_728_266  # parameters of VGG-16 for CIFAR-10
SIMULATED = (
    "*Simulated*: no gradient travelled; communicating takes what the alpha-beta model (sparsify/cost.py) "
    "says, at 50 us a message; nothing overlaps, and nobody is late."
)


class Work(NamedTuple):
    """Seconds of a step but for communicating."""

    compute_s: float
    select_s: float


def ethernet(gbit_s: float) -> cost.Link:
    return cost.Link(ALPHA_S, 8e-9 / gbit_s)


FAST = "NVLink 3"  # as conf/link/nvlink3.yaml has it
LINKS = {"1 Gbit/s": ethernet(1), "10 Gbit/s": ethernet(10), FAST: cost.Link(3.4e-6, 4.17e-12)}


def exchange_s(method: str, elements: int, density: float, workers: int, link: cost.Link) -> float:
    """Seconds by the published words; Ok-Topk's upper end, which its exchange keeps to (stable-costs)."""
    k = max(1, int(density * elements))
    found = cost.published_cost(SCHEMES[method], elements, k, workers)
    return link.transfer_seconds(cost.CollectiveCost(found.messages, int(WORD * found.most)))


@cache_by_frames
def measured(frames: Frames, method: str, elements: int | None = None) -> Work | None:
    """A method's parts, of the runs of real processes; None where there are none.

    Args:
        elements: to which selecting is scaled from those of task=vector.
    """
    if not (keys := yoon2022.keys(frames, method)):
        return None
    seconds = mean_phase_seconds(frames, keys).drop(labels="step")
    selecting = float(sum(took for phase, took in seconds.items() if phase in SELECTING))
    rest = [took for phase, took in seconds.items() if phase not in (*SELECTING, *COMMUNICATING)]
    if elements is not None:
        own = frames.runs.loc[frames.runs["key"] == keys[0], "task.elements"].iloc[0]
        selecting *= elements / float(own)
    return Work(float(sum(rest)), selecting)


def published(method: str) -> Work:
    """Work by the logs of Yoon and Oh 2022, 8 A100, batch 128, validation taken out: what a dense iteration
    takes but for communicating, and what another method's takes beyond that.
    """
    dense, other = (
        step_ms(job).value - float(communication_ms(job)[0])
        for job in (JOB["A100", "dense"], JOB["A100", method])
    )
    return Work(1e-3 * dense, 1e-3 * (other - dense))


def step_s(parts: Work, method: str, density: float, workers: int, link: cost.Link) -> float:
    """Seconds of a step of VGG-16."""
    return sum(parts) + exchange_s(method, MODEL, density, workers, link)


def over_workers(
    parts: Work, method: str, density: float, sizes: Sequence[int], link: cost.Link
) -> np.ndarray:
    """(sizes,) seconds of a step."""
    return np.array([step_s(parts, method, density, size, link) for size in sizes])


DENSITY = 0.001
METHODS = variants("predicted")  # of shi-scaling and stable-dgc, all in turns


def timing_runs(profile: str) -> list[Run]:
    """The run in which all of METHODS take turns."""
    shared = {**TIMED, "profile": profile, **scale("predicted", profile), "cluster": "local", "workers": 2}
    return [Run(shared, with_density(METHODS, DENSITY if profile != "smoke" else 0.01))]


def all_measured(frames: Frames) -> dict[str, Work]:
    """The parts of each of METHODS that has runs; nothing without dense."""
    found = {name: measured(frames, name) for name in METHODS}
    known = {name: parts for name, parts in found.items() if parts is not None}
    # Computing is the same for all: what is measured as dense's counts, else its noise would be the methods'.
    return {
        name: Work(known["dense"].compute_s, parts.select_s)
        for name, parts in known.items()
        if "dense" in known
    }
