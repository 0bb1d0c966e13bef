"""The part of a step whose cost grows with n: add the gradient to the residual, and find the largest
elements, always exactly.

`Eager` is plain torch: the published operator, and the oracle of the others. `Native` (C++) serves CPUs, `Gpu`
(Triton) serves CUDA. They differ in speed only: what is selected is the same to the
bit, but for equal magnitudes at the border, of which the fast ones take the smallest indices and torch.topk
any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.core import host_sync, huge_pages
from sparsify.core.checks import check_k
from sparsify.kernels import native
from sparsify.kernels.joint import JointKernel as JointKernel
from sparsify.kernels.joint import divide
from sparsify.kernels.native import Native, NativeJoint, Unavailable
from sparsify.types import BucketContext, SearchStats, Sparse, work_dtype
from sparsify.types import Kernel as Kernel

CHOICES = ("auto", "torch", "fused")
TRIED, GOLDEN = 100_000, 0.6180339887498949  # numbers that a GPU is tried with: multiples, no two alike
# From so many elements on `auto` takes a kernel, for torch's operators are faster below. On CPUs measured by
# BENCH=auto at densities of 0.001 to 0.1; at 0.01 and above, C++ is faster from half of it on.
NATIVE_FROM = 2**14
GPU_FROM = 2**17  # predicted from counts: 6 launches against the 20 of a large torch.topk; not yet measured
# Up to so many elements a bucket is searched together with others: 12 bytes of memory traffic more for each
# element take less time than six launches more. Predicted as well.
TOGETHER_UP_TO = 2**23
log = logging.getLogger(__name__)


class Eager(Kernel):
    """torch's own operators: add, abs, topk, gather. About 48 bytes of memory traffic per float32 element."""

    name = "torch"

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.like = like

    # Both are made when first needed: selectors with buffers of their own may never ask for them.

    @cached_property
    def magnitudes(self) -> Tensor:
        """(n,), a buffer."""
        return huge_pages.advise(torch.empty_like(self.like, dtype=work_dtype(self.like.dtype)))

    @cached_property
    def mask(self) -> Tensor:
        """(n,) bool, a buffer."""
        return torch.empty_like(self.like, dtype=torch.bool)

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        check_k(k, acc.numel())
        if grad is not None:
            acc.add_(grad)
        indices = self._take(acc).topk(k, sorted=False).indices
        self.done += SearchStats(1)
        return Sparse(indices, acc[indices])

    def above(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        if grad is not None:
            acc.add_(grad)
        compare = torch.gt if strict else torch.ge
        indices = host_sync.nonzero(compare(self._take(acc), threshold, out=self.mask[: acc.numel()]))
        return Sparse(indices, acc[indices])

    def _take(self, acc: Tensor) -> Tensor:
        return torch.abs(acc, out=self.magnitudes[: acc.numel()])


def kernels_in(state: Any) -> Iterator[Kernel]:
    """All kernels that a state holds."""
    if isinstance(state, list | tuple) or is_dataclass(state):
        held = vars(state).values() if is_dataclass(state) else state
        for value in held:
            yield from [value] if isinstance(value, Kernel) else kernels_in(value)


def kernel_for(like: Tensor, choice: str = "auto") -> Kernel:
    """The kernel for buckets like this (n,).

    Args:
        choice: `torch`, the plain operators; `fused`, one pass over memory; `auto`: fused where it works on
            this device, else torch; torch where n is too small for it to pay.

    Raises:
        ValueError: an unknown choice, or `fused` where it does not work.
    """
    if choice not in CHOICES:
        raise ValueError(ranges.unknown("select", choice, CHOICES))
    if choice == "torch" or (choice == "auto" and like.numel() < pays_from(like)):
        return Eager(like)
    try:
        return fused(like)
    except Unavailable as why:
        if choice == "fused":
            raise ValueError(
                f"select=fused does not work here: {why}; take select=auto, which does without it, or "
                "select=torch"
            ) from why
        best = "Triton" if like.is_cuda else "C++"
        tell(f"selecting with {Eager.name}, which is slower than {best}: {why}")
        return Eager(like)


def joint_kernel_for(likes: Sequence[Tensor], kernels: Sequence[Kernel], choice: str = "auto") -> JointKernel:
    """What searches all these buckets (n,) at once, and writes to them; where there is nothing better, one
    after the other.

    Args:
        kernels: of each bucket; none where nothing is searched.
        choice: as for `kernel_for`.
    """
    sizes = [like.numel() for like in likes]
    if choice != "torch" and all(map(native.supports, likes)) and not trouble_with_native():
        return NativeJoint(sizes)
    if choice != "torch" and likes[0].is_cuda and work_dtype(likes[0].dtype) == torch.float32:
        trouble = trouble_with_gpu(likes[0].device) or trouble_with_segments(likes[0].device)
        if not trouble:
            from sparsify.kernels import triton_group_search

            trouble = triton_group_search.obstacle(likes)
        if not trouble:
            return triton_group_search.GpuJoint(likes, kernels, TOGETHER_UP_TO)
        tell(f"searching bucket by bucket, which takes more launches: {trouble}")
    return JointKernel(sizes, kernels)


def norms_of(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """(number of sizes,) float32: Euclidean norms of stretches of tensors (m,) that follow each other, none
    of which ends within a stretch. A norm may overflow though all elements are finite.
    """
    if not trouble_with_native() and (norms := native.norms(tensors, sizes)) is not None:
        return norms
    stretches = [piece for own in divide(tensors, sizes) for piece in own or [tensors[0][:0]]]
    return torch.stack(torch._foreach_norm(stretches)).float()


def pays_from(like: Tensor) -> int:
    """The least number of elements for which `auto` looks for a fused kernel."""
    return GPU_FROM if like.is_cuda else NATIVE_FROM


@cache
def tell(line: str) -> None:
    """Warn, once."""
    log.warning(line)


def fused(like: Tensor) -> Kernel:
    """Triton on a GPU; C++ on a CPU; or `Unavailable`."""
    if like.is_cuda:
        raise_if(trouble_with_gpu(like.device))
        from sparsify.kernels import triton_search  # Triton takes its time to import

        raise_if(triton_search.obstacle(like))
        return triton_search.Gpu(like)
    elif native.supports(like):
        raise_if(trouble_with_native())
        return Native(like)
    raise Unavailable(f"no kernel is written for {like.dtype} on {like.device}")


def raise_if(trouble: str | None) -> None:
    """Raise the trouble, if there is one."""
    if trouble:
        raise Unavailable(trouble)


@cache
def trouble_with_native() -> str | None:
    """Reason why there is no native library; None where there is one, which is logged once."""
    try:
        native.library()
    except Unavailable as why:
        return str(why)
    log.info("selecting with C++ (%s)", native.best_level())
    return None


@cache
def trouble_with_gpu(device: torch.device) -> str | None:
    """Reason why Triton's kernels do not find what torch.topk finds; None where they do. Tried once on each
    device, since they are compiled where they run, by the compiler that is installed there.
    """
    try:
        from sparsify.kernels import triton_search

        raise_if(triton_search.obstacle(torch.empty(1, dtype=torch.float32, device=device)))
        numbers = torch.arange(TRIED, device=device, dtype=torch.float64)
        acc = (numbers * GOLDEN % 1 - 0.5).float()
        theirs = Eager(acc).topk(acc.clone(), acc, TRIED // 100).indices.sort().values
        # As it comes, and what is done after a wrong guess; each twice: the second time with kept kernels.
        tried = [kernel for bound in (None, triton_search.TOO_HIGH) for kernel in 2 * [triton_search.Gpu(acc, bound=bound)]]
        for kernel in tried:
            ours = kernel.topk(acc.clone(), acc, TRIED // 100).indices.long().sort().values
            if not torch.equal(ours, theirs):
                raise Unavailable("they chose other elements than torch.topk; please report this")
    # Triton has no common class of errors; whatever it was, it is told.
    except Exception as why:
        return f"Triton's kernels do not work on {device}: {str(why) or type(why).__name__}"
    return None


@cache
def trouble_with_segments(device: torch.device) -> str | None:
    """The same of the kernels that search buckets together."""
    try:
        from sparsify.kernels import triton_group_search

        numbers = torch.arange(TRIED, device=device, dtype=torch.float64)
        accs = [(numbers[:n] * GOLDEN % 1 - 0.5).float() for n in (64, TRIED // 3, TRIED)]
        whole, ks = torch.cat(accs), [max(1, acc.numel() // 100) for acc in accs]
        alone = [Eager(acc).topk(acc.clone(), acc, k) for acc, k in zip(accs, ks, strict=True)]
        bases = [0, *accumulate(acc.numel() for acc in accs)]
        theirs = torch.cat([part.indices + base for part, base in zip(alone, bases, strict=False)])
        kernel, memories = triton_group_search.GpuSegments(accs), list(torch.empty_like(whole).tensor_split(7))
        # A gradient as it comes, and one in two pieces; each twice: the second time with kept kernels.
        for pieces in (accs, [*accs[:-1], *accs[-1].split(TRIED // 2)]):
            for _ in range(2):
                found = kernel.topk([acc.clone() for acc in accs], pieces, ks)
                if not torch.equal(found.indices.long().sort().values, theirs.sort().values):
                    raise Unavailable("they chose other elements than torch.topk; please report this")
                kernel.add(memories, [found, Sparse(theirs, whole[theirs])], -0.3, clears=True)
                want = torch.zeros_like(whole)
                for part in found, Sparse(theirs, whole[theirs]):
                    want[part.indices.long()] += part.values * -0.3
                if not torch.equal(torch.cat(memories), want):
                    raise Unavailable("they do not add as torch does; please report this")
    except Exception as why:  # as above
        return f"Triton's kernels for many buckets do not work on {device}: {str(why) or type(why).__name__}"
    return None


@dataclass
class Workspace:
    """What a state needs and no checkpoint saves: the kernel that searches a bucket, if it is searched, and
    work buffers, which hold nothing from step to step.
    """

    like: Tensor = field(metadata={"saved": False})  # (n,) the bucket
    searcher: Kernel | None = field(default=None, metadata={"saved": False})
    buffers: dict[str, Tensor] = field(default_factory=dict, metadata={"saved": False})

    @classmethod
    def searching(cls, like: Tensor, context: BucketContext) -> Workspace:
        """A workspace with the kernel that the user has chosen; ValueError where that does not work."""
        return cls(like, kernel_for(like, context.select))

    @property
    def kernel(self) -> Kernel:
        """Kernel that searches the bucket."""
        assert self.searcher is not None, "made by Workspace(...), not by Workspace.searching(...)"
        return self.searcher

    def buffer(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """(n,), allocated at its first use; by default of the type that selections are computed in."""
        if name not in self.buffers:
            dtype = work_dtype(self.like.dtype) if dtype is None else dtype
            self.buffers[name] = huge_pages.advise(torch.empty_like(self.like, dtype=dtype))
        return self.buffers[name]
