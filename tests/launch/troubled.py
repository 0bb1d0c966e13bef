"""Runs that get into trouble, and what becomes of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil

from analysis.records.log import read_json_lines
from analysis.records.store import Attempt, Store
from tests.worker.runs import carry_out, orders

STEPS = 400
WORDS = (
    "method=topk", "method.density=0.01", "task=cnn_digits", "profile=smoke", "workers=2",
    f"train.steps={STEPS}", "timing.mode=production", "train.validate=never", "container=none",
    "launch.checkpoint_min=0.01",
)  # fmt: skip
# Steps wait, or most runs are over before they are told: 8 s in all, however fast the machine is.
SLOW = ("late.draw=constant", "late.s=0.02")
DEADLINE_S = 240
LEAVE_S = 10.0  # in which processes must be gone once their command has ended


def await_(
    condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, pause: float = 0.2
) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {deadline_s:.0f} s")
        time.sleep(pause)


@cache
def weights(seed: int, batch_size: int) -> str:
    """Return the weights of a run that nothing happens to: over virtual ranks, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*WORDS, "cluster=virtual", f"seed={seed}", f"task.batch_size={batch_size}")
        told, straight = orders(Store(Path(folder) / "runs"), *words)
        carry_out(told, straight, Path(folder) / "start")
        return str(straight.manifest["weights"])


def faults_in(attempt: Attempt) -> list[str]:
    """Return what is wrong with a record that should be whole: nothing, if nothing was lost or done twice."""
    if not attempt.is_valid(verify_digests=True):
        return [f"it is {attempt.state}: {attempt.manifest.get('why')}"]
    found = []
    if attempt.manifest["weights"] != weights(seed_of(attempt), attempt.config["task"]["batch_size"]):
        found.append("other weights")
    if not attempt.manifest["agreed"]:
        found.append("the workers disagree")
    for rank in range(attempt.config["workers"]):
        lines, broken = read_json_lines(attempt.rank_log_path(rank))
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        if steps != [*range(STEPS)] or broken:
            found.append(f"rank {rank}: {len(steps)} steps, {len({*steps})} different, {broken} broken lines")
    if list(attempt.path.glob("checkpoints/*")):
        found.append("checkpoints were left")
    return found


def seed_of(attempt: Attempt) -> int:
    return int(attempt.config["seed"])


def processes_of(results: Path) -> list[psutil.Process]:
    """Whatever runs for these results: starters, workers, and what these have started."""
    every = psutil.process_iter(["environ"])  # None of those that are not ours, or have ended
    return [one for one in every if ("SPARSIFY_RESULTS", str(results)) in (one.info["environ"] or {}).items()]


def left_of(results: Path) -> list[psutil.Process]:
    """Return the processes for these results that have not ended in time, and end them."""
    _, left = psutil.wait_procs(processes_of(results), timeout=LEAVE_S)
    for process in left:
        process.kill()
    return left
