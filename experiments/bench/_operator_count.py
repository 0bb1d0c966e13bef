"""Counts of what a step asks of the machine, without timing: collectives, tensor operations, bytes.

PyTorch's dispatcher hands over every operator of the thread that entered a counter, those of backpropagation
and of DDP among them. Functions of the library's C++ bypass the dispatcher, so they are counted where they
are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsify.kernels import native
from sparsify.kernels.native import NativeGroupKernel
from sparsify.types import SparseVector

COLLECTIVES = "c10d."
BUFFER_BROADCASTS = "c10d.broadcast_"  # of DDP, which sends a model's buffers in each step
ALLOCATIONS = ("aten.empty", "aten.new_empty")
# Operators that look for the elements to be sent, where plain operators do.
SEARCHES = (
    "native.topk",
    "aten.add_.Tensor",
    "aten.abs.out",
    "aten.topk.default",
    "aten.index.Tensor",
    "aten._to_copy",
)
COPIES = ("aten.copy_", "aten._foreach_copy_")  # of gradients from DDP's buckets into ours and back
WRITE_ONLY = ("aten.zero_", "aten.fill_", "aten.copy_", "aten.normal_", "aten._foreach_zero_")
INDEXED = ("index", "gather", "scatter", "take", "put")  # touch as many elements as there are indices


class OperatorCounter(TorchDispatchMode):
    """A context that counts the operators that run inside, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types
        self.counts = Counter[str]()
        self.nbytes = 0
        self.patches = ExitStack()

    def __enter__(self) -> OperatorCounter:
        for name, owner, attribute, nbytes in (
            ("native.norms", native, "norms_of_stretches", _norms_nbytes),
            ("native.topk", NativeGroupKernel, "topk", _topk_nbytes),
            ("native.add", NativeGroupKernel, "add", _add_nbytes),
            ("native.clear_at", NativeGroupKernel, "clear_at", _add_nbytes),
        ):
            counting_function = self._count_calls(name, getattr(owner, attribute), nbytes)
            self.patches.enter_context(mock.patch.object(owner, attribute, counting_function))
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # as above
        self.patches.close()

    def _count_calls(
        self, name: str, function: Callable[..., Any], nbytes: Callable[..., int]
    ) -> Callable[..., Any]:
        """Return a function of the library's C++ that counts its calls and their bytes."""

        def counted(*args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            self.nbytes += nbytes(*args, **options)
            return function(*args, **options)

        return counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self.counts[str(func)] += 1
            self.nbytes += _operator_nbytes(str(func), args, kwargs or {}, result)
        return result

    @property
    def num_collectives_but_buffer_broadcasts(self) -> int:
        """The number of collectives, without the broadcasts of a model's buffers."""
        return self._count(COLLECTIVES) - self._count(BUFFER_BROADCASTS)

    @property
    def num_operations_but_collectives(self) -> int:
        """The number of operators that compute, write or copy; views and allocations are free."""
        return self._count_others(COLLECTIVES, *ALLOCATIONS)

    @property
    def num_operations_around_search(self) -> int:
        """The number of operations and collectives without searches and copies from and to DDP's buckets."""
        return self._count_others(*ALLOCATIONS, *SEARCHES, *COPIES)

    def _count(self, *prefixes: str) -> int:
        return sum(count for name, count in self.counts.items() if name.startswith(prefixes))

    def _count_others(self, *prefixes: str) -> int:
        return self.counts.total() - self._count(*prefixes)


def _norms_nbytes(tensors: Sequence[Tensor], sizes: Sequence[int]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _topk_nbytes(
    kernel: NativeGroupKernel, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]
) -> int:
    """Return the bytes of a search, which reads and writes what is accumulated."""
    return sum(2 * acc.nbytes for acc in accs) + sum(grad.nbytes for grad in grads) + 8 * sum(ks)


def _add_nbytes(
    kernel: NativeGroupKernel,
    into: Sequence[Tensor],
    parts: Sequence[SparseVector] | SparseVector,
    alpha: float = 1,
    clears: bool = False,
) -> int:
    """Return the bytes of the parts' elements, and of the whole memory if it is cleared."""
    parts = [parts] if isinstance(parts, SparseVector) else parts
    nbytes = sum(part.indices.nbytes + 3 * part.values.nbytes for part in parts)
    return nbytes + (sum(memory.nbytes for memory in into) if clears else 0)


def _is_view(func: Any) -> bool:
    """Tell whether an operator returns another view of its argument."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _operator_nbytes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the bytes that an operator reads and writes, each tensor once, without regard to caches."""
    if name.startswith((COLLECTIVES, *ALLOCATIONS)):
        return 0
    read = _tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
    written = _tensors_in(result) or _tensors_in(args[0])  # some foreach operators return nothing
    if any(word in name for word in INDEXED):
        smallest = min((tensor.numel() for tensor in read), default=0)
        return sum(tensor.element_size() * min(tensor.numel(), smallest) for tensor in [*read, *written])
    if name.startswith(WRITE_ONLY):
        read = read[1:]
    return sum(tensor.nbytes for tensor in [*read, *written])


def _tensors_in(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
