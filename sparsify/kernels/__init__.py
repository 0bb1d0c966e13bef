"""The part of a step whose cost grows with n: add what is owed, and find what is large. Always exactly.

`Eager` is plain torch: the published operator, and the oracle of the others. `Native` (C++) and `Vectorised`
(numpy) serve CPUs, `Gpu` (Triton) serves CUDA. They differ in speed only: what is selected is the same to the
bit, but for equal magnitudes at the border, of which the fast ones take the smallest indices and torch.topk
any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify.kernels import native, vectorised
from sparsify.kernels.eager import Eager as Eager
from sparsify.kernels.native import Native, Unavailable
from sparsify.kernels.tally import Tally as Tally
from sparsify.kernels.vectorised import Vectorised
from sparsify.parts import Sparse, check_choice

CHOICES = ("auto", "torch", "fused")
TRIED, GOLDEN = 100_000, 0.6180339887498949  # numbers that a GPU is tried with: multiples, no two alike
log = logging.getLogger(__name__)


@runtime_checkable
class Kernel(Protocol):
    """For one bucket: buffers are made for it once, so use it for that bucket, or for parts of it."""

    @property
    def name(self) -> str: ...

    def top(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        """acc (n,) += grad (n,); the k elements of largest magnitude, (k,). NaN counts as larger than Inf. No
        host synchronisation. What is returned is the caller's; acc is otherwise as it was.
        """

    def beyond(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        """acc (n,) += grad (n,); all elements with |acc| >= threshold (> if strict), indices ascending; NaN
        is not beyond anything. One host synchronisation, for how many they are.
        """

    def tally(self) -> Tally:
        """What was done so far; on a GPU one host synchronisation."""


@dataclass
class Search:
    """What a selector keeps that only searches: nothing of it is saved."""

    kernel: Kernel = field(metadata={"saved": False})


def kernels_in(state: Any) -> Iterator[Kernel]:
    """All kernels that a state holds."""
    if isinstance(state, list | tuple) or is_dataclass(state):
        held = vars(state).values() if is_dataclass(state) else state
        for one in held:
            yield from [one] if isinstance(one, Kernel) else kernels_in(one)


def kernel(like: Tensor, choice: str = "auto") -> Kernel:
    """The kernel for buckets like this one (n,).

    Args:
        choice: `torch`, the plain operators; `fused`, one pass over memory; `auto`: fused where it can be had
            for this device, else torch.

    Raises:
        ValueError: an unknown choice, or `fused` where it can't be had.
    """
    check_choice("select", choice, CHOICES)
    if choice == "torch":
        return Eager(like)
    made = for_gpu(like) if like.is_cuda else for_cpu(like)
    if made is None and choice == "fused":
        raise ValueError(
            f"select=fused has no kernel for {like.dtype} on {like.device} that works here; take "
            "select=torch, or auto"
        )
    return made or Eager(like)


def for_cpu(like: Tensor) -> Kernel | None:
    """C++ where it can be built, else numpy."""
    if native.supports(like) and compiled():
        return Native(like)
    return Vectorised(like) if vectorised.supports(like) else None


@cache
def compiled() -> bool:
    """Is there a native library? Says so once."""
    try:
        native.library()
    except Unavailable as why:
        log.warning("selecting with numpy, which is slower than C++: %s", why)
        return False
    log.info("selecting with C++ (%s)", native.best_level())
    return True


def for_gpu(like: Tensor) -> Kernel | None:
    """Triton, where it works."""
    if not works_on_gpu(like.device):
        return None
    from sparsify.kernels import gpu  # Triton takes its time to import

    return gpu.Gpu(like) if gpu.supports(like) else None


@cache
def works_on_gpu(device: torch.device) -> bool:
    """Do Triton's kernels find here what torch.topk finds? Tried once, for they are compiled where they run,
    by what is installed there. Where not, it is said.
    """
    try:
        from sparsify.kernels import gpu

        if not gpu.supports(torch.empty(1, device=device)):
            raise Unavailable(f"they need compute capability {gpu.CAPABILITY} on an NVIDIA GPU")
        numbers = torch.arange(TRIED, device=device, dtype=torch.float64)
        acc = (numbers * GOLDEN % 1 - 0.5).float()
        ours, theirs = (kind(acc).top(acc.clone(), acc, TRIED // 100) for kind in (gpu.Gpu, Eager))
        if not torch.equal(ours.indices.long().sort().values, theirs.indices.sort().values):
            raise Unavailable("they chose other elements than torch.topk; please report this")
    # Triton has no common class of errors; whatever it was, it is told, and torch.topk does the work.
    except Exception as why:
        log.warning("selecting with torch.topk, for Triton's kernels do not work on %s: %s", device, why)
        return False
    return True
