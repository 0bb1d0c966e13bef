"""The steps that are timed: each adds a gradient to the residual, selects, and takes out what it selected.

A step is a function of acc (n,) and grad (n,), both float32, that returns what it selected. All of them empty
acc as `sparsify.feedback.ErrorFeedback` does: acc -= value, where selected.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.bench import _traffic as traffic
from experiments.bench._follower import Follower
from sparsify import huge_pages
from sparsify.kernels import Kernel, native
from sparsify.kernels.eager import Eager
from sparsify.kernels.native import Native, Unavailable
from sparsify.kernels.vectorised import Vectorised
from sparsify.methods.dgc import DgcSample, Sampling
from sparsify.methods.gaussiank import GaussianThreshold
from sparsify.select import Draws
from sparsify.types import BucketContext, Sparse
from sparsify.workspace import Workspace

Step = Callable[[Tensor, Tensor], Sparse | None]

MANY = 30_000_000  # elements, above which a CPU takes seconds for the slowest steps
COPIED = 1.5  # floats read, and as many written, per element: 12 bytes
FOLLOWED = 7.0  # floats per element of a follower: residual, acc, gradients and magnitudes
UNREACHED = 0x7FFFFFFF  # a bound that nothing reaches but a NaN
TUNABLE_FROM = (2, 35)  # glibc
CONTEXT = BucketContext(0, 0, 0, select="torch")
ALONE: Any = None  # in place of a communicator, which these selectors do not use


class NotRun(Exception):
    """This machine cannot run a step; the message says why."""


@dataclass
class Setup:
    """What steps are made of, for one n and k."""

    like: Tensor  # (n,)
    k: int
    inputs: Tensor  # (turns, n) gradients, which the copy reads
    words: tuple[str, ...] = ()  # of the command line of a process that follows
    named: bool = False  # was the row asked for by name?
    threshold: Tensor = field(init=False)  # 0-d: the k-th magnitude of the step to come

    def __post_init__(self) -> None:
        self.threshold = torch.zeros((), device=self.like.device)

    @property
    def cuda(self) -> bool:
        return self.like.is_cuda

    @cached_property
    def workspace(self) -> Workspace:
        """Of the plain operators; shared by all steps of those, for it holds nothing from step to step."""
        return Workspace.searching(self.like, CONTEXT)

    def fused(self, **options: int) -> Kernel:
        """The fused kernel of this device. Raises NotRun."""
        try:
            return (gpu_class() if self.cuda else native_class())(self.like, **options)
        except ValueError as error:
            raise NotRun(str(error)) from error


class Made(NamedTuple):
    """A step that is ready, and the kernel within it, if any."""

    step: Step
    kernel: Kernel | None = None
    follower: Follower | None = None  # the process that takes the step instead


@dataclass(frozen=True)
class Row:
    """One of the steps that are compared."""

    name: str
    words: str
    make: Callable[[Setup], Made]
    traffic: Callable[[traffic.Seen], traffic.Traffic]
    exact: bool = False  # it selects exactly the k largest
    held: float = 0.0  # floats per element that stay allocated from step to step
    passing: Callable[[str], float] = lambda device: 0.0  # floats per element that a step allocates and frees


def gpu_class() -> Callable[..., Kernel]:
    try:
        from sparsify.kernels import gpu
    except ImportError as error:
        raise NotRun(f"no Triton: {error}") from error
    return gpu.Gpu


def native_class() -> Callable[..., Kernel]:
    try:
        native.library()
    except Unavailable as error:
        raise NotRun(f"no compiler, or what it made does not run: {error}") from error
    return Native


def emptied(acc: Tensor, found: Sparse) -> Sparse:
    """Take what was selected out of acc."""
    found.add_to(acc, alpha=-1)
    return found


def at(acc: Tensor, indices: Tensor) -> Sparse:
    return emptied(acc, Sparse(indices, acc[indices]))


def by_kernel(kernel: Kernel, k: int) -> Made:
    return Made(lambda acc, grad: emptied(acc, kernel.topk(acc, grad, k)), kernel)


def eager(setup: Setup) -> Made:
    return by_kernel(setup.workspace.kernel, setup.k)._replace(kernel=None)  # it guesses nothing


def numpy(setup: Setup) -> Made:
    if setup.cuda:
        raise NotRun("numpy is for CPUs")
    return by_kernel(Vectorised(setup.like), setup.k)


def fused(setup: Setup) -> Made:
    return by_kernel(setup.fused(), setup.k)


def fallback(setup: Setup) -> Made:
    return by_kernel(setup.fused(bound=UNREACHED), setup.k)


def eager_in_huge_pages(setup: Setup) -> Made:
    if setup.cuda:
        raise NotRun("is for CPUs")
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split("."))) < TUNABLE_FROM:
        raise NotRun(f"needs glibc 2.35, this is {library or platform.system()} {version}")
    if huge_pages.setting() not in ("always", "madvise"):
        raise NotRun(f"needs huge pages; the system's setting is {huge_pages.setting()}")
    return Made(nothing, follower=Follower(setup.words, "glibc.malloc.hugetlb=1"))


def nothing(acc: Tensor, grad: Tensor) -> None:
    return None


def add(setup: Setup) -> Made:
    def step(acc: Tensor, grad: Tensor) -> None:
        acc.add_(grad)

    return Made(step)


def threshold(setup: Setup) -> Made:
    try:
        kernel = setup.fused()
    except NotRun:
        kernel = Eager(setup.like) if setup.cuda else Vectorised(setup.like)
    return Made(
        lambda acc, grad: emptied(acc, kernel.above(acc, grad, setup.threshold)),
        kernel,
    )


def sort(setup: Setup) -> Made:
    """torch.sort of all magnitudes."""
    too_slow(setup)
    magnitudes = setup.workspace.buffer("magnitudes")

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        acc.add_(grad)
        order = torch.sort(torch.abs(acc, out=magnitudes), descending=True).indices
        return at(acc, order[: setup.k])

    return Made(step)


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
    return Made(lambda acc, grad: Sparse(*function(acc, grad, setup.threshold, setup.k)))


@cache
def compiler() -> Callable[..., tuple[Tensor, Tensor]]:
    """One function for all n: compiling takes a CPU half a minute."""
    return torch.compile(masked, dynamic=True)


def gaussiank(setup: Setup) -> Made:
    rule = GaussianThreshold()

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        return at(acc.add_(grad), rule.select(acc, setup.k, ALONE, setup.workspace).indices)

    return Made(step)


def dgc(setup: Setup) -> Made:
    rule, state = DgcSample(), Sampling(Draws(CONTEXT), setup.workspace)

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        return at(acc.add_(grad), rule.select(acc, setup.k, ALONE, state).indices)

    return Made(step)


def copy(setup: Setup) -> Made:
    length = int(COPIED * setup.like.numel())
    source = setup.inputs.view(-1).view(torch.float32)[:length]
    target = huge_pages.advise(torch.empty(length, device=setup.like.device)).zero_()

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
    magnitudes = setup.workspace.buffer("magnitudes")

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        acc.add_(grad)
        return at(acc, largest(torch.abs(acc, out=magnitudes), setup.k))

    return Made(step)


def too_slow(setup: Setup) -> None:
    if not setup.cuda and not setup.named and setup.like.numel() > MANY:
        raise NotRun(f"takes a CPU long beyond {MANY:,} elements; --rows with its name runs it")


def topk_memory(device: str) -> float:
    return 0.1 if device == "cuda" else 4.0  # on a CPU, 16 bytes of value and index for every element


ROWS = {
    row.name: row
    for row in (
        Row("add", "the floor: acc += grad alone, in place", add, traffic.of_add),
        Row("copy", "a copy into existing memory of as many bytes", copy, traffic.of_copy, held=COPIED),
        Row("fused", "exact, one pass: C++ on a CPU, Triton on a GPU", fused, traffic.of_fused, exact=True),
        Row("numpy", "exact, one pass in chunks that stay in cache, in numpy", numpy, traffic.of_fused,
            exact=True),
        Row("eager", "exact, plain torch: add, abs, topk, gather", eager, traffic.of_eager, exact=True,
            passing=topk_memory),
        Row("eager_hugepages", "`eager` in a process of its own, whose malloc gives huge pages "
            "(GLIBC_TUNABLES=glibc.malloc.hugetlb=1)", eager_in_huge_pages, traffic.of_eager, exact=True,
            held=FOLLOWED, passing=topk_memory),
        Row("fallback", "`fused` with a guess that is always wrong, so that it has to look at the whole sum",
            fallback, traffic.of_fallback, exact=True),
        Row("threshold", "all beyond the k-th magnitude, which is *given*; one pass", threshold,
            traffic.of_threshold, held=0.25),
        Row("dgc", "about k: DGC's sampled threshold, as `sparsify.methods.dgc` has it", dgc, traffic.of_dgc),
        Row("gaussiank", "about k: Gaussian-k's published rule, as `sparsify.methods.gaussiank` has it",
            gaussiank, traffic.of_gaussiank),
        Row("compile", "torch.compile of the mask form with nonzero_static; the threshold is *given*",
            compiled, traffic.of_masked, passing=lambda device: 1.25),
        Row("sort", "exact: add, abs, torch.sort, gather", sort, traffic.of_sort, exact=True,
            passing=lambda device: 5.0),
        Row("paper_kernel", "exact: add, abs, and one thread block alone, as topk of torch 1.8.1 (emulated)",
            paper_kernel, traffic.of_paper_kernel, exact=True),
    )
}  # fmt: skip
