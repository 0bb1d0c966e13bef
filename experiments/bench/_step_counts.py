"""What a step asks of the machine, counted and not timed: collectives, tensor operations, bytes.

PyTorch's dispatcher is asked, which hands over every operator of the thread that entered a count, those of
backpropagation and of DDP among them. What our C++ does without it counts where it is called.
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

COLLECTIVES, BUFFERS = "c10d.", "c10d.broadcast_"  # of DDP, which broadcasts a model's buffers in each step
ALLOCATES = ("aten.empty", "aten.new_empty")
# Operators that look for the elements to be sent, where plain operators do; and those by which gradients get
# from DDP's buckets into ours and back.
SEARCHES = (
    "native.topk",
    "aten.add_.Tensor",
    "aten.abs.out",
    "aten.topk.default",
    "aten.index.Tensor",
    "aten._to_copy",
)
COPIES = ("aten.copy_", "aten._foreach_copy_")
WRITES_ONLY = ("aten.zero_", "aten.fill_", "aten.copy_", "aten.normal_", "aten._foreach_zero_")
BY_INDEX = ("index", "gather", "scatter", "take", "put")  # which touch as many elements as there are indices


class Operators(TorchDispatchMode):
    """Counts the operators that run while it is entered, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted, self.nbytes = Counter[str](), 0
        self.patches = ExitStack()

    def __enter__(self) -> Operators:
        for where, name, nbytes in (
            (native, "norms", read_once), (NativeGroupKernel, "topk", of_topk),
            (NativeGroupKernel, "add", of_add), (NativeGroupKernel, "clear_at", of_add),
        ):  # fmt: skip
            counting = self._counting(name, getattr(where, name), nbytes)
            self.patches.enter_context(mock.patch.object(where, name, counting))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *those: Any) -> None:
        super().__exit__(*those)  # type: ignore[no-untyped-call]
        self.patches.close()

    def _counting(
        self, name: str, call: Callable[..., Any], nbytes: Callable[..., int]
    ) -> Callable[..., Any]:
        """A function of our C++, which counts."""

        def counting(*args: Any, **options: Any) -> Any:
            self.counted[f"native.{name}"] += 1
            self.nbytes += nbytes(*args, **options)
            return call(*args, **options)

        return counting

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            self.counted[str(func)] += 1
            self.nbytes += moved(func, args, kwargs or {}, result)
        return result

    @property
    def collectives(self) -> int:
        """Without those that send a model's buffers."""
        return self._number(lambda name: name.startswith(COLLECTIVES) and not name.startswith(BUFFERS))

    @property
    def operations(self) -> int:
        """Those that compute, write or copy something; views and allocations are free."""
        return self._number(lambda name: not name.startswith((COLLECTIVES, *ALLOCATES)))

    @property
    def around_search(self) -> int:
        """The same and the collectives, without searching and without copies from and to DDP's buckets."""
        return self._number(lambda name: not name.startswith((*ALLOCATES, *SEARCHES, *COPIES)))

    def _number(self, counts: Any) -> int:
        return sum(number for name, number in self.counted.items() if counts(name))


def read_once(tensors: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Bytes of the norms of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def of_topk(
    kernel: NativeGroupKernel, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]
) -> int:
    """Bytes of a search: what is accumulated is read and written."""
    return sum(2 * acc.nbytes for acc in accs) + sum(grad.nbytes for grad in grads) + 8 * sum(ks)


def of_add(
    kernel: NativeGroupKernel,
    into: Sequence[Tensor],
    parts: Sequence[SparseVector] | SparseVector,
    alpha: float = 1,
    clears: bool = False,
) -> int:
    """Bytes of what is written: all where memories are cleared, and the elements of the parts."""
    those = [parts] if isinstance(parts, SparseVector) else parts
    elements = sum(part.indices.nbytes + 3 * part.values.nbytes for part in those)
    return elements + (sum(memory.nbytes for memory in into) if clears else 0)


def is_view(func: Any) -> bool:
    """Tell whether an operator's result is another view of what it was given."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def moved(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that an operator reads and writes, each tensor once; no cache is taken into account."""
    name = str(func)
    if name.startswith((COLLECTIVES, *ALLOCATES)):
        return 0
    read = tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
    written = tensors(result) or tensors(args[0])  # of the foreach, some return nothing
    if any(word in name for word in BY_INDEX):
        least = min((tensor.numel() for tensor in read), default=0)
        return sum(tensor.element_size() * min(tensor.numel(), least) for tensor in [*read, *written])
    return sum(tensor.nbytes for tensor in [*(read[1:] if name.startswith(WRITES_ONLY) else read), *written])


def tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
