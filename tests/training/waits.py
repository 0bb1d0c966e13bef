"""Who waits: a watch over operations that would make the host wait for a GPU, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import greenlet
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# On CUDA these make the host wait, for a number or for the size of their output.
SYNCHRONISING = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "unique_dim_consecutive", "equal", "is_nonzero", "bincount", "item", "isin",
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Watch that lists, while `on`, operations of virtual ranks that would synchronise a GPU.

    It also lists those that allocate `large` elements or more.
    """

    def __init__(self, large: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.on, self.large = False, large
        self.waits: list[str] = []
        self.allocations: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        # The scheduler carries out collectives: what it allocates is the network's, not the method's.
        if self.on and greenlet.getcurrent().parent is not None:
            name = op.name().removeprefix("aten::").partition(".")[0]
            if name in SYNCHRONISING or indexes_by_mask(name, args) or repeats_unknown(name, args, kwargs):
                self.waits.append(name)
            before = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
            for tensor in tensors(result):
                if tensor.numel() >= self.large and tensor.untyped_storage().data_ptr() not in before:
                    self.allocations.append(f"{name}: {tuple(tensor.shape)} {tensor.dtype}")
        return result


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from tensors(branch)


def indexes_by_mask(name: str, args: Any) -> bool:
    return name in ("index", "index_put", "index_put_") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def repeats_unknown(name: str, args: Any, kwargs: Any) -> bool:
    return name == "repeat_interleave" and (kwargs or {}).get("output_size") is None


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, large: int) -> Iterator[Watch]:
    """`tolist` of a CPU tensor reaches no dispatcher, so it is counted where it is called."""
    original, watch = Tensor.tolist, Watch(large)

    def tolist(tensor: Tensor) -> Any:
        if watch.on:
            watch.waits.append("tolist")
        return original(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    with watch:
        yield watch
