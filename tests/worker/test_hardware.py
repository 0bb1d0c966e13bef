"""The whole check of a machine, by virtual ranks that play the workers; and what it measures."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from experiments.config.config import Config
from experiments.worker import hardware
from experiments.worker.hardware import (
    NCCL_WITHOUT_PEERS,
    PROBE_BYTES,
    MachineMismatch,
    bus_bandwidth_gb_s,
    nccl_variables,
    verify_machine_and_collect_facts,
)
from experiments.worker.hardware_claims import WorkerHardware
from slurm import environment, gpus
from slurm.environment import WorkerPlace
from sparsify.comm import Comm, gather_json, virtual
from tests.slurm.gpu_nodes import A100_LINKS, ALONE, SWITCHED, Driver, bus, drive, full, v100s, workers
from tests.worker.runs import claiming

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def surveyed(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> dict[str, gpus.NodeGpu]:
    drive(monkeypatch, driver)
    return gpus.gpus_by_bus_id()


def test_pcie_is_made_true_where_there_is_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = surveyed(monkeypatch, Driver(SWITCHED, is_switched=True))
    bare = surveyed(monkeypatch, Driver(SWITCHED.replace("NV18", "PHB")))
    # Under SLURM a task may see no other GPU than its own.
    active = surveyed(monkeypatch, Driver(ALONE, [[25.0] * 18], is_switched=True))
    assert (
        nccl_variables("pcie", linked)
        == nccl_variables("pcie", active)
        == nccl_variables("pcie", {})
        == NCCL_WITHOUT_PEERS
    )
    assert nccl_variables("pcie4", linked) == NCCL_WITHOUT_PEERS
    assert (
        nccl_variables("pcie", bare)
        == nccl_variables("nvlink", linked)
        == nccl_variables("loopback", linked)
        == {}
    )


def test_what_the_user_exported_stays_and_files_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "os.environ", {"NCCL_P2P_DISABLE": "0", "NCCL_TOPO_FILE": "/etc/topo.xml", "HOME": "/"}
    )
    environment.set_default_variables(NCCL_WITHOUT_PEERS)
    told = {"NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "0"}
    assert environment.nccl_settings_with_paths_hidden() == {**told, "NCCL_TOPO_FILE": "a file"}


def test_bandwidth_is_that_of_nccl_tests_and_no_workers_wait_counts() -> None:
    """8 A100 on Azure: 64 MiB in 579.2 us are 202.78 GB/s. Seven workers came early and waited."""
    late = [[579.2e-6] * 5] + [[1.0] * 5] * 7
    assert bus_bandwidth_gb_s(late) == 202.8
    assert PROBE_BYTES == 67108864


def config(on_mismatch: str = "stop", **cluster: Any) -> Config:
    a100 = {"name": "x", "where": "slurm", "gpu": "a100", "link": {"name": "nvlink"}}
    return claiming(on_mismatch, **{**a100, **cluster})


def act(monkeypatch: pytest.MonkeyPatch, seen: list[WorkerHardware], asked: Config) -> list[Any]:
    """Return what `verify_machine_and_collect_facts` gives each rank, where rank r sees `seen[r]`.

    The last rank comes late to every collective.
    """
    turn = itertools.count()
    monkeypatch.setattr(hardware, "describe_worker_gpu_and_links", lambda device: seen[next(turn)])
    monkeypatch.setattr(hardware, "gather_json", lambda comm, mine, device: gather_json(comm, mine, CPU))
    monkeypatch.setattr(hardware, "time_all_reduces", lambda comm, device: [(1 + comm.rank) * 1e-3] * 5)

    def body(comm: virtual.VirtualComm) -> Any:
        try:
            return verify_machine_and_collect_facts(asked, GPU, comm)
        except MachineMismatch as mismatch:
            return f"{mismatch.kind}: {mismatch}"

    return virtual.run(len(seen), body)


FINGERPRINT = {
    "checked": ["gpu", "link"],
    "hosts": ["gpu33"],
    "topology": [["X", "NV12"], ["NV12", "X"]],
    "peer_access": [["X", True], [True, "X"]],
    "nccl": {"NCCL_DEBUG": "INFO"},
    "bus_bandwidth": 67.1,  # 64 MiB in a millisecond
}


def test_the_fingerprint_is_complete_and_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = workers(full("NV12"), (2, 3), nvlinks=A100_LINKS, nccl={"NCCL_DEBUG": "INFO"})
    first, second = act(monkeypatch, seen, config())
    assert first == second
    assert [worker.pop("bus") for worker in first.pop("workers")] == [bus(2), bus(3)]
    assert {name: first[name] for name in FINGERPRINT} == FINGERPRINT
    assert "mismatch" not in first


def test_one_worker_has_no_link_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = act(monkeypatch, workers(full("SYS"), (0,)), config())
    assert only["checked"] == ["gpu"]
    assert only["bus_bandwidth"] is None


def test_ranks_that_see_different_things_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [*workers(full("NV12"), (0,)), *v100s((1,), "gpu04", full("NV12"))]
    first, second = act(monkeypatch, seen, config())
    assert first == second
    assert first.startswith("machine: gpu=a100 was asked for, but gpu04 has Tesla V100")
    assert "; link=nvlink was asked for, but every worker has a node of its own" in first


SILENT = cast(Comm, SimpleNamespace(rank=0, size=2))  # must not be used


def test_on_cpus_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "nvml_session", lambda: pytest.fail("the driver was asked"))
    for where, link in (("local", "loopback"), ("slurm", "ethernet_1g"), ("virtual", "ethernet")):
        asked = config(where=where, gpu="none", link={"name": link})
        hardware.pin_if_emulated_and_set_nccl_defaults(asked, WorkerPlace(0, 2, 0), CPU)
        assert verify_machine_and_collect_facts(asked, CPU, SILENT) == {"checked": []}


def test_on_cpus_no_link_of_gpus_can_be_claimed() -> None:
    with pytest.raises(MachineMismatch, match=r"link=nvlink4 .* device=cpu; choose .* link=loopback"):
        verify_machine_and_collect_facts(
            config(where="local", gpu="none", link={"name": "nvlink4"}), CPU, SILENT
        )
    labelled = verify_machine_and_collect_facts(config("label"), CPU, SILENT)
    assert labelled["checked"] == ["link"]
    assert len(labelled["mismatch"]) == 1


def test_virtual_ranks_claim_a_gpu_but_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardware, "describe_worker_gpu_and_links", lambda device: workers(full("SYS"), (0,))[0]
    )
    assert verify_machine_and_collect_facts(config(where="virtual"), GPU, SILENT)["checked"] == ["gpu"]
    with pytest.raises(MachineMismatch, match="gpu=h200 was asked for, but gpu33 has NVIDIA A100"):
        verify_machine_and_collect_facts(config(where="virtual", gpu="h200"), GPU, SILENT)


def test_devices_are_found_by_their_bus_however_they_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=2,1: CUDA's device 0 is the driver's GPU2."""
    drive(monkeypatch, Driver(SWITCHED, [[25.0] * 18, [25.0] * 18, [14.0] * 18], is_switched=True))

    def properties(device: torch.device | int) -> SimpleNamespace:
        index = device if isinstance(device, int) else device.index
        h200 = {"name": "NVIDIA H200", "total_memory": 2**37, "pci_domain_id": 0, "pci_device_id": 0}
        return SimpleNamespace(**h200, pci_bus_id=18 - index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    seen = hardware.describe_worker_gpu_and_links(GPU)
    assert (seen.bus, seen.nvlinks, seen.peers) == (bus(2), [14.0] * 18, {bus(1): True})
    assert seen.links == {bus(0): "NV18", bus(1): "NV18"}


def test_slices_of_one_gpu_are_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drivers give all slices the UUID of their GPU; CUDA_VISIBLE_DEVICES has names of their own."""
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0, uuid="8932f937")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    identities = set()
    for visible in ("MIG-2f0a", "MIG-77c1", "GPU-8932f937", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        identities.add(hardware.gpu_identity(GPU))
    assert len(identities) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_what_the_driver_says() -> None:
    seen, node = hardware.describe_worker_gpu_and_links(GPU), gpus.gpus_by_bus_id()
    assert node[seen.bus].name == seen.gpu.partition(" MIG ")[0]
    assert seen.driver
