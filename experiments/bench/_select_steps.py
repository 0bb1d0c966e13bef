"""The selection steps that are timed: add a gradient to the residual, select, and take out what was selected.

A step is a function of acc (n,) and grad (n,), both float32, that returns its selection. All of them empty
acc as `sparsify.feedback.ErrorFeedback` does: acc -= value, where selected.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.config.folders import ROOT
from sparsify.core import huge_pages
from sparsify.kernels import SelectionKernel, TorchKernel, Workspace
from sparsify.kernels.native import KernelUnavailableError, NativeKernel
from sparsify.methods.dgc import SampledThreshold, SampledThresholdState
from sparsify.methods.gaussiank import GaussianThreshold
from sparsify.select import RandomKeyStream
from sparsify.types import BucketContext, SparseVector

MAX_NUMEL_OF_SLOW_STEPS = 30_000_000  # above, the slowest steps take a CPU seconds
COPIED_FLOATS = 1.5  # read, and as many written, per element: 12 bytes
FOLLOWER_FLOATS = 7.0  # per element: residual, acc, gradients and magnitudes
UNREACHABLE_BOUND = 0x7FFFFFFF  # only a NaN reaches it
MIN_GLIBC = (2, 35)  # from which on it can be tuned
TUNABLE_FOR_HUGE_PAGES = "glibc.malloc.hugetlb"
CONTEXT = BucketContext(0, 0, 0, select="torch")
NO_COMM: Any = None  # in place of a communicator, which these selectors do not use


class StepUnavailableError(Exception):
    """The machine cannot run a step; the message says why."""


class FollowerStepResult(NamedTuple):
    """The result of one step of a `FollowerProcess`."""

    wall_ms: float
    cpu_ms: float
    num_selected: int
    has_wrong_magnitudes: bool  # has it selected other magnitudes than the guide?


class FollowerProcess:
    """A process that takes each step of torch.topk on the same inputs, with other settings of glibc.

    It runs `_select_comparison` as a program.

    Args:
        arguments: of the program.
        tunables: of glibc.
    """

    def __init__(self, arguments: Sequence[str], tunables: str) -> None:
        command = [sys.executable, "-m", "experiments.bench._select_comparison", *arguments]
        self.process = subprocess.Popen(
            ["env", f"GLIBC_TUNABLES={tunables}", *command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.finalizer = weakref.finalize(self, _kill, self.process)

    def take_step(self, turn: int) -> FollowerStepResult:
        """Let the process take its step of this turn.

        Raises:
            StepUnavailableError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{turn}\n")
            self.process.stdin.flush()
            return FollowerStepResult(*json.loads(self.process.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError):
            _, errors = self.process.communicate()
            last_line = (errors.strip().splitlines() or ["without a word"])[-1]
            code = self.process.returncode
            raise StepUnavailableError(f"its process ended with code {code}: {last_line}") from None


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@dataclass
class SelectionStepSetup:
    """The ingredients of steps, for one n and k."""

    like: Tensor  # (n,)
    k: int
    gradients: Tensor  # (turns, n), which the copy reads
    follower_arguments: tuple[str, ...]
    is_asked_by_name: bool = False
    threshold: Tensor = field(init=False)  # 0-d: the k-th magnitude of the step to come

    def __post_init__(self) -> None:
        self.threshold = torch.zeros((), device=self.like.device)

    @cached_property
    def workspace(self) -> Workspace:
        """The workspace of plain operators. Their steps can share it, as it holds nothing between steps."""
        return Workspace.with_kernel(self.like, CONTEXT)

    def make_fused_kernel(self, **options: int) -> SelectionKernel:
        """Return the fused kernel of this device.

        Raises:
            StepUnavailableError: it can't be made here.
        """
        try:
            if self.like.is_cuda:
                from sparsify.kernels import triton_search

                return triton_search.TritonKernel(self.like, **options)
            return NativeKernel(self.like, None, **options)
        except ImportError as error:
            raise StepUnavailableError(f"no Triton: {error}") from error
        except KernelUnavailableError as error:
            raise StepUnavailableError(f"no compiler, or what it made does not run: {error}") from error
        except ValueError as error:
            raise StepUnavailableError(str(error)) from error


class SelectionStep(NamedTuple):
    """A step of add, select and subtract; or what a process of its own takes instead."""

    take: Callable[[Tensor, Tensor], SparseVector | None]
    kernel: SelectionKernel | None = None  # that it uses
    follower: FollowerProcess | None = None  # the process that takes the step instead


@dataclass(frozen=True)
class SelectionStepKind:
    """A kind of steps; select_rows.yaml describes each."""

    make: Callable[[SelectionStepSetup], SelectionStep]
    is_exact: bool = False  # selects exactly the k largest
    held_floats_per_element: float = 0.0  # per element, that stay allocated from step to step
    temporary_floats_per_element: Callable[[str], float] = lambda device: (
        0.0
    )  # per element, that a step allocates


def subtract_selection(acc: Tensor, selection: SparseVector) -> SparseVector:
    """Subtract the selection from acc in place, and return the selection."""
    selection.add_to(acc, alpha=-1)
    return selection


def extract_elements_at(acc: Tensor, indices: Tensor) -> SparseVector:
    return subtract_selection(acc, SparseVector(indices, acc[indices]))


def make_kernel_step(kernel: SelectionKernel, k: int) -> SelectionStep:
    return SelectionStep(lambda acc, grad: subtract_selection(acc, kernel.topk(acc, grad, k)), kernel)


def make_eager_step(setup: SelectionStepSetup) -> SelectionStep:
    ready = make_kernel_step(setup.workspace.kernel, setup.k)
    return ready._replace(kernel=None)  # it guesses nothing


def make_eager_step_in_huge_pages(setup: SelectionStepSetup) -> SelectionStep:
    if setup.like.is_cuda:
        raise StepUnavailableError("is for CPUs")
    check_malloc_can_give_huge_pages()
    follower = FollowerProcess(setup.follower_arguments, f"{TUNABLE_FOR_HUGE_PAGES}=1")
    return SelectionStep(lambda acc, grad: None, follower=follower)


def check_malloc_can_give_huge_pages() -> None:
    """Refuse a machine where glibc's malloc cannot be tuned to give huge pages.

    Raises:
        StepUnavailableError: the message says what is needed.
    """
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split("."))) < MIN_GLIBC:
        raise StepUnavailableError(f"needs glibc 2.35, this is {library or platform.system()} {version}")
    if huge_pages.system_setting() not in ("always", "madvise"):
        raise StepUnavailableError(f"needs huge pages; the system's setting is {huge_pages.system_setting()}")


def make_add_step(setup: SelectionStepSetup) -> SelectionStep:
    def add(acc: Tensor, grad: Tensor) -> None:
        acc.add_(grad)

    return SelectionStep(add)


def make_copy_step(setup: SelectionStepSetup) -> SelectionStep:
    length = int(COPIED_FLOATS * setup.like.numel())
    source = setup.gradients.view(-1).view(torch.float32)[:length]
    target = huge_pages.request(torch.empty(length, device=setup.like.device)).zero_()

    def copy(acc: Tensor, grad: Tensor) -> None:
        target.copy_(source)

    return SelectionStep(copy)


def make_given_threshold_step(setup: SelectionStepSetup) -> SelectionStep:
    try:
        kernel = setup.make_fused_kernel()
    except StepUnavailableError:
        kernel = TorchKernel(setup.like)
    return SelectionStep(
        lambda acc, grad: subtract_selection(acc, kernel.above_threshold(acc, grad, setup.threshold)), kernel
    )


def make_selector_step(selector: Any, state: Any, k: int) -> SelectionStep:
    """Return the step of a selector of `sparsify`, which finds about k."""
    return SelectionStep(
        lambda acc, grad: extract_elements_at(acc.add_(grad), selector.select(acc, k, NO_COMM, state).indices)
    )


def make_dgc_step(setup: SelectionStepSetup) -> SelectionStep:
    state = SampledThresholdState(RandomKeyStream(CONTEXT), setup.workspace)
    return make_selector_step(SampledThreshold(), state, setup.k)


def make_step_over_magnitudes(
    setup: SelectionStepSetup, find_indices: Callable[[Tensor], Tensor]
) -> SelectionStep:
    """Return a step that writes all magnitudes down, and finds the indices there."""
    magnitudes = setup.workspace.buffer("magnitudes")
    return SelectionStep(
        lambda acc, grad: extract_elements_at(acc, find_indices(torch.abs(acc.add_(grad), out=magnitudes)))
    )


def make_sort_step(setup: SelectionStepSetup) -> SelectionStep:
    check_size_for_cpu(setup)
    return make_step_over_magnitudes(
        setup, lambda magnitudes: torch.sort(magnitudes, descending=True).indices[: setup.k]
    )


def make_single_block_step(setup: SelectionStepSetup) -> SelectionStep:
    if not setup.like.is_cuda:
        raise StepUnavailableError("needs a GPU")
    try:
        from experiments.bench._single_block_topk import find_largest_indices
    except ImportError as error:
        raise StepUnavailableError(f"needs Triton: {error}") from error
    return make_step_over_magnitudes(setup, lambda magnitudes: find_largest_indices(magnitudes, setup.k))


def extract_by_mask(acc: Tensor, grad: Tensor, threshold: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Take out the first k elements that reach the threshold, in constant shapes for a compiler to fuse."""
    total = acc + grad
    mask = total.abs() >= threshold
    indices = torch.nonzero_static(mask, size=k).squeeze(1)
    values = total[indices]
    acc.copy_(torch.where(mask, 0, total))
    return indices, values


@cache
def compile_extract_by_mask() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return one compiled function for all n: compiling takes a CPU half a minute."""
    return torch.compile(extract_by_mask, dynamic=True)


def make_compiled_step(setup: SelectionStepSetup) -> SelectionStep:
    check_size_for_cpu(setup)
    function = compile_extract_by_mask()
    small = torch.ones(4096, device=setup.like.device)
    try:
        function(small, small.clone(), setup.threshold, 8)
    except (RuntimeError, OSError, ImportError) as error:  # what is missing shows at the first call
        raise StepUnavailableError(f"torch.compile failed: {str(error).splitlines()[0]}") from error
    return SelectionStep(lambda acc, grad: SparseVector(*function(acc, grad, setup.threshold, setup.k)))


def check_size_for_cpu(setup: SelectionStepSetup) -> None:
    """Refuse large sizes on a CPU unless the row was asked for by its name."""
    is_large = not setup.like.is_cuda and setup.like.numel() > MAX_NUMEL_OF_SLOW_STEPS
    if is_large and not setup.is_asked_by_name:
        raise StepUnavailableError(
            f"takes a CPU long beyond {MAX_NUMEL_OF_SLOW_STEPS:,} elements; --rows with its name runs it"
        )


def topk_temporary_floats_per_element(device: str) -> float:
    return 0.1 if device == "cuda" else 4.0  # on a CPU, 16 bytes of value and index for every element


STEP_KINDS = {
    "add": SelectionStepKind(make_add_step),
    "copy": SelectionStepKind(make_copy_step, held_floats_per_element=COPIED_FLOATS),
    "fused": SelectionStepKind(
        lambda setup: make_kernel_step(setup.make_fused_kernel(), setup.k), is_exact=True
    ),
    "eager": SelectionStepKind(
        make_eager_step, is_exact=True, temporary_floats_per_element=topk_temporary_floats_per_element
    ),
    "eager_hugepages": SelectionStepKind(
        make_eager_step_in_huge_pages,
        is_exact=True,
        held_floats_per_element=FOLLOWER_FLOATS,
        temporary_floats_per_element=topk_temporary_floats_per_element,
    ),
    "fallback": SelectionStepKind(
        lambda setup: make_kernel_step(setup.make_fused_kernel(forced_bound=UNREACHABLE_BOUND), setup.k),
        is_exact=True,
    ),
    "threshold": SelectionStepKind(make_given_threshold_step, held_floats_per_element=0.25),
    "dgc": SelectionStepKind(make_dgc_step),
    "gaussiank": SelectionStepKind(
        lambda setup: make_selector_step(GaussianThreshold(), setup.workspace, setup.k)
    ),
    "compile": SelectionStepKind(make_compiled_step, temporary_floats_per_element=lambda device: 1.25),
    "sort": SelectionStepKind(make_sort_step, is_exact=True, temporary_floats_per_element=lambda device: 5.0),
    "paper_kernel": SelectionStepKind(make_single_block_step, is_exact=True),
}
