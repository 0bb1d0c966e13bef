"""torch.distributed as a communicator: groups, any memory, and what the loss of a worker looks like."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from sparsify.comm import virtual, write_back
from sparsify.comm.torch import TorchComm, is_lost_worker_error
from sparsify.comm.virtual import VirtualComm
from tests.sparsify import worker_functions
from tests.sparsify.worker_functions import on_processes


def test_groups_and_memories_and_errors_on_gloo_processes(tmp_path: Path) -> None:
    real = on_processes(worker_functions.groups_and_errors, 3, tmp_path)
    for group, members in (("all", [0, 1, 2]), ("listed", [0, 1, 2]), ("part", [1, 2])):
        simulated = virtual.run(len(members), lambda comm: worker_functions.any_memory(comm, comm.now_s))
        for rank, expected in zip(members, simulated, strict=True):
            for name, value in expected.items():
                assert torch.equal(real[rank][f"{group} {name}"], value), (group, rank, name)
    for rank in range(3):
        assert not any(real[rank][name].item() for name in real[rank] if name.startswith("lost"))
        assert real[rank]["all heard"].tolist() == [0, 0, 2, 2, 2]
    assert real[0]["outside"].item()


def test_collectives_bring_what_they_say_to_any_memory() -> None:
    """The oracle of the test above: elements, whatever lies between them."""

    def body(comm: VirtualComm) -> dict[str, torch.Tensor]:
        return worker_functions.any_memory(comm, comm.now_s)

    for name, laid_out in worker_functions.MEMORIES.items():
        brought = [laid_out(torch.arange(12.0).view(3, 4) + 100 * rank) for rank in range(3)]
        for found in virtual.run(3, body):
            assert torch.equal(found[f"{name} sum"], brought[0] + brought[1] + brought[2])
            assert torch.equal(found[f"{name} gathered"], torch.stack(brought))
            assert torch.equal(found[f"{name} broadcast"], brought[2])


def test_a_group_of_nccl_is_told_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Mock()
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(TorchComm, "__init__", lambda self: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name, told in {"cpu": None, "cuda": torch.device("cuda:3"), "cuda:1": torch.device("cuda:1")}.items():
        device = torch.device(name)
        TorchComm.join("tcp://nowhere:1", 0, 1, device)
        TorchComm.join_at_store(dist.HashStore(), 0, 1, device, timedelta(seconds=1))
        for call in init.call_args_list[-2:]:
            assert call.kwargs["backend"] == ("nccl" if told else "gloo")
            assert call.kwargs.get("device_id") == told


def test_elements_that_share_a_place_can_not_become_different() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\) shares memory .* \.clone\(\)"):
        write_back(torch.arange(6.0).view(2, 3), torch.zeros(2, 1).expand(2, 3))


# As gloo and nccl word them in torch 2.11 to 2.15.
TRANSPORT = "[/pytorch/third_party/gloo/gloo/transport/tcp"
LOST = [
    RuntimeError(f"{TRANSPORT}/pair.cc:561] Connection closed by peer [127.0.0.1]:44972. This is typically"),
    RuntimeError(f"{TRANSPORT}/pair.cc:545] Read error [127.0.0.1]:35032: Connection reset by peer."),
    RuntimeError(f"{TRANSPORT}/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"),
    RuntimeError("Application timeout caused pair closure"),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistBackendError("NCCL error in: A.cpp:1, remote process exited or there was a network error\n"
                          "ncclRemoteError: A call failed possibly due to a network error"),
    dist.DistBackendError("NCCL error in: A.cpp:1, unhandled system error\n"
                          "ncclSystemError: System call (e.g. socket, malloc) or external library"),
    dist.DistBackendError("WorkNCCL(SeqNum=3, OpType=ALLREDUCE) timed out in blocking wait."),
    dist.DistBackendError("NCCL communicator was aborted on rank 0."),
]  # fmt: skip
WRONG = [
    dist.DistBackendError("NCCL error in: A.cpp:1, invalid usage\nncclInvalidUsage: This usually reflects"),
    dist.DistBackendError("NCCL error in: A.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to"),
    RuntimeError("[enforce fail at /pytorch/third_party/gloo/gloo/alltoallv.cc:138] inLengthPerRank[myRank]"),
    RuntimeError("Invalid scalar type"),
    RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (4), got (3))"),
    RuntimeError("No backend type associated with device type cpu"),
    RuntimeError("CUDA error: out of memory"),
]


def test_only_a_lost_peer_is_a_lost_worker() -> None:
    assert [error for error in LOST if not is_lost_worker_error(error)] == []
    assert [error for error in WRONG if is_lost_worker_error(error)] == []


@pytest.mark.usefixtures("group_of_one")
def test_a_group_knows_whether_torchcomms_carries_out_its_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = TorchComm()
    installed = ["torchcomms"]
    monkeypatch.setattr("sparsify.comm.torch.find_spec", lambda name: name in installed or None)
    assert not comm.uses_torchcomms()
    monkeypatch.setattr(dist, "config", Mock(use_torchcomms=True))
    assert comm.uses_torchcomms()
    installed.clear()
    assert not comm.uses_torchcomms()
