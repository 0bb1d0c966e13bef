"""Selection steps timed side by side: on the same inputs, in turns, with cold caches, within the free memory.

As a program it is what a `FollowerProcess` runs: for every turn that it reads, it takes one step of
torch.topk and writes a line of JSON.
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
from experiments.bench._compared_rows import SelectionCase
from experiments.bench._select_steps import (
    STEP_KINDS,
    FollowerStepResult,
    SelectionStep,
    SelectionStepSetup,
    StepUnavailableError,
)
from experiments.bench._timing import CallTimer, TimedCall, explain_lack_of_memory, garbage_collection_paused
from sparsify import kernels
from sparsify.core import host_sync, huge_pages
from sparsify.types import SearchStats, SparseVector, num_selected

MIN_REPEATS = 3  # of every row, however long they take
IDLE_S = 0.01  # OpenMP's threads spin for a while after a parallel operation; they may not meet the next row
SETTLING_TURNS = 3  # untimed, of the residual
MAX_NUMEL_OF_MANY_GRADIENTS = 30_000_000
SHARED_FLOATS = 2.5  # per element: magnitudes (twice) and mask of the plain operators, candidates


@dataclass
class RowSamples:
    """The samples of one row in one case."""

    wall_ms_by_turn: dict[int, float] = field(default_factory=dict)  # by repetition
    cpu_ms_by_turn: dict[int, float] = field(default_factory=dict)  # by repetition, of all threads together
    selected_counts: list[int] = field(default_factory=list)
    kernel_name: str | None = None
    num_host_syncs: int = 0
    stats: SearchStats = field(default_factory=SearchStats)  # the kernel's, of these steps
    why_not_run: str | None = None


class SelectionStepOutcome(NamedTuple):
    """The outcome of a step: how many elements it selected, and whether their magnitudes are wrong."""

    has_wrong_magnitudes: bool  # other magnitudes than it should
    num_selected: int | None  # None of a row that selects nothing


@dataclass
class SelectionComparison:
    """The steps of one case, on the same residual and gradient, turn after turn."""

    case: SelectionCase
    samples_by_row: dict[str, RowSamples]  # filled in; rows that can't run here get a reason
    asked_rows: set[str]  # by name
    flush_bytes: int  # that are read before each step
    gradients_folder: Path  # of real gradients
    device: torch.device

    def __post_init__(self) -> None:
        n, density, distribution = self.case
        self.inputs = gradients.make_or_load_inputs(
            distribution, n, num_alternating_gradients(n), self.gradients_folder, self.device
        )
        self.residual = self.inputs.initial_residual
        self.acc = huge_pages.request(torch.empty_like(self.residual))
        folder = str(self.gradients_folder.resolve())
        arguments = json.dumps([*self.case, torch.get_num_threads(), self.flush_bytes, folder])
        self.setup = SelectionStepSetup(
            self.acc, num_selected(n, density), self.inputs.gradients_by_turn, (arguments,)
        )
        self.steps = dict[str, SelectionStep]()
        for name, samples in self.samples_by_row.items():
            if samples.why_not_run is None:
                self.setup.is_asked_by_name = name in self.asked_rows
                try:
                    self.steps[name] = STEP_KINDS[name].make(self.setup)
                except StepUnavailableError as error:
                    samples.why_not_run = str(error)
        # The exact kernel that finds the threshold and moves the residual on.
        self.guide = kernels.make_kernel(self.acc)
        self.best = SparseVector(torch.empty(0), torch.empty(0))  # the guide's selection of this turn
        self.cold_memory = torch.full((self.flush_bytes // 4,), 1.0, device=self.device)
        self.clock = CallTimer(self.device)

    def begin_turn(self, turn: int) -> None:
        """Take the gradient of a turn, and find the best selection."""
        self.grad = self.inputs.gradients_by_turn[turn % len(self.inputs.gradients_by_turn)]
        self.best = self.guide.topk(self.acc.copy_(self.residual), self.grad, self.setup.k)
        self.setup.threshold.copy_(self.best.values.abs().min())

    def update_residual(self) -> None:
        """Move the residual on."""
        if not self.inputs.is_always_first_step:
            self.best.add_to(self.residual.add_(self.grad), alpha=-1)

    def restore_acc_and_flush_caches(self) -> None:
        """Copy the residual into acc, and read cold memory to empty the caches.

        It is not written: a step need not write back what it finds in the cache.
        """
        self.acc.copy_(self.residual)
        self.cold_memory.sum()

    def take_step(self, name: str, turn: int) -> SelectionStepOutcome:
        """Let a row take its step; the clock has its time. Exact rows are checked in turn 0.

        Raises:
            StepUnavailableError: the process that takes it has ended.
        """
        ready = self.steps[name]
        if ready.follower is not None:
            step = ready.follower.take_step(turn)
            self.clock.timed_calls.append(TimedCall(name, step.wall_ms, step.cpu_ms))
            return SelectionStepOutcome(step.has_wrong_magnitudes, step.num_selected)
        self.restore_acc_and_flush_caches()
        if self.device.type == "cpu":
            time.sleep(IDLE_S)
        with self.clock.time_block(name):
            selection = ready.take(self.acc, self.grad)
        if selection is None:
            return SelectionStepOutcome(False, None)
        is_checked = turn == 0 and STEP_KINDS[name].is_exact
        has_wrong_magnitudes = is_checked and not has_same_magnitudes(selection, self.best)
        return SelectionStepOutcome(has_wrong_magnitudes, selection.indices.numel())

    def time_rows_and_find_faults(self, repeats: int, seconds: float) -> dict[str, str]:
        """Fill in the samples, and return a sentence for each row that selects wrong magnitudes.

        Args:
            seconds: after which a row stops repeating.
        """
        faults = dict[str, str]()
        order = random.Random(0)
        with garbage_collection_paused():
            for turn in range(-SETTLING_TURNS, repeats + 1):  # in turn 0 the rows run, and are not counted
                self.begin_turn(turn)
                for name in order.sample([*self.steps], len(self.steps)) if turn >= 0 else ():
                    samples = self.samples_by_row[name]
                    if (
                        sum(samples.wall_ms_by_turn.values()) > 1e3 * seconds
                        and len(samples.wall_ms_by_turn) >= MIN_REPEATS
                    ):
                        continue
                    syncs_before = host_sync.num_syncs()
                    try:
                        outcome = self.take_step(name, turn)
                    except StepUnavailableError as error:
                        samples.why_not_run = str(error)
                        samples.wall_ms_by_turn.clear()
                        del self.steps[name]
                        continue
                    if turn > 0:
                        samples.num_host_syncs += host_sync.num_syncs() - syncs_before
                        if outcome.num_selected is not None:
                            samples.selected_counts.append(outcome.num_selected)
                    elif outcome.has_wrong_magnitudes:
                        faults[name] = f"{self.case}: {name} selects other magnitudes than {self.guide.name}"
                for name, wall_ms, cpu_ms in self.clock.read_and_clear():
                    if turn > 0:
                        self.samples_by_row[name].wall_ms_by_turn[turn] = wall_ms
                        if cpu_ms is not None:
                            self.samples_by_row[name].cpu_ms_by_turn[turn] = cpu_ms
                if turn == 0:
                    stats_before = {
                        name: astuple(kernel.stats()) for name, kernel in self.kernel_by_row().items()
                    }
                self.update_residual()
        for name, kernel in self.kernel_by_row().items():
            counts = zip(astuple(kernel.stats()), stats_before[name], strict=True)
            self.samples_by_row[name].kernel_name = kernel.name
            self.samples_by_row[name].stats = SearchStats(*(after - before for after, before in counts))
        return faults

    def kernel_by_row(self) -> dict[str, kernels.SelectionKernel]:
        """Return the kernels of the rows that have one, by row."""
        return {name: ready.kernel for name, ready in self.steps.items() if ready.kernel is not None}


def has_same_magnitudes(selection: SparseVector | None, best: SparseVector) -> bool:
    assert selection is not None
    return torch.equal(selection.values.abs().sort().values, best.values.abs().sort().values)


def mark_rows_beyond_memory(
    case: SelectionCase, samples_by_row: dict[str, RowSamples], device: torch.device, flush_bytes: int
) -> None:
    """Set `why_not_run` of rows, the largest first, until the others fit into memory."""
    held = {name: STEP_KINDS[name].held_floats_per_element for name in samples_by_row}
    temporary = {name: STEP_KINDS[name].temporary_floats_per_element(device.type) for name in samples_by_row}
    for name in sorted(samples_by_row, key=lambda name: held[name] + temporary[name], reverse=True):
        # Residual and acc, and the gradients.
        floats = (
            SHARED_FLOATS
            + 2
            + num_alternating_gradients(case.n)
            + sum(held.values())
            + max(temporary.values())
        )
        reason = explain_lack_of_memory(4 * case.n * floats, device, flush_bytes)
        if not reason:
            return
        samples_by_row[name].why_not_run = reason
        del held[name], temporary[name]


def num_alternating_gradients(n: int) -> int:
    """Return the number of gradients that take turns: fewer where they are large."""
    return 4 if n <= MAX_NUMEL_OF_MANY_GRADIENTS else 2


def cache_flush_bytes(device: torch.device) -> int:
    """Return a number of bytes that is more than the last cache holds."""
    if device.type == "cuda":
        return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [2**26]  # where the system does not say
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) * 9 // 8


def serve_topk_steps_on_stdin(
    num_elements: int,
    density: float,
    distribution: str,
    threads: int,
    flush_bytes: int,
    gradients_folder: str,
) -> None:
    """Take steps of torch.topk up to each turn that stdin names, and print each result as JSON."""
    torch.set_num_threads(threads)
    case = SelectionCase(num_elements, density, distribution)
    samples = {"eager": RowSamples()}
    comparison = SelectionComparison(
        case, samples, set(), flush_bytes, Path(gradients_folder), torch.device("cpu")
    )
    last_turn = -SETTLING_TURNS - 1
    for line in sys.stdin:
        for turn in range(last_turn + 1, int(line) + 1):
            if turn > -SETTLING_TURNS:
                comparison.update_residual()
            comparison.begin_turn(turn)
        last_turn = int(line)
        has_wrong_magnitudes, selected = comparison.take_step("eager", 0)
        ((_, wall_ms, cpu_ms),) = comparison.clock.read_and_clear()
        assert cpu_ms is not None
        assert selected is not None
        print(json.dumps(FollowerStepResult(wall_ms, cpu_ms, selected, has_wrong_magnitudes)), flush=True)


if __name__ == "__main__":
    serve_topk_steps_on_stdin(*json.loads(sys.argv[1]))
