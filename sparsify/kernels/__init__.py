"""The kernels: passes over a bucket that add the gradient to the residual and find the largest elements.

They are the part of a step whose cost grows with n, and they are always exact. `TorchKernel` is made of
torch's operators: the published selection, and the oracle of the others. `NativeKernel` (C++) serves CPUs,
`TritonKernel` serves CUDA. All select the same elements to the bit, except for equal magnitudes at the
border: of these the fast kernels take the smallest indices, and torch.topk takes any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.core import host_sync, huge_pages
from sparsify.core.checks import check_k
from sparsify.kernels import native
from sparsify.kernels.group_kernel import GroupKernel as GroupKernel
from sparsify.kernels.group_kernel import divide_into_stretches
from sparsify.kernels.native import KernelUnavailableError, NativeGroupKernel, NativeKernel
from sparsify.types import BucketContext, SearchStats, SparseVector, accumulation_dtype
from sparsify.types import SelectionKernel as SelectionKernel

SELECT_CHOICES = ("auto", "torch", "fused")
TRIAL_NUMEL = 100_000  # elements that Triton's kernels are tried with on each device
GOLDEN_RATIO = 0.6180339887498949  # the fractional parts of its multiples are all different
# Below so many elements `auto` takes torch's operators, which are faster there. On CPUs measured by
# BENCH=auto at densities of 0.001 to 0.1; at 0.01 and above, C++ is faster from half of it on.
NATIVE_MIN_NUMEL = 2**14
# Predicted from counts: 6 launches against the 20 of a large torch.topk; not yet measured.
TRITON_MIN_NUMEL = 2**17
# A bucket of at most so many elements is searched together with others: 12 bytes of memory traffic more for
# each element take less time than six launches more. Predicted as well.
GROUP_SEARCH_MAX_NUMEL = 2**23
log = logging.getLogger(__name__)


class TorchKernel(SelectionKernel):
    """A search by torch's operators: add, abs, topk, gather.

    This takes about 48 bytes of memory traffic for each float32 element.
    """

    name = "torch"

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.workspace = Workspace(like)  # of buffers that a selector may never ask for

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> SparseVector:
        check_k(k, acc.numel())
        if grad is not None:
            acc.add_(grad)
        indices = self._magnitudes(acc).topk(k, sorted=False).indices
        self.search_stats += SearchStats(1)
        return SparseVector(indices, acc[indices])

    def above_threshold(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> SparseVector:
        if grad is not None:
            acc.add_(grad)
        compare = torch.gt if strict else torch.ge
        mask = self.workspace.buffer("mask", torch.bool)[: acc.numel()]
        indices = host_sync.nonzero(compare(self._magnitudes(acc), threshold, out=mask))
        return SparseVector(indices, acc[indices])

    def _magnitudes(self, acc: Tensor) -> Tensor:
        return torch.abs(acc, out=self.workspace.buffer("magnitudes")[: acc.numel()])


def find_kernels(state: Any) -> Iterator[SelectionKernel]:
    """Yield all kernels that a state holds."""
    if isinstance(state, list | tuple) or is_dataclass(state):
        members = vars(state).values() if is_dataclass(state) else state
        for member in members:
            yield from [member] if isinstance(member, SelectionKernel) else find_kernels(member)


def make_kernel(like: Tensor, choice: str = "auto") -> SelectionKernel:
    """Make the kernel for buckets like this tensor (n,).

    Args:
        choice: `torch`, the plain operators; `fused`, one pass over memory; `auto`: fused where it works on
            this device, else torch; torch where n is too small for it to pay.

    Raises:
        ValueError: an unknown choice, or `fused` where it does not work.
    """
    if choice not in SELECT_CHOICES:
        raise ValueError(ranges.describe_unknown("select", choice, SELECT_CHOICES))
    if choice == "torch" or (choice == "auto" and like.numel() < min_fused_numel(like)):
        return TorchKernel(like)
    try:
        return make_fused_kernel(like)
    except KernelUnavailableError as reason:
        if choice == "fused":
            raise ValueError(
                f"select=fused does not work here: {reason}; take select=auto, which does without it, or "
                "select=torch"
            ) from reason
        best = "Triton" if like.is_cuda else "C++"
        warn_once(f"selecting with {TorchKernel.name}, which is slower than {best}: {reason}")
        return TorchKernel(like)


def make_group_kernel(
    likes: Sequence[Tensor], kernels: Sequence[SelectionKernel], choice: str = "auto"
) -> GroupKernel:
    """Make the kernel that searches all these buckets (n,) at once, and writes to them.

    Where there is no such kernel, the buckets are searched one after the other.

    Args:
        kernels: of each bucket; none where nothing is searched.
        choice: as for `make_kernel`.
    """
    sizes = [like.numel() for like in likes]
    if choice != "torch" and all(map(native.can_search, likes)) and not native_unavailable_reason():
        return NativeGroupKernel(sizes)
    if choice != "torch" and likes[0].is_cuda and accumulation_dtype(likes[0].dtype) == torch.float32:
        device = likes[0].device
        reason = triton_unavailable_reason(device) or triton_group_unavailable_reason(device)
        if not reason:
            from sparsify.kernels import triton_group_search

            reason = triton_group_search.unsupported_reason(likes)
        if not reason:
            return triton_group_search.TritonGroupKernel(likes, kernels, GROUP_SEARCH_MAX_NUMEL)
        warn_once(f"searching bucket by bucket, which takes more launches: {reason}")
    return GroupKernel(sizes, kernels)


def stretch_norms(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the Euclidean norm of each stretch of tensors (m,) that follow each other.

    A norm may overflow though all elements are finite.

    Args:
        sizes: elements of each stretch; no tensor ends within a stretch.

    Returns:
        (number of sizes,) float32.
    """
    if not native_unavailable_reason():
        norms = native.norms_of_stretches(tensors, sizes)
        if norms is not None:
            return norms
    stretches = [
        piece for pieces in divide_into_stretches(tensors, sizes) for piece in pieces or [tensors[0][:0]]
    ]
    return torch.stack(torch._foreach_norm(stretches)).float()


def min_fused_numel(like: Tensor) -> int:
    """Return the least number of elements for which `auto` looks for a fused kernel."""
    return TRITON_MIN_NUMEL if like.is_cuda else NATIVE_MIN_NUMEL


@cache
def warn_once(line: str) -> None:
    """Log a warning the first time that it is given."""
    log.warning(line)


def make_fused_kernel(like: Tensor) -> SelectionKernel:
    """Make Triton's kernel on a GPU, that of C++ on a CPU.

    Raises:
        KernelUnavailableError: there is none for such buckets, or it does not work here.
    """
    if like.is_cuda:
        check_available(triton_unavailable_reason(like.device))
        from sparsify.kernels import triton_search  # Triton takes its time to import

        check_available(triton_search.unsupported_reason(like))
        return triton_search.TritonKernel(like)
    elif native.can_search(like):
        check_available(native_unavailable_reason())
        return NativeKernel(like)
    raise KernelUnavailableError(f"no kernel is written for {like.dtype} on {like.device}")


def check_available(unavailable_reason: str | None) -> None:
    """Raise KernelUnavailableError if there is a reason why a kernel is unavailable."""
    if unavailable_reason:
        raise KernelUnavailableError(unavailable_reason)


@cache
def native_unavailable_reason() -> str | None:
    """Return the reason why there is no native library; None where there is one, which is logged once."""
    try:
        native.get_library()
    except KernelUnavailableError as reason:
        return str(reason)
    log.info("selecting with C++ (%s)", native.best_vector_level())
    return None


@cache
def triton_unavailable_reason(device: torch.device) -> str | None:
    """Return the reason why Triton's kernels do not find what torch.topk finds; None where they do.

    The kernels are tried once on each device, since they are compiled where they run, by the compiler that is
    installed there.
    """
    try:
        from sparsify.kernels import triton_search

        check_available(triton_search.unsupported_reason(torch.empty(1, dtype=torch.float32, device=device)))
        acc = make_trial_numbers(TRIAL_NUMEL, device)
        k = TRIAL_NUMEL // 100
        expected = TorchKernel(acc).topk(acc.clone(), acc, k)
        # With a sampled bound, and with one that is too high; each twice: the second time launches are kept.
        for bound in (None, triton_search.UNREACHABLE_KEY):
            kernel = triton_search.TritonKernel(acc, forced_bound=bound)
            for _ in range(2):
                check_trial_selection(kernel.topk(acc.clone(), acc, k), expected)
    # Triton has no common class of errors, so all are caught and told.
    except Exception as error:
        return f"Triton's kernels do not work on {device}: {str(error) or type(error).__name__}"
    return None


@cache
def triton_group_unavailable_reason(device: torch.device) -> str | None:
    """Return the reason why Triton's search of several buckets does not work on a device; None where it does.

    It is tried as `triton_unavailable_reason` tries the search of one bucket.
    """
    try:
        from sparsify.kernels import triton_group_search

        accs = [make_trial_numbers(n, device) for n in (64, TRIAL_NUMEL // 3, TRIAL_NUMEL)]
        ks = [max(1, acc.numel() // 100) for acc in accs]
        oracle = GroupKernel([acc.numel() for acc in accs], [TorchKernel(acc) for acc in accs])
        expected = oracle.topk([acc.clone() for acc in accs], accs, ks)
        kernel = triton_group_search.TritonGroupKernel(accs)
        total = torch.cat(accs)
        memories = total.clone().tensor_split(7)
        # Gradients of one piece each, and one in two pieces; each twice: the second time launches are kept.
        for grads in (accs, [*accs[:-1], *accs[-1].split(TRIAL_NUMEL // 2)]):
            for _ in range(2):
                selection = kernel.topk([acc.clone() for acc in accs], grads, ks)
                check_trial_selection(selection, expected)
                kernel.add(memories, [selection, expected], -0.3, clears=True)
                oracle.add([total], [selection, expected], -0.3, clears=True)
                if not torch.equal(torch.cat(memories), total):
                    raise KernelUnavailableError("they do not add as torch does; please report this")
    except Exception as error:  # as above
        return (
            f"Triton's kernels for many buckets do not work on {device}: {str(error) or type(error).__name__}"
        )
    return None


def check_trial_selection(selection: SparseVector, expected: SparseVector) -> None:
    """Raise KernelUnavailableError if a kernel has selected other elements than torch.topk."""
    if not torch.equal(selection.indices.long().sort().values, expected.indices.long().sort().values):
        raise KernelUnavailableError("they chose other elements than torch.topk; please report this")


def make_trial_numbers(n: int, device: torch.device) -> Tensor:
    """Make (n,) float32 numbers from -0.5 to 0.5, no two of which are alike."""
    return (torch.arange(n, device=device, dtype=torch.float64) * GOLDEN_RATIO % 1 - 0.5).float()


@dataclass
class Workspace:
    """Work memory of a state, which no checkpoint saves.

    It has the kernel that searches a bucket, if the bucket is searched, and buffers, which hold nothing from
    step to step.
    """

    like: Tensor = field(metadata={"saved": False})  # (n,) the bucket
    searcher: SelectionKernel | None = field(default=None, metadata={"saved": False})
    buffers: dict[str, Tensor] = field(default_factory=dict, metadata={"saved": False})

    @classmethod
    def with_kernel(cls, like: Tensor, context: BucketContext) -> Workspace:
        """Make a workspace with the kernel that the user has chosen; ValueError where that does not work."""
        return cls(like, make_kernel(like, context.select))

    @property
    def kernel(self) -> SelectionKernel:
        """Kernel that searches the bucket."""
        assert self.searcher is not None, "made by Workspace(...), not by Workspace.with_kernel(...)"
        return self.searcher

    def buffer(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the buffer (n,) of this name, allocated at its first use.

        Args:
            dtype: by default the type that selections are computed in.
        """
        if name not in self.buffers:
            dtype = accumulation_dtype(self.like.dtype) if dtype is None else dtype
            self.buffers[name] = huge_pages.request(torch.empty_like(self.like, dtype=dtype))
        return self.buffers[name]
