"""The GPUs of a node and what joins them, from NVIDIA's driver."""

from __future__ import annotations

import subprocess

import pytest

from slurm import gpus
from slurm.gpus import format_bus_id, is_gpu_model, pcie_gb_s
from tests.conftest import there
from tests.slurm.gpu_nodes import (
    ALONE,
    BRIDGED,
    DGX1,
    SWITCHED,
    Driver,
    bus,
    drive,
    full,
    topology,
)


def links(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    drive(monkeypatch, driver)
    return {bus: gpu.links for bus, gpu in gpus.gpus_by_bus_id().items()}


def test_what_joins_gpus_is_what_nvidia_smi_printed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for matrix in (DGX1, SWITCHED, BRIDGED, ALONE):
        printed = {
            bus(row): {bus(column): entry for column, entry in entries.items()}
            for row, entries in topology(matrix).items()
        }
        assert links(Driver(matrix, is_switched=matrix == SWITCHED), monkeypatch) == printed


def test_a_virtual_machine_that_is_shown_no_switch_knows_of_its_nvlinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = ["DeviceGetNvLinkRemotePciInfo", "DeviceGetNvLinkRemoteDeviceType"]
    for without, entry in ((hidden, "NV18"), ([*hidden, "DeviceGetP2PStatus"], "SYS")):
        found = links(Driver(SWITCHED, is_switched=True, without=without), monkeypatch)
        assert {*found[bus(0)].values()} == {entry}


@pytest.mark.parametrize("without", [(), ("GET_SPEED",)], ids=["new", "old"])
def test_nvlinks_are_counted_active_and_idle(
    without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [[25.781, 25.781, 25.781, 0, 25.781, 0], [], [14.062, 0], []]
    drive(monkeypatch, Driver(full("SYS"), rates, is_switched=True, without=without))
    node = list(gpus.gpus_by_bus_id().values())
    assert [gpu.nvlinks for gpu in node] == [[25.781] * 4, [], [14.062], []]
    assert [gpu.idle_nvlinks for gpu in node] == [2, 0, 1, 0]


def test_what_a_driver_does_not_know_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ["DeviceGetNvLinkState", "DeviceGetTopologyCommonAncestor", "DeviceGetPowerUsage"]
    drive(monkeypatch, Driver(BRIDGED, without=older, generation=None, lost=[3]))
    found = gpus.gpus_by_bus_id()
    first = found[bus(0)]
    assert (first.nvlinks, first.idle_nvlinks, first.pcie, first.links) == (None, 0, None, {})
    assert list(found) == [bus(0), bus(1), bus(2)]  # the fourth has failed
    assert there(gpus.gpu_state(bus(0)))["power.draw"] == "[N/A]"


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, Driver(ALONE, rates=[[]]))
    assert gpus.has_gpu()
    (gpu,) = gpus.gpus_by_bus_id().values()
    assert gpu == (bus(0), "NVIDIA H200", "550.54.15", 31.5, [], 0, {})
    assert gpus.gpu_state(bus(0)) == {
        "driver_version": "550.54.15",
        "clocks.sm": "1980",
        "clocks.mem": "3201",
        "power.draw": "121.46",
        "temperature.gpu": "31",
        "clocks_throttle_reasons.active": "0x0000000000000004",
    }
    assert gpus.gpu_state(bus(1)) is None


def test_a_node_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, None)
    assert gpus.gpus_by_bus_id() == {}
    assert gpus.gpu_state(bus(0)) is None
    assert not gpus.has_gpu()


def test_what_a_slot_can_carry() -> None:
    rates = {(3, 16): 15.8, (5, 16): 63.0, (4, 8): 15.8, (9, 16): None}
    assert {slot: pcie_gb_s(*slot) for slot in rates} == rates
    assert format_bus_id(9, 1, 0) == "00000009:01:00.0"  # as CUDA's and the driver's numbers meet


SXM, SLICE = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
GH200, GTX = "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 3090"
NAMED = [
    ("a100", "NVIDIA A100-SXM4-80GB"), ("a100", "NVIDIA A100-PCIE-40GB"), ("A100", "A100-SXM4-40GB"),
    ("a100_80gb", "NVIDIA A100 80GB PCIe"), ("v100", "Tesla V100-SXM2-32GB"), ("gh200", GH200),
    ("l40s", "NVIDIA L40S"), ("3090", GTX), ("rtx3090", GTX), ("rtx_3090", GTX), ("a100_3g.20gb", SLICE),
    ("rtx_6000_ada", "NVIDIA RTX 6000 Ada Generation"),
]  # fmt: skip
NOT_NAMED = [
    ("a100_80gb", SXM), ("h200", GH200), ("l40", "NVIDIA L40S"), ("a100", SLICE), ("a100_3g.20gb", SXM),
]  # fmt: skip


def test_a_word_names_a_gpu() -> None:
    assert [pair for pair in [*NAMED, *NOT_NAMED] if is_gpu_model(*pair)] == NAMED


@pytest.mark.gpu
@pytest.mark.skipif(not gpus.has_gpu(), reason="needs NVIDIA's driver and a GPU")
def test_a_real_node_is_as_nvidia_smi_prints_it() -> None:
    def printed(*words: str) -> str:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True).stdout

    node = list(gpus.gpus_by_bus_id().values())
    names = [gpu.bus for gpu in node]
    for row, entries in topology(printed("topo", "-m")).items():
        assert node[row].links == {names[column]: entry for column, entry in entries.items()}
    told = printed("--query-gpu=pci.bus_id,name,driver_version", "--format=csv,noheader").splitlines()
    assert [f"{gpu.bus}, {gpu.name}, {gpu.driver}" for gpu in node] == told
