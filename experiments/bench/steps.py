"""The steps that are timed: each adds a gradient to the residual, selects, and takes out what it selected.

A step is a function of acc (n,) and grad (n,), both float32, that returns what it selected. All of them empty
acc as `sparsify.feedback.ErrorFeedback` does: acc -= value, where selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.kernels import Eager, Native, Unavailable, Vectorised, native
from sparsify.methods.dgc import DgcSample, Sampling
from sparsify.methods.gaussiank import GaussianThreshold
from sparsify.parts import Place, Sparse
from sparsify.select import Draws
from sparsify.thresholds import Scratch

Step = Callable[[Tensor, Tensor], Sparse | None]

MANY = 30_000_000  # elements, above which a CPU takes seconds for the slowest steps
COPIED = 1.5  # floats read, and as many written, per element: 12 bytes
LINE = {"cpu": 64, "cuda": 32}  # bytes that move when one element is touched: a cache line, a sector
INT64, INT32, FLOAT = 8, 4, 4


PLACE = Place(0, 0, 0, select="torch")
ALONE: Any = None  # in place of a communicator, which these selectors do not use


class NotRun(Exception):
    """A step that can't be had here; the reason."""


class Seen(NamedTuple):
    """What the bytes of a step depend on, besides n."""

    device: str  # cpu, or cuda
    density: float  # what was selected, / n
    waits: float  # host synchronisations per step: each is one pass over a mask
    candidates: float  # elements that reached a guessed bound, / n


class Traffic(NamedTuple):
    """Bytes of memory traffic per element, counted from what the algorithm reads and writes."""

    total: float | None  # None: not counted
    words: str


@dataclass
class Setup:
    """What steps are made of, for one n and k."""

    like: Tensor  # (n,)
    k: int
    inputs: Tensor  # (turns, n) gradients, which the copy reads
    named: bool = False  # was the row asked for by name?
    threshold: Tensor = field(init=False)  # 0-d: the k-th magnitude of the step to come

    def __post_init__(self) -> None:
        self.threshold = torch.zeros((), device=self.like.device)

    @property
    def cuda(self) -> bool:
        return self.like.is_cuda

    @cached_property
    def scratch(self) -> Scratch:
        """Of the plain operators; shared by all steps of those, for it holds nothing from step to step."""
        return Scratch.of(self.like, PLACE)

    def fused(self) -> Any:
        """The fused kernel of this device. Raises NotRun."""
        try:
            return (gpu_class() if self.cuda else native_class())(self.like)
        except ValueError as error:
            raise NotRun(str(error)) from error


class Made(NamedTuple):
    """A step that is ready, and the kernel within it, if any."""

    step: Step
    kernel: Any = None


@dataclass(frozen=True)
class Row:
    """One of the steps that are compared."""

    name: str
    words: str
    make: Callable[[Setup], Made]
    traffic: Callable[[Seen], Traffic]
    exact: bool = False  # the k largest
    held: float = 0.0  # floats per element that stay allocated from step to step
    passing: Callable[[str], float] = lambda device: 0.0  # that its step allocates besides


def gpu_class() -> Any:
    try:
        from sparsify.kernels import gpu
    except ImportError as error:
        raise NotRun(f"no Triton: {error}") from error
    return gpu.Gpu


def native_class() -> Any:
    try:
        native.library()
    except Unavailable as error:
        raise NotRun(f"no compiler, or what it made does not run: {error}") from error
    return Native


def emptied(acc: Tensor, found: Sparse) -> Sparse:
    """acc less what was found."""
    found.add_to(acc, alpha=-1)
    return found


def at(acc: Tensor, indices: Tensor) -> Sparse:
    return emptied(acc, Sparse(indices, acc[indices]))


def by_kernel(kernel: Any, k: int) -> Made:
    return Made(lambda acc, grad: emptied(acc, kernel.top(acc, grad, k)), kernel)


def eager(setup: Setup) -> Made:
    return by_kernel(setup.scratch.kernel, setup.k)._replace(kernel=None)  # it guesses nothing


def numpy(setup: Setup) -> Made:
    if setup.cuda:
        raise NotRun("numpy is for CPUs")
    return by_kernel(Vectorised(setup.like), setup.k)


def fused(setup: Setup) -> Made:
    return by_kernel(setup.fused(), setup.k)


def threshold(setup: Setup) -> Made:
    try:
        kernel = setup.fused()
    except NotRun:
        kernel = Eager(setup.like) if setup.cuda else Vectorised(setup.like)
    return Made(
        lambda acc, grad: emptied(acc, kernel.beyond(acc, grad, setup.threshold)),
        kernel,
    )


def sort(setup: Setup) -> Made:
    """torch.sort of all magnitudes."""
    too_slow(setup)
    magnitudes = setup.scratch.magnitudes

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        acc.add_(grad)
        order = torch.sort(torch.abs(acc, out=magnitudes), descending=True).indices
        return at(acc, order[: setup.k])

    return Made(step)


def masked(acc: Tensor, grad: Tensor, threshold: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The mask form, which a compiler can fuse: the data decide no shape. The first k that reach the
    threshold.
    """
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
def compiler() -> Any:
    """One function for all n: compiling takes a CPU half a minute."""
    return torch.compile(masked, dynamic=True)


def gaussiank(setup: Setup) -> Made:
    rule = GaussianThreshold()

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        return at(acc.add_(grad), rule.select(acc, setup.k, ALONE, setup.scratch).indices)

    return Made(step)


def dgc(setup: Setup) -> Made:
    rule, state = DgcSample(), Sampling(Draws(PLACE), setup.scratch)

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        return at(acc.add_(grad), rule.select(acc, setup.k, ALONE, state).indices)

    return Made(step)


def copy(setup: Setup) -> Made:
    length = int(COPIED * setup.like.numel())
    source, target = setup.inputs.view(-1)[:length], torch.zeros(length, device=setup.like.device)

    def step(acc: Tensor, grad: Tensor) -> None:
        target.copy_(source)

    return Made(step)


def paper_kernel(setup: Setup) -> Made:
    if not setup.cuda:
        raise NotRun("needs a GPU")
    try:
        from experiments.bench.one_block import largest
    except ImportError as error:
        raise NotRun(f"needs Triton: {error}") from error
    magnitudes = setup.scratch.magnitudes

    def step(acc: Tensor, grad: Tensor) -> Sparse:
        acc.add_(grad)
        return at(acc, largest(torch.abs(acc, out=magnitudes), setup.k))

    return Made(step)


def too_slow(setup: Setup) -> None:
    if not setup.cuda and not setup.named and setup.like.numel() > MANY:
        raise NotRun(f"takes a CPU long beyond {MANY:,} elements; --rows with its name runs it")


def winners(seen: Seen, index: int = INT64, gathered: bool = True) -> tuple[float, str]:
    """What moves per selected element, times their share: index and value written; its line read for the
    value, unless that is at hand already, and read and written to empty it.
    """
    lines = LINE[seen.device] * (3 if gathered else 2)
    return seen.density * (index + FLOAT + lines), f"{index + FLOAT + lines} selected/n"


def counted(seen: Seen, *terms: tuple[float, str], **how: Any) -> Traffic:
    """The sum of terms and what moves for those selected."""
    terms = (*terms, winners(seen, **how))
    return Traffic(sum(number for number, _ in terms), " + ".join(words for _, words in terms))


ADD, ABS = (12.0, "12 add"), (8.0, "8 abs")


def of_copy(seen: Seen) -> Traffic:
    first = "; a CPU may read the lines that it is to write, 6 more" if seen.device == "cpu" else ""
    return Traffic(12.0, f"12 (6 read, 6 written{first})")


def of_eager(seen: Seen) -> Traffic:
    # CUDA: four radix passes and one that gathers. CPU: pairs of value and index, 16 bytes, written and read.
    topk = (20.0, "20 topk (5 passes)") if seen.device == "cuda" else (36.0, "36 topk (4 read, 2 x 16 pairs)")
    return counted(seen, ADD, ABS, topk)


def of_sort(seen: Seen) -> Traffic:
    if seen.device != "cuda":
        return Traffic(None, "not counted: merges, as deep as log n")
    return counted(seen, ADD, ABS, (100.0, "100 sort (4 read, 4 radix passes of keys and int64 indices)"))


def of_masked(seen: Seen) -> Traffic:
    return counted(seen, (12.0, "12 fused"), (3.0, "3 mask (1 written, 2 read)"))


def of_gaussiank(seen: Seen) -> Traffic:
    passes = (7 * seen.waits, f"7 x {seen.waits:.3g} thresholds (4 compared, 1 mask written, 2 read)")
    return counted(seen, ADD, ABS, (4.0, "4 mean and deviation"), passes)


def of_dgc(seen: Seen) -> Traffic:
    passes = (7 * seen.waits, f"7 x {seen.waits:.3g} thresholds (4 compared, 1 mask written, 2 read)")
    line = LINE[seen.device]
    sample = (0.01 * line, f"{0.01 * line:.2g} sample (a line for 1 % of the elements)")
    return counted(seen, ADD, ABS, sample, passes)


def of_fused(seen: Seen) -> Traffic:
    candidates = (16 * seen.candidates, "16 candidates/n")  # index and value, written and read
    return counted(seen, (12.0, "12 fused"), candidates, index=INT32, gathered=False)


def of_threshold(seen: Seen) -> Traffic:
    return counted(
        seen, (12.0, "12 fused"), (16 * seen.density, "16 selected/n"), index=INT32, gathered=False
    )


def of_paper_kernel(seen: Seen) -> Traffic:
    return counted(seen, ADD, ABS, (72.0, "72 topk (18 passes)"))


def topk_memory(device: str) -> float:
    return 0.1 if device == "cuda" else 4.0  # on a CPU, 16 bytes of value and index for every element


ROWS = {
    row.name: row
    for row in (
        Row("copy", "the floor: a copy into existing memory that moves 12n bytes", copy,
            of_copy, held=COPIED),
        Row("fused", "exact, one pass: C++ on a CPU, Triton on a GPU", fused, of_fused, exact=True),
        Row("numpy", "exact, one pass in chunks that stay in cache, in numpy", numpy, of_fused, exact=True),
        Row("eager", "exact, plain torch: add, abs, topk, gather", eager, of_eager, exact=True,
            passing=topk_memory),
        Row("threshold", "all beyond the k-th magnitude, which is *given*; one pass", threshold, of_threshold,
            held=0.25),
        Row("dgc", "about k: DGC's sampled threshold, as `sparsify.methods.dgc` has it", dgc, of_dgc),
        Row("gaussiank", "about k: Gaussian-k's published rule, as `sparsify.methods.gaussiank` has it",
            gaussiank, of_gaussiank),
        Row("compile", "torch.compile of the mask form with nonzero_static; the threshold is *given*",
            compiled, of_masked, passing=lambda device: 1.25),
        Row("sort", "exact: add, abs, torch.sort, gather", sort, of_sort, exact=True,
            passing=lambda device: 5.0),
        Row("paper_kernel", "exact: add, abs, and one thread block alone, as topk of torch 1.8.1 (emulated)",
            paper_kernel, of_paper_kernel, exact=True),
    )
}  # fmt: skip
