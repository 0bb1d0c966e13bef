"""The first broadcast: rank 0's model on all workers, in few messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsify import comm
from sparsify.comm import CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.comm.virtual import VirtualComm, run
from sparsify.wrappers import checks


def model(value: float) -> nn.Module:
    """Two layers and a normalisation, which counts batches in an integer, all of one value."""
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(value)
    return made


@pytest.mark.parametrize(("at_once", "messages"), [(2**24, 2), (1, 9)])
def test_all_get_rank_0_s_values_in_a_message_for_each_type_or_for_each_tensor_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch, at_once: int, messages: int
) -> None:
    monkeypatch.setattr(comm, "MAX_MESSAGE_ELEMENTS", at_once)

    def body(group: VirtualComm) -> tuple[int, list[float]]:
        counting, own = CountingComm(group), model(7.0 + group.rank)
        checks.broadcast_model(own, counting)
        return counting.collectives, [float(v) for t in own.state_dict().values() for v in t.reshape(-1)]

    for collectives, values in run(3, body):
        assert collectives == messages
        assert {*values} == {7.0}


RARE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.int16)


@pytest.mark.usefixtures("group_of_one")
def test_frozen_parameters_and_buffers_of_any_type_are_broadcast() -> None:
    """gloo itself knows few types."""
    for dtype in (*RARE, torch.bool, torch.complex64, torch.bfloat16, torch.int8):
        own = nn.Module()
        own.frozen = nn.Parameter(torch.ones(3, 2).to(dtype), requires_grad=False)
        own.register_buffer("buffer", torch.ones(()).to(dtype))
        checks.broadcast_model(own, TorchComm())
        for tensor in own.state_dict().values():
            assert tensor.dtype == dtype
            assert (tensor.to(torch.complex64) == 1).all(), dtype
