"""The steps that are timed: each adds a gradient to the residual, selects, and takes out what it selected.

A step is a function of acc (n,) and grad (n,), both float32, that returns what it selected. All of them empty
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

StepCall = Callable[[Tensor, Tensor], SparseVector | None]

MANY = 30_000_000  # elements, above which a CPU takes seconds for the slowest steps
COPIED = 1.5  # floats read, and as many written, per element: 12 bytes
FOLLOWED = 7.0  # floats per element of a follower: residual, acc, gradients and magnitudes
UNREACHED = 0x7FFFFFFF  # a bound that nothing reaches but a NaN
TUNABLE_FROM = (2, 35)  # glibc
CONTEXT = BucketContext(0, 0, 0, select="torch")
ALONE: Any = None  # in place of a communicator, which these selectors do not use


class NotRun(Exception):
    """This machine cannot run a step; the message says why."""


class Follower:
    """`_side_by_side` as a program, with these words and glibc's tunables: it makes the same inputs, and
    takes a step whenever it is told to.
    """

    def __init__(self, words: Sequence[str], tunables: str) -> None:
        command = [sys.executable, "-m", "experiments.bench._side_by_side", *words]
        self.process = subprocess.Popen(
            ["env", f"GLIBC_TUNABLES={tunables}", *command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.end = weakref.finalize(self, stop, self.process)

    def step(self, turn: int) -> dict[str, float]:
        """Wall and CPU time of its step in this turn, in ms; how many it selected, and do these differ from
        its guide's? Raises NotRun where it did not take it.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{turn}\n")
            self.process.stdin.flush()
            answer: dict[str, float] = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            _, said = self.process.communicate()
            last = said.strip().splitlines()[-1:] or ["without a word"]
            code = self.process.returncode
            raise NotRun(f"its process ended with code {code}: {last[0]}") from None
        return answer


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@dataclass
class Setup:
    """Ingredients of steps, for one n and k."""

    like: Tensor  # (n,)
    k: int
    inputs: Tensor  # (turns, n) gradients, which the copy reads
    words: tuple[str, ...]  # of the command line of a process that follows
    named: bool = False  # was the row asked for by name?
    threshold: Tensor = field(init=False)  # 0-d: the k-th magnitude of the step to come

    def __post_init__(self) -> None:
        self.threshold = torch.zeros((), device=self.like.device)

    @property
    def cuda(self) -> bool:
        return self.like.is_cuda

    @cached_property
    def workspace(self) -> Workspace:
        """The plain operators' workspace; all their steps share it, for it holds nothing between steps."""
        return Workspace.with_kernel(self.like, CONTEXT)

    def fused(self, **options: int) -> SelectionKernel:
        """The fused kernel of this device. Raises NotRun."""
        try:
            if self.cuda:
                from sparsify.kernels import triton_search

                return triton_search.TritonKernel(self.like, **options)
            return NativeKernel(self.like, None, **options)
        except ImportError as error:
            raise NotRun(f"no Triton: {error}") from error
        except (KernelUnavailableError, ValueError) as error:
            why = (
                "no compiler, or what it made does not run: "
                if isinstance(error, KernelUnavailableError)
                else ""
            )
            raise NotRun(f"{why}{error}") from error


class Made(NamedTuple):
    """A step that is ready, and the kernel within it, if any."""

    step: StepCall
    kernel: SelectionKernel | None = None
    follower: Follower | None = None  # the process that takes the step instead


@dataclass(frozen=True)
class StepKind:
    """One of the steps that are compared; select_rows.yaml says what each does."""

    make: Callable[[Setup], Made]
    exact: bool = False  # it selects exactly the k largest
    held: float = 0.0  # floats per element that stay allocated from step to step
    passing: Callable[[str], float] = lambda device: 0.0  # floats per element that a step allocates and frees


def emptied(acc: Tensor, found: SparseVector) -> SparseVector:
    found.add_to(acc, alpha=-1)
    return found


def at(acc: Tensor, indices: Tensor) -> SparseVector:
    return emptied(acc, SparseVector(indices, acc[indices]))


def by_kernel(kernel: SelectionKernel, k: int) -> Made:
    return Made(lambda acc, grad: emptied(acc, kernel.topk(acc, grad, k)), kernel)


def eager_in_huge_pages(setup: Setup) -> Made:
    if setup.cuda:
        raise NotRun("is for CPUs")
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split("."))) < TUNABLE_FROM:
        raise NotRun(f"needs glibc 2.35, this is {library or platform.system()} {version}")
    if huge_pages.system_setting() not in ("always", "madvise"):
        raise NotRun(f"needs huge pages; the system's setting is {huge_pages.system_setting()}")
    return Made(lambda acc, grad: None, follower=Follower(setup.words, "glibc.malloc.hugetlb=1"))


def eager(setup: Setup) -> Made:
    return Made(by_kernel(setup.workspace.kernel, setup.k).step)  # without its kernel, which guesses nothing


def dgc(setup: Setup) -> Made:
    state = SampledThresholdState(RandomKeyStream(CONTEXT), setup.workspace)
    return by_rule(SampledThreshold(), state, setup.k)


def add(setup: Setup) -> Made:
    def step(acc: Tensor, grad: Tensor) -> None:
        acc.add_(grad)

    return Made(step)


def threshold(setup: Setup) -> Made:
    try:
        kernel = setup.fused()
    except NotRun:
        kernel = TorchKernel(setup.like)
    return Made(lambda acc, grad: emptied(acc, kernel.above_threshold(acc, grad, setup.threshold)), kernel)


def among_magnitudes(setup: Setup, choose: Callable[[Tensor], Tensor]) -> Made:
    """A step that writes all magnitudes down, and looks there for the indices of those that it chooses."""
    magnitudes = setup.workspace.buffer("magnitudes")
    return Made(lambda acc, grad: at(acc, choose(torch.abs(acc.add_(grad), out=magnitudes))))


def sort(setup: Setup) -> Made:
    too_slow(setup)
    return among_magnitudes(setup, lambda found: torch.sort(found, descending=True).indices[: setup.k])


def masked(acc: Tensor, grad: Tensor, threshold: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k that reach the threshold, by a mask, which a compiler can fuse: shapes are constant."""
    total = acc + grad
    mask = total.abs() >= threshold
    indices = torch.nonzero_static(mask, size=k).squeeze(1)
    values = total[indices]
    acc.copy_(torch.where(mask, 0, total))
    return indices, values


def compiled(setup: Setup) -> Made:
    too_slow(setup)
    function = compiler()
    small = torch.ones(4096, device=setup.like.device)
    try:
        function(small, small.clone(), setup.threshold, 8)
    except (RuntimeError, OSError, ImportError) as error:  # what is missing shows at the first call
        raise NotRun(f"torch.compile failed: {str(error).splitlines()[0]}") from error
    return Made(lambda acc, grad: SparseVector(*function(acc, grad, setup.threshold, setup.k)))


@cache
def compiler() -> Callable[..., tuple[Tensor, Tensor]]:
    """One function for all n: compiling takes a CPU half a minute."""
    return torch.compile(masked, dynamic=True)


def by_rule(rule: Any, state: Any, k: int) -> Made:
    """A selector of `sparsify`, which finds about k."""
    return Made(lambda acc, grad: at(acc.add_(grad), rule.select(acc, k, ALONE, state).indices))


def copy(setup: Setup) -> Made:
    length = int(COPIED * setup.like.numel())
    source = setup.inputs.view(-1).view(torch.float32)[:length]
    target = huge_pages.request(torch.empty(length, device=setup.like.device)).zero_()

    def step(acc: Tensor, grad: Tensor) -> None:
        target.copy_(source)

    return Made(step)


def paper_kernel(setup: Setup) -> Made:
    if not setup.cuda:
        raise NotRun("needs a GPU")
    try:
        from experiments.bench._one_block import largest
    except ImportError as error:
        raise NotRun(f"needs Triton: {error}") from error
    return among_magnitudes(setup, lambda found: largest(found, setup.k))


def too_slow(setup: Setup) -> None:
    if not setup.cuda and not setup.named and setup.like.numel() > MANY:
        raise NotRun(f"takes a CPU long beyond {MANY:,} elements; --rows with its name runs it")


def topk_memory(device: str) -> float:
    return 0.1 if device == "cuda" else 4.0  # on a CPU, 16 bytes of value and index for every element


ROWS = {
    "add": StepKind(add),
    "copy": StepKind(copy, held=COPIED),
    "fused": StepKind(lambda setup: by_kernel(setup.fused(), setup.k), exact=True),
    "eager": StepKind(eager, exact=True, passing=topk_memory),
    "eager_hugepages": StepKind(eager_in_huge_pages, exact=True, held=FOLLOWED, passing=topk_memory),
    "fallback": StepKind(lambda setup: by_kernel(setup.fused(forced_bound=UNREACHED), setup.k), exact=True),
    "threshold": StepKind(threshold, held=0.25),
    "dgc": StepKind(dgc),
    "gaussiank": StepKind(lambda setup: by_rule(GaussianThreshold(), setup.workspace, setup.k)),
    "compile": StepKind(compiled, passing=lambda device: 1.25),
    "sort": StepKind(sort, exact=True, passing=lambda device: 5.0),
    "paper_kernel": StepKind(paper_kernel, exact=True),
}
