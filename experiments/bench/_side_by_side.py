"""Steps timed side by side: on the same inputs, in turn, with cold caches, within the memory that is free."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.bench import _gradients as gradients
from experiments.bench._case import Case, Timed
from experiments.bench._memory import turns
from experiments.bench._steps import Made, NotRun, Setup
from sparsify import host_sync, kernels
from sparsify.method import num_selected
from sparsify.types import Sparse

LEAST = 3  # repetitions of every row, however long they take
IDLE_S = 0.01  # OpenMP's threads spin for a while after a parallel operation; they may not meet the next row
SETTLING = 3  # untimed steps of the residual


def measure(
    case: Case,
    lines: dict[str, Timed],
    named: set[str],
    repeats: int,
    seconds: float,
    flush: int,
    kept: Path,
    device: torch.device,
) -> tuple[str, list[tuple[str, str]]]:
    """Fill in the rows. Returns what the gradients are, and pairs of a row and a kernel that disagree."""
    n, density, distribution = case
    inputs = (
        gradients.real(distribution, kept, device)
        if distribution in gradients.NETWORKS
        else gradients.synthetic(distribution, n, turns(n), device)
    )
    residual, work = inputs.residual, torch.empty_like(inputs.residual)
    setup = Setup(work, num_selected(n, density), inputs.gradients)
    made = ready(lines, setup, named)
    guide = kernels.kernel_for(work)  # exact: it knows the threshold, and how the residual goes on
    cold = torch.full((flush // 4,), 1.0, device=device)
    clock, differ, settled = Clock(device), list[tuple[str, str]](), dict[str, kernels.SearchStats]()
    with no_collection():
        for turn in range(-SETTLING, repeats + 1):  # in turn 0 the rows run, and are not counted
            grad = inputs.gradients[turn % len(inputs.gradients)]
            best = guide.topk(work.copy_(residual), grad, setup.k)
            setup.threshold.copy_(best.values.abs().min())
            for name in started(list(made), turn) if turn >= 0 else ():
                timed = lines[name]
                if timed.spent_s > seconds and len(timed.samples) >= LEAST:
                    continue
                work.copy_(residual)
                cold.sum()  # read, not written: what a step finds in the cache has no need to go to memory
                if device.type == "cpu":
                    time.sleep(IDLE_S)
                waits = host_sync.num_syncs()
                with clock.timing(name):
                    chosen = made[name].step(work, grad)
                if turn == 0:
                    settled[name] = stats_of(made[name].kernel)
                    if timed.row.exact and not same_magnitudes(chosen, best):
                        differ.append((name, guide.name))
                    continue
                timed.waits += host_sync.num_syncs() - waits
                if chosen is not None:
                    timed.selected.append(chosen.indices.numel())
            for name, ms in clock.read():
                if turn > 0:
                    lines[name].samples[turn] = ms
            residual.add_(grad)
            best.add_to(residual, alpha=-1)
    for name, (_, kernel) in made.items():
        if kernel is not None:
            timed, done, before = lines[name], kernel.stats(), settled[name]
            timed.kernel = kernel.name
            timed.steps = done.steps - before.steps
            timed.fallbacks = done.fallbacks - before.fallbacks
            timed.candidates = done.candidates - before.candidates
    return inputs.source, differ


def ready(lines: dict[str, Timed], setup: Setup, named: set[str]) -> dict[str, Made]:
    """The steps that this machine can run; the lines of the others say why not."""
    made = {}
    for name, timed in lines.items():
        if timed.why is None:
            setup.named = name in named
            try:
                made[name] = timed.row.make(setup)
            except NotRun as reason:
                timed.why = str(reason)
    return made


def started(names: list[str], turn: int) -> list[str]:
    """Another row goes first each time."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]


def stats_of(kernel: kernels.Kernel | None) -> kernels.SearchStats:
    """A copy, for a kernel may go on counting in the object that it returned."""
    return kernels.SearchStats() if kernel is None else replace(kernel.stats())


def same_magnitudes(chosen: Sparse | None, best: Sparse) -> bool:
    assert chosen is not None
    ours, theirs = (found.values.abs().sort().values for found in (chosen, best))
    return torch.equal(ours, theirs)


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage is collected outside of timed steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Clock:
    """Milliseconds of each step: events on a GPU, read at the end of a repetition; else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.taken: list[tuple[str, Any]] = []

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        if self.cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self.taken.append((name, (before, after)))
        else:
            began = time.perf_counter()
            yield
            self.taken.append((name, 1e3 * (time.perf_counter() - began)))

    def read(self) -> list[tuple[str, float]]:
        """What was timed since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
            self.taken = [(name, before.elapsed_time(after)) for name, (before, after) in self.taken]
        taken, self.taken = self.taken, []
        return taken
