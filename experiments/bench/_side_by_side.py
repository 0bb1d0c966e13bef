"""Steps timed side by side: on the same inputs, in turn, with cold caches, within the memory that is free.

As a program it is the process of a `Follower`: for every turn that it reads, one step of torch.topk, and a
line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.bench import _gradients as gradients
from experiments.bench._steps import ROWS, Made, NotRun, Setup
from experiments.bench._timing import Clock, lacking, no_collection
from sparsify import kernels
from sparsify.core import host_sync, huge_pages
from sparsify.method import num_selected
from sparsify.types import SearchStats, Sparse

LEAST = 3  # repetitions of every row, however long they take
IDLE_S = 0.01  # OpenMP's threads spin for a while after a parallel operation; they may not meet the next row
SETTLING = 3  # untimed steps of the residual
TURNS, FEW_TURNS = 4, 2  # gradients that take turns; so few of them where they are large
LARGE = 30_000_000  # elements
SHARED = 2.5  # floats per element: magnitudes (twice) and mask of the plain operators, candidates


class SelectCase(NamedTuple):
    """The input of all rows."""

    n: int
    density: float
    distribution: str

    def __str__(self) -> str:
        return f"n = {self.n:,}, density {self.density:g}, {self.distribution}"


@dataclass
class StepTimes:
    """Samples of one row in one case."""

    samples: dict[int, float] = field(default_factory=dict)  # repetition -> ms
    cpu: dict[int, float] = field(default_factory=dict)  # repetition -> ms of all threads' CPU time
    selected: list[int] = field(default_factory=list)
    kernel: str | None = None
    waits: int = 0
    stats: SearchStats = field(default_factory=SearchStats)  # the kernel's, of these steps
    why: str | None = None  # the reason, if it was not run

    @property
    def spent_s(self) -> float:
        return sum(self.samples.values()) / 1000

    def add(self, turn: int, wall_ms: float, cpu_ms: float | None) -> None:
        """A sample."""
        self.samples[turn] = wall_ms
        if cpu_ms is not None:
            self.cpu[turn] = cpu_ms


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
        case: SelectCase,
        lines: dict[str, StepTimes],
        named: set[str],
        flush: int,
        kept: Path,
        device: torch.device,
    ) -> None:
        n, density, distribution = self.case = case
        self.lines = lines
        self.inputs = gradients.inputs(distribution, n, turns(n), kept, device)
        self.residual = self.inputs.residual
        self.work = huge_pages.advise(torch.empty_like(self.residual))
        words = json.dumps([*case, torch.get_num_threads(), flush, str(kept.resolve())])
        self.setup = Setup(self.work, num_selected(n, density), self.inputs.gradients, (words,))
        self.made = ready(lines, self.setup, named)
        self.guide = kernels.kernel_for(self.work)  # exact: knows the threshold, and how the residual goes on
        self.best = Sparse(torch.empty(0), torch.empty(0))  # what it chose in this turn
        self.cold = torch.full((flush // 4,), 1.0, device=device)
        self.clock = Clock(device)

    def begin(self, turn: int) -> None:
        self.grad = self.inputs.gradients[turn % len(self.inputs.gradients)]
        self.best = self.guide.topk(self.work.copy_(self.residual), self.grad, self.setup.k)
        self.setup.threshold.copy_(self.best.values.abs().min())

    def step(self, name: str) -> Sparse | None:
        """The elements that the row chose; `clock` knows how long it took."""
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

    def measured(self, repeats: int, seconds: float) -> tuple[str, dict[str, str]]:
        """Fill in the rows. Returns what the gradients are, and a sentence for each row that chose others
        than it should.
        """
        differ, settled = dict[str, str](), dict[str, SearchStats]()
        order = random.Random(0)
        with no_collection():
            for turn in range(-SETTLING, repeats + 1):  # in turn 0 the rows run, and are not counted
                self.begin(turn)
                for name in order.sample(list(self.made), len(self.made)) if turn >= 0 else ():
                    timed, made = self.lines[name], self.made[name]
                    if timed.spent_s > seconds and len(timed.samples) >= LEAST:
                        continue
                    waits = host_sync.num_syncs()
                    if made.follower is not None:
                        differs, selected = self.followed(name, turn)
                    else:
                        chosen = self.step(name)
                        differs = turn == 0 and ROWS[name].exact and not same_magnitudes(chosen, self.best)
                        selected = None if chosen is None else chosen.indices.numel()
                    if turn == 0:
                        settled[name] = stats_of(made.kernel)
                        if differs:
                            differ[name] = (
                                f"{self.case}: {name} selects other magnitudes than {self.guide.name}"
                            )
                        continue
                    timed.waits += host_sync.num_syncs() - waits
                    timed.selected += [] if selected is None else [selected]
                for name, wall_ms, cpu_ms in self.clock.read():
                    if turn > 0:
                        self.lines[name].add(turn, wall_ms, cpu_ms)
                self.go_on()
        for name, (_, kernel, _) in self.made.items():
            if kernel is not None:
                timed, done, before = self.lines[name], kernel.stats(), settled[name]
                timed.kernel = kernel.name
                timed.stats = SearchStats(
                    done.steps - before.steps,
                    done.fallbacks - before.fallbacks,
                    done.candidates - before.candidates,
                )
        return self.inputs.source, differ

    def followed(self, name: str, turn: int) -> tuple[bool, int | None]:
        """A step in another process: did it choose others than it should, and how many?"""
        timed, follower = self.lines[name], self.made[name].follower
        assert follower is not None
        if timed.why is not None:
            return False, None
        try:
            took = follower.step(turn)
        except NotRun as why:
            timed.why = str(why)
            timed.samples.clear()
            return False, None
        if turn > 0:
            timed.add(turn, took["wall_ms"], took["cpu_ms"])
        return bool(took["differs"]), int(took["selected"])


def ready(lines: dict[str, StepTimes], setup: Setup, named: set[str]) -> dict[str, Made]:
    """The steps that this machine can run; the lines of the others say why not."""
    made = {}
    for name, timed in lines.items():
        if timed.why is None:
            setup.named = name in named
            try:
                made[name] = ROWS[name].make(setup)
            except NotRun as reason:
                timed.why = str(reason)
    return made


def stats_of(kernel: kernels.Kernel | None) -> SearchStats:
    """A copy, for a kernel may go on counting in the object that it returned."""
    return SearchStats() if kernel is None else replace(kernel.stats())


def same_magnitudes(chosen: Sparse | None, best: Sparse) -> bool:
    assert chosen is not None
    ours, theirs = (found.values.abs().sort().values for found in (chosen, best))
    return torch.equal(ours, theirs)


def leave_out(case: SelectCase, lines: dict[str, StepTimes], device: torch.device, flush: int) -> bool:
    """Mark the rows that do not fit into memory, the largest first. Does any fit?"""
    held = {name: ROWS[name].held for name in lines}  # of the rows that are kept
    passing = {name: ROWS[name].passing(device.type) for name in lines}
    for name in sorted(lines, key=lambda name: held[name] + passing[name], reverse=True):
        of_rows = sum(held.values()) + max(passing.values())
        needed = 4 * case.n * (SHARED + 2 + turns(case.n) + of_rows)  # 2: residual and acc
        if not (why := lacking(needed, device, flush)):
            break
        lines[name].why = why
        del held[name], passing[name]
    return bool(held)


def turns(n: int) -> int:
    return TURNS if n <= LARGE else FEW_TURNS


def flush_bytes(device: torch.device) -> int:
    """More than the last cache holds."""
    if device.type == "cuda":
        return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [2**26]  # where the system does not say
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) * 9 // 8


def follow(n: int, density: float, distribution: str, threads: int, flush: int, kept: str) -> None:
    """Take a step of torch.topk for every turn that is read, until the input ends."""
    torch.set_num_threads(threads)
    case = SelectCase(n, density, distribution)
    bench = SideBySide(case, {"eager": StepTimes()}, set(), flush, Path(kept), torch.device("cpu"))
    done = -SETTLING - 1
    for line in sys.stdin:
        for turn in range(done + 1, int(line) + 1):
            if turn > -SETTLING:
                bench.go_on()
            bench.begin(turn)
        done = int(line)
        chosen = bench.step("eager")
        ((_, wall_ms, cpu_ms),) = bench.clock.read()
        assert chosen is not None
        answer = {"selected": chosen.indices.numel(), "differs": not same_magnitudes(chosen, bench.best)}
        print(json.dumps({"wall_ms": wall_ms, "cpu_ms": cpu_ms} | answer), flush=True)


if __name__ == "__main__":
    follow(*json.loads(sys.argv[1]))
