"""Collectives that are sent to everybody at once: the same numbers, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm, CountingComm, virtual
from sparsify.comm.direct import DirectComm
from tests.sparsify.worker_functions import directly, on_processes

SIZES = [1, 2, 3, 5]


def brought(rank: int) -> list[Tensor]:
    """Return tensors of all kinds, of this rank's own."""
    drawn = torch.Generator().manual_seed(rank)
    return [
        torch.zeros(0),
        torch.randn(6, 4, generator=drawn)[:, ::2],  # with gaps
        torch.randint(9, (5,), generator=drawn),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_those_of_the_other_communicator_to_the_bit(size: int) -> None:
    def body(comm: Comm) -> None:
        direct = DirectComm(comm)
        for mine in brought(comm.rank):
            expected = comm.all_reduce(mine.clone())
            again = mine.clone()
            total = direct.all_reduce(again)
            assert total is again  # in place
            assert torch.equal(total, expected)
            assert all(map(torch.equal, direct.all_gather(mine), comm.all_gather(mine)))

    virtual.run(size, body)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_get_the_bits_of_virtual_ranks_also_where_they_sum(size: int, tmp_path: Path) -> None:
    real = on_processes(directly, size, tmp_path)
    simulated = virtual.run(size, lambda comm: directly(comm, comm.now_s))
    for theirs, ours in zip(real, simulated, strict=True):
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("size", SIZES)
def test_as_many_bytes_are_counted_and_a_message_to_each_other_worker(size: int) -> None:
    def body(comm: virtual.VirtualComm) -> tuple[int, int]:
        counting = CountingComm(DirectComm(comm))
        counting.all_reduce(torch.zeros(size * 10))
        counting.all_gather(torch.zeros(size * 10))
        return counting.counts[:2]

    nbytes = 4 * 10 * (size - 1) * (2 + size)
    messages = (size - 1) * (2 if size == 2 else 3)  # two workers sum in one round, more in two
    assert virtual.run(size, body) == [(nbytes, messages)] * size


def test_what_is_larger_than_it_may_be_travels_as_before() -> None:
    links, slow = {"all_gather": cost.Link(1.0, 0.0)}, {"all_gather": cost.Link(100.0, 0.0)}

    def body(comm: virtual.VirtualComm) -> tuple[list[bool], float]:
        comm.links = slow
        direct = DirectComm(comm, {"all_gather": 40}, links)
        counting = CountingComm(direct)
        counting.all_gather(torch.zeros(10))
        counting.all_gather(torch.zeros(11))
        asked = [("all_gather", 40), ("all_gather", 41), ("all_reduce", 1), ("permute", 1)]
        return [direct.is_direct(*each) for each in asked], counting.predicted_s

    # Of three workers: two messages at once, or two rounds of a tree.
    assert virtual.run(3, body) == [([True, False, False, False], 2.0 + 200.0)] * 3


def test_collectives_of_torchcomms_are_not_sent_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual.VirtualComm, "uses_torchcomms", lambda comm: True)
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_USE_TORCHCOMMS=1: unset that variable"):
        virtual.run(2, lambda comm: DirectComm(CountingComm(comm)))
