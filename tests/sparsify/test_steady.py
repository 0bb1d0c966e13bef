"""What a step costs the host and the memory, once a method has settled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import greenlet
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import sparsify
from sparsify import host_sync
from sparsify.aggregator import Aggregator
from sparsify.comm import virtual
from tests.laws import METHODS, build, gradient

SHAPE, SIZE, SETTLED = (100, 200), 3, 12  # one tensor of 20,000 elements, three workers
N = SHAPE[0] * SHAPE[1]
SCALE = 0.005  # small gradients: fixed thresholds then select about as few as the others
# On CUDA these make the host wait, for a number or for the size of their output.
SYNCHRONISING = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "unique_dim_consecutive", "equal", "is_nonzero", "bincount", "item", "isin",
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Counts operations that synchronise, and lists those that allocate n elements or more, while `on`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.on = False
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
                if tensor.numel() >= N and tensor.untyped_storage().data_ptr() not in before:
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
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """`tolist` of a CPU tensor reaches no dispatcher, so it is counted where it is called."""
    original, watch = Tensor.tolist, Watch()

    def tolist(tensor: Tensor) -> Any:
        if watch.on:
            watch.waits.append("tolist")
        return original(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    with watch:
        yield watch


def settle(method: Any, watch: Watch, steps: int, select: str = "torch") -> list[list[int]]:
    """Run the method; watch the last `steps` steps. Each rank's own count of waits in them, by step."""

    def body(comm: virtual.VirtualComm) -> list[int]:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(SHAPE)))], comm, select=select)
        counts = []
        for step in range(SETTLED + steps):
            aggregator.gradients.flat.copy_(SCALE * gradient(comm.rank, step, SHAPE).flatten())
            comm.barrier()
            watch.on = step >= SETTLED
            before = host_sync.num_syncs()
            report = aggregator.aggregate()
            assert host_sync.num_syncs() - before == report.host_syncs
            comm.barrier()
            watch.on = False
            comm.barrier()
            counts.append(report.host_syncs)
        return counts[SETTLED:]

    return virtual.run(SIZE, body)


@pytest.mark.parametrize("name", METHODS)
def test_waits_are_counted_and_a_settled_step_allocates_nothing_of_the_size_of_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as watch:
        plain = settle(build(name, 0.01), watch, 3)
        assert sum(map(sum, plain)) == len(watch.waits), watch.waits
        # Of a fused search the watch sees the memory only, for it knows torch's operators.
        fused = settle(build(name, 0.01), watch, 3, "auto")
    assert fused == plain
    assert watch.allocations == []


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("topk", {}),
        ("topk", {"index": "delta16", "value": "bf16"}),
        ("randomk", {}),
        ("randomk", {"exchange": "allreduce", "shared": True, "feedback": "gradient"}),
        ("blockrandomk", {}),
        ("blockrandomk", {"exchange": "allreduce"}),
        ("gtopk", {}),
        ("stable_topk", {"every": 100, "block": 20}),
    ],
)
def test_these_never_make_the_host_wait(
    name: str, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as watch:
        counts = settle(sparsify.build(name, density=0.01, **choices), watch, 3)
    assert counts == [[0] * 3] * SIZE
    assert watch.waits == []
