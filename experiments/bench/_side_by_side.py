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
from experiments.bench._follower import Ended, Follower
from experiments.bench._memory import turns
from experiments.bench._steps import Made, NotRun, Setup
from sparsify import host_sync, huge_pages, kernels
from sparsify.method import num_selected
from sparsify.types import Sparse

LEAST = 3  # repetitions of every row, however long they take
IDLE_S = 0.01  # OpenMP's threads spin for a while after a parallel operation; they may not meet the next row
SETTLING = 3  # untimed steps of the residual


class SideBySide:
    """The steps of one case, on the same residual and gradient, turn after turn.

    Args:
        lines: the rows; what can't run here is told in them.
        named: rows that were asked for by name.
        flush: bytes that are read before each step.
        kept: the folder of real gradients.
    """

    def __init__(
        self,
        case: Case,
        lines: dict[str, Timed],
        named: set[str],
        flush: int,
        kept: Path,
        device: torch.device,
    ) -> None:
        n, density, distribution = case
        self.inputs = gradients.inputs(distribution, n, turns(n), kept, device)
        self.residual = self.inputs.residual
        self.work = huge_pages.advise(torch.empty_like(self.residual))
        words = (*map(str, case), str(torch.get_num_threads()), str(flush), str(kept.resolve()))
        self.setup = Setup(self.work, num_selected(n, density), self.inputs.gradients, words)
        self.made = ready(lines, self.setup, named)
        self.guide = kernels.kernel_for(
            self.work
        )  # exact: it knows the threshold, and how the residual goes on
        self.best = Sparse(torch.empty(0), torch.empty(0))  # what it chose in this turn
        self.cold = torch.full((flush // 4,), 1.0, device=device)
        self.clock = Clock(device)

    def begin(self, turn: int) -> None:
        self.grad = self.inputs.gradients[turn % len(self.inputs.gradients)]
        self.best = self.guide.topk(self.work.copy_(self.residual), self.grad, self.setup.k)
        self.setup.threshold.copy_(self.best.values.abs().min())

    def step(self, name: str) -> Sparse | None:
        """What the row chose; `clock` knows how long it took."""
        self.work.copy_(self.residual)
        self.cold.sum()  # read, not written: what a step finds in the cache has no need to go to memory
        if not self.clock.cuda:
            time.sleep(IDLE_S)
        with self.clock.timing(name):
            return self.made[name].step(self.work, self.grad)

    def go_on(self) -> None:
        """The residual after this turn."""
        if self.inputs.is_first_step:
            return
        self.residual.add_(self.grad)
        self.best.add_to(self.residual, alpha=-1)


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
    bench = SideBySide(case, lines, named, flush, kept, device)
    made, differ, settled = bench.made, list[tuple[str, str]](), dict[str, kernels.SearchStats]()
    with no_collection():
        for turn in range(-SETTLING, repeats + 1):  # in turn 0 the rows run, and are not counted
            bench.begin(turn)
            for name in started(list(made), turn) if turn >= 0 else ():
                timed = lines[name]
                if timed.spent_s > seconds and len(timed.samples) >= LEAST:
                    continue
                if (follower := made[name].follower) is not None:
                    if follow(follower, timed, turn):
                        differ.append((name, bench.guide.name))
                    continue
                waits = host_sync.num_syncs()
                chosen = bench.step(name)
                if turn == 0:
                    settled[name] = stats_of(made[name].kernel)
                    if timed.row.exact and not same_magnitudes(chosen, bench.best):
                        differ.append((name, bench.guide.name))
                    continue
                timed.waits += host_sync.num_syncs() - waits
                if chosen is not None:
                    timed.selected.append(chosen.indices.numel())
            for name, wall_ms, cpu_ms in bench.clock.read():
                if turn > 0:
                    lines[name].samples[turn] = wall_ms
                    if cpu_ms is not None:
                        lines[name].cpu[turn] = cpu_ms
            bench.go_on()
    for name, (_, kernel, _) in made.items():
        if kernel is not None:
            timed, done, before = lines[name], kernel.stats(), settled[name]
            timed.kernel = kernel.name
            timed.steps = done.steps - before.steps
            timed.fallbacks = done.fallbacks - before.fallbacks
            timed.candidates = done.candidates - before.candidates
    return bench.inputs.source, differ


def follow(follower: Follower, timed: Timed, turn: int) -> bool:
    """A step in another process; did it choose others than it should?"""
    if timed.why is not None:
        return False
    try:
        took = follower.step(turn)
    except Ended as why:
        timed.why = str(why)
        timed.samples.clear()
        return False
    if turn > 0:
        timed.samples[turn], timed.cpu[turn] = took["wall_ms"], took["cpu_ms"]
        timed.selected.append(int(took["selected"]))
    return turn == 0 and bool(took["differs"])


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
    """Milliseconds of each step: events on a GPU, read at the end of a repetition; else the host's clock, and
    the CPU time of all threads of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.taken: list[tuple[str, Any, float | None]] = []

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        if self.cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self.taken.append((name, (before, after), None))
        else:
            worked, began = time.process_time(), time.perf_counter()
            yield
            ended = time.perf_counter()
            self.taken.append((name, 1e3 * (ended - began), 1e3 * (time.process_time() - worked)))

    def read(self) -> list[tuple[str, float, float | None]]:
        """What was timed since the last call: row, wall time, CPU time."""
        if self.cuda:
            torch.cuda.synchronize()
            self.taken = [(name, before.elapsed_time(after), None) for name, (before, after), _ in self.taken]
        taken, self.taken = self.taken, []
        return taken
