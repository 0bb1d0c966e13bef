"""Steps timed side by side: on the same inputs, in turn, with cold caches, within the memory that is free.

As a program it is the process of a `Follower`: for every turn that it reads, one step of torch.topk, and a
line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.bench import _gradients as gradients
from experiments.bench._steps import ROWS, Made, NotRun, Setup
from experiments.bench._timing import Clock, lacking, no_collection
from sparsify import kernels
from sparsify.core import host_sync, huge_pages
from sparsify.types import SearchStats, SparseVector, num_selected

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


@dataclass
class SideBySide:
    """The steps of one case, on the same residual and gradient, turn after turn."""

    case: SelectCase
    lines: dict[str, StepTimes]  # the rows; what can't run here is told in them
    named: set[str]  # rows that were asked for by name
    flush: int  # bytes that are read before each step
    kept: Path  # the folder of real gradients
    device: torch.device

    def __post_init__(self) -> None:
        n, density, distribution = self.case
        self.inputs = gradients.inputs(distribution, n, turns(n), self.kept, self.device)
        self.residual = self.inputs.residual
        self.work = huge_pages.request(torch.empty_like(self.residual))
        words = json.dumps([*self.case, torch.get_num_threads(), self.flush, str(self.kept.resolve())])
        self.setup = Setup(self.work, num_selected(n, density), self.inputs.gradients, (words,))
        self.made = dict[str, Made]()
        for name, timed in self.lines.items():
            if timed.why is None:
                self.setup.named = name in self.named
                try:
                    self.made[name] = ROWS[name].make(self.setup)
                except NotRun as reason:
                    timed.why = str(reason)
        # Exact: it knows the threshold, and how the residual goes on.
        self.guide = kernels.make_kernel(self.work)
        self.best = SparseVector(torch.empty(0), torch.empty(0))  # what it chose in this turn
        self.cold = torch.full((self.flush // 4,), 1.0, device=self.device)
        self.clock = Clock(self.device)

    def begin(self, turn: int) -> None:
        """The gradient of a turn, and what is to be selected."""
        self.grad = self.inputs.gradients[turn % len(self.inputs.gradients)]
        self.best = self.guide.topk(self.work.copy_(self.residual), self.grad, self.setup.k)
        self.setup.threshold.copy_(self.best.values.abs().min())

    def restore(self) -> None:
        self.work.copy_(self.residual)
        self.cold.sum()  # read, not written: what a step finds in the cache has no need to go to memory

    def step(self, name: str, turn: int) -> tuple[bool, int | None]:
        """Let a row take its step, whose time `clock` knows: did it choose others than it should, and how
        many? Raises NotRun where the process that takes it has ended.
        """
        made = self.made[name]
        if made.follower is not None:
            told = made.follower.step(turn)
            self.clock.taken.append((name, told["wall_ms"], told["cpu_ms"]))
            return bool(told["differs"]), int(told["selected"])
        self.restore()
        if not self.clock.cuda:
            time.sleep(IDLE_S)
        with self.clock.timing(name):
            chosen = made.step(self.work, self.grad)
        if chosen is None:
            return False, None
        is_looked_at = turn == 0 and ROWS[name].exact
        return is_looked_at and not same_magnitudes(chosen, self.best), chosen.indices.numel()

    def go_on(self) -> None:
        """The residual after this turn."""
        if not self.inputs.is_first_step:
            self.best.add_to(self.residual.add_(self.grad), alpha=-1)

    def measured(self, repeats: int, seconds: float) -> tuple[str, dict[str, str]]:
        """Fill in the rows. Returns what the gradients are, and a sentence for each row that chose others
        than it should.
        """
        differ, settled, order = dict[str, str](), dict[str, tuple[int, ...]](), random.Random(0)
        with no_collection():
            for turn in range(-SETTLING, repeats + 1):  # in turn 0 the rows run, and are not counted
                self.begin(turn)
                for name in order.sample(list(self.made), len(self.made)) if turn >= 0 else ():
                    timed, waits = self.lines[name], host_sync.num_syncs()
                    if sum(timed.samples.values()) > 1e3 * seconds and len(timed.samples) >= LEAST:
                        continue
                    try:
                        differs, selected = self.step(name, turn)
                    except NotRun as why:
                        timed.why = str(why)
                        timed.samples.clear()
                        del self.made[name]
                        continue
                    if turn > 0:
                        timed.waits += host_sync.num_syncs() - waits
                        timed.selected += [] if selected is None else [selected]
                    elif differs:
                        differ[name] = f"{self.case}: {name} selects other magnitudes than {self.guide.name}"
                for name, wall_ms, cpu_ms in self.clock.read():
                    if turn > 0:
                        self.lines[name].samples[turn] = wall_ms
                        if cpu_ms is not None:
                            self.lines[name].cpu[turn] = cpu_ms
                if turn == 0:
                    settled = {name: astuple(kernel.stats()) for name, kernel in self.kernels()}
                self.go_on()
        for name, kernel in self.kernels():
            counted = zip(astuple(kernel.stats()), settled[name], strict=True)
            self.lines[name].kernel = kernel.name
            self.lines[name].stats = SearchStats(*(after - before for after, before in counted))
        return self.inputs.source, differ

    def kernels(self) -> list[tuple[str, kernels.SelectionKernel]]:
        return [(name, made.kernel) for name, made in self.made.items() if made.kernel is not None]


def same_magnitudes(chosen: SparseVector | None, best: SparseVector) -> bool:
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
        differs, selected = bench.step("eager", 0)
        ((_, wall_ms, cpu_ms),) = bench.clock.read()
        answer = {"wall_ms": wall_ms, "cpu_ms": cpu_ms, "selected": selected, "differs": differs}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    follow(*json.loads(sys.argv[1]))
