"""Steps timed side by side: on the same inputs, in turn, with cold caches, within the memory that is free."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.bench import gradients
from experiments.bench.steps import Made, NotRun, Row, Setup
from sparsify import host, kernels
from sparsify.aggregate import num_selected
from sparsify.parts import Sparse

LEAST = 3  # repetitions of every row, however long they take
IDLE_S = 0.01  # OpenMP's threads spin for a while after a parallel operation; they may not meet the next row
SETTLING = 3  # untimed steps of the residual
TURNS, FEW_TURNS = 4, 2  # gradients that take turns; so few of them where they are large
LARGE = 30_000_000  # elements
SHARED = 2.5  # floats per element: magnitudes (twice) and mask of the plain operators, candidates
SHARE = 0.9  # of the free memory that may be used
PERCENTILES_FROM = 20  # repetitions; of fewer, the spread is from the smallest to the largest


class Case(NamedTuple):
    n: int
    density: float
    distribution: str

    def __str__(self) -> str:
        return f"n = {self.n:,}, density {self.density:g}, {self.distribution}"


@dataclass
class Timed:
    """What became of one row in one case."""

    row: Row
    samples: dict[int, float] = field(default_factory=dict)  # repetition -> ms
    selected: list[int] = field(default_factory=list)
    kernel: str | None = None
    waits: int = 0
    steps: int = 0  # calls that `fallbacks` and `candidates` are of
    fallbacks: int = 0
    candidates: int = 0
    why: str | None = None  # it was not run

    @property
    def spent_s(self) -> float:
        return sum(self.samples.values()) / 1000


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
    """Fill in the rows. What the numbers are, and pairs of a row and the kernel that it disagrees with."""
    n, density, distribution = case
    inputs = (
        gradients.real(distribution, kept, device)
        if distribution in gradients.NETWORKS
        else gradients.synthetic(distribution, n, turns(n), device)
    )
    residual, work = inputs.residual, torch.empty_like(inputs.residual)
    setup = Setup(work, num_selected(n, density), inputs.gradients)
    made = ready(lines, setup, named)
    guide = kernels.kernel(work)  # exact: it knows the threshold, and how the residual goes on
    cold = torch.full((flush // 4,), 1.0, device=device)
    clock, differ, settled = Clock(device), list[tuple[str, str]](), dict[str, Any]()
    with no_collection():
        for turn in range(-SETTLING, repeats + 1):  # in turn 0 the rows run, and are not counted
            grad = inputs.gradients[turn % len(inputs.gradients)]
            best = guide.top(work.copy_(residual), grad, setup.k)
            setup.threshold.copy_(best.values.abs().min())
            for name in started(list(made), turn) if turn >= 0 else ():
                one = lines[name]
                if one.spent_s > seconds and len(one.samples) >= LEAST:
                    continue
                work.copy_(residual)
                cold.sum()  # read, not written: what a step finds in the cache has no need to go to memory
                if device.type == "cpu":
                    time.sleep(IDLE_S)
                waits = host.waits()
                with clock.timing(name):
                    chosen = made[name].step(work, grad)
                if turn == 0:
                    settled[name] = tally(made[name])
                    if one.row.exact and not same_magnitudes(chosen, best):
                        differ.append((name, guide.name))
                    continue
                one.waits += host.waits() - waits
                if chosen is not None:
                    one.selected.append(chosen.indices.numel())
            for name, ms in clock.read():
                if turn > 0:
                    lines[name].samples[turn] = ms
            residual.add_(grad)
            best.add_to(residual, alpha=-1)
    for name, one in lines.items():
        if name in made and made[name].kernel is not None:
            one.kernel = made[name].kernel.name
            done, before = tally(made[name]), settled[name]
            one.steps = done.steps - before.steps
            one.fallbacks = done.fallbacks - before.fallbacks
            one.candidates = done.candidates - before.candidates
    return inputs.source, differ


def ready(lines: dict[str, Timed], setup: Setup, named: set[str]) -> dict[str, Made]:
    """The steps that can be had here; of the others, lines say why not."""
    made = {}
    for name, one in lines.items():
        if one.why is None:
            setup.named = name in named
            try:
                made[name] = one.row.make(setup)
            except NotRun as reason:
                one.why = str(reason)
    return made


def started(names: list[str], turn: int) -> list[str]:
    """Another row goes first each time."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]


def tally(made: Made) -> Any:
    return replace(made.kernel.tally()) if made.kernel is not None else None


def same_magnitudes(chosen: Sparse | None, best: Sparse) -> bool:
    assert chosen is not None
    ours, theirs = (one.values.abs().sort().values for one in (chosen, best))
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


def leave_out(case: Case, lines: dict[str, Timed], device: torch.device, flush: int) -> bool:
    """Mark the rows that do not fit into memory, the largest first. Does any fit?"""
    free = SHARE * free_bytes(device) - flush
    each = 4 * case.n
    kept = [one.row for one in lines.values()]
    for row in sorted(kept, key=lambda row: row.held + row.passing(device.type), reverse=True):
        of_rows = sum(one.held for one in kept) + max(one.passing(device.type) for one in kept)
        needed = each * (SHARED + 2 + turns(case.n) + of_rows)  # 2: residual and acc
        if needed <= free:
            break
        lines[row.name].why = f"needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        kept.remove(row)
    return bool(kept)


def turns(n: int) -> int:
    return TURNS if n <= LARGE else FEW_TURNS


def free_bytes(device: torch.device) -> float:
    """Of memory; where a container has a limit, of that."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import psutil

    free = float(psutil.virtual_memory().available)
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, float(text) - float(used.read_text()))
    return free


def flush_bytes(device: torch.device) -> int:
    """More than the last cache holds."""
    if device.type == "cuda":
        return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [2**26]  # where the system does not say
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) * 9 // 8


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


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, and where the values lie."""
    low, high, words = min(values), max(values), "min to max"
    if len(values) >= PERCENTILES_FROM:
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        low, high, words = cuts[0], cuts[-1], "5 to 95 %"
    digits = (rounded(one) for one in (statistics.median(values), low, high))
    return dict(zip(("median", "low", "high"), digits, strict=True)) | {"n": len(values), "spread": words}


def rounded(value: float) -> float:
    """Five digits."""
    return round(value, 4 - math.floor(math.log10(value))) if value > 0 else value


def ratio(above: Timed | None, below: Timed | None) -> dict[str, Any] | None:
    """Of two rows, taken within each repetition in which both ran."""
    if above is None or below is None:
        return None
    both = [above.samples[turn] / below.samples[turn] for turn in above.samples if turn in below.samples]
    return spread(both) if both else None
