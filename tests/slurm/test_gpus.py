"""The GPUs of a node and what joins them, from NVIDIA's driver."""

from __future__ import annotations

import subprocess

import pytest

from slurm import gpus
from slurm.gpus import bus_id, is_model, pcie_rate
from tests.slurm.gpu_nodes import (
    ALONE,
    BRIDGED,
    DGX1,
    STATUS,
    SWITCHED,
    Driver,
    bus,
    drive,
    nvlink_rates,
    topology,
)


def links(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    drive(monkeypatch, driver)
    return {bus: gpu.links for bus, gpu in gpus.survey().items()}


@pytest.mark.parametrize(
    ("matrix", "is_switched"), [(DGX1, False), (SWITCHED, True), (BRIDGED, False), (ALONE, False)]
)
def test_what_joins_gpus_is_what_nvidia_smi_printed_there(
    matrix: str, is_switched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {
        bus(row): {bus(column): entry for column, entry in entries.items()}
        for row, entries in topology(matrix).items()
    }
    assert links(Driver(matrix, is_switched=is_switched), monkeypatch) == printed


def test_the_printed_matrices_are_read_rightly() -> None:
    rows = topology(DGX1)
    assert rows[0] == {1: "NV1", 2: "NV1", 3: "NV2", 4: "NV2", 5: "SYS", 6: "SYS", 7: "SYS"}
    assert all(sum(map(gpus.lanes, row.values())) == 6 for row in rows.values())  # a V100 has six
    assert topology(SWITCHED) == {a: {b: "NV18" for b in range(3) if b != a} for a in range(3)}
    assert topology(BRIDGED)[2] == {0: "NODE", 1: "NODE", 3: "NV12"}
    assert nvlink_rates(STATUS) == {0: [25.781] * 3 + [0, 25.781, 0], 1: [], 2: [14.062, 0], 3: []}


def test_a_virtual_machine_that_is_shown_no_switch_knows_of_its_nvlinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = ["nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemoteDeviceType"]
    found = links(Driver(SWITCHED, is_switched=True, without=hidden), monkeypatch)
    assert {entry for row in found.values() for entry in row.values()} == {"NV18"}
    silent = Driver(SWITCHED, is_switched=True, without=[*hidden, "nvmlDeviceGetP2PStatus"])
    assert {entry for row in links(silent, monkeypatch).values() for entry in row.values()} == {"SYS"}


@pytest.mark.parametrize("without", [(), ("GET_SPEED",)], ids=["new", "old"])
def test_nvlinks_are_counted_active_and_idle(
    without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    four = "\t".join(["", *(f"GPU{index}" for index in range(4)), "CPU Affinity"])
    rows = ["\t".join([f"GPU{a}", *("X" if a == b else "SYS" for b in range(4)), "0-15"]) for a in range(4)]
    rates = list(nvlink_rates(STATUS).values())
    drive(monkeypatch, Driver("\n".join([four, *rows]), rates, is_switched=True, without=without))
    node = list(gpus.survey().values())
    assert [gpu.nvlinks for gpu in node] == [[25.781] * 4, [], [14.062], []]
    assert [gpu.idle_nvlinks for gpu in node] == [2, 0, 1, 0]


def test_what_a_driver_does_not_know_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor"]
    drive(monkeypatch, Driver(BRIDGED, without=older, generation=None, lost=[3]))
    first = gpus.survey()[bus(0)]
    assert (first.nvlinks, first.idle_nvlinks, first.pcie) == (None, 0, None)
    assert first.links == {}
    assert list(gpus.survey()) == [bus(0), bus(1), bus(2)]  # the fourth has failed


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, Driver(ALONE, rates=[[]]))
    assert gpus.has_gpu()
    (gpu,) = gpus.survey().values()
    assert gpu == (bus(0), "NVIDIA H200", "550.54.15", 31.5, [], 0, {})
    assert gpus.state(bus(0)) == {
        "driver_version": "550.54.15",
        "clocks.sm": "1980",
        "clocks.mem": "3201",
        "power.draw": "121.46",
        "temperature.gpu": "31",
        "clocks_throttle_reasons.active": "0x0000000000000004",
    }
    assert gpus.state(bus(1)) is None


def test_what_is_not_known_of_a_gpus_state_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, Driver(ALONE, without=["nvmlDeviceGetPowerUsage"]))
    assert (gpus.state(bus(0)) or {})["power.draw"] == "[N/A]"


def test_a_node_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, None)
    assert gpus.survey() == {}
    assert gpus.state(bus(0)) is None
    assert not gpus.has_gpu()


def test_bus_ids_of_cuda_and_of_the_driver_meet() -> None:
    assert bus_id(9, 1, 0) == "00000009:01:00.0"


@pytest.mark.parametrize(
    ("generation", "width", "rate"),
    [(3, 16, 15.8), (4, 16, 31.5), (5, 16, 63.0), (4, 8, 15.8), (9, 16, None)],
)
def test_what_a_slot_can_carry(generation: int, width: int, rate: float | None) -> None:
    assert pcie_rate(generation, width) == rate


@pytest.mark.parametrize(
    ("claim", "name", "named"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100", "NVIDIA A100-PCIE-40GB", True),
        ("A100", "A100-SXM4-40GB", True),
        ("a100_80gb", "NVIDIA A100 80GB PCIe", True),
        ("a100_80gb", "NVIDIA A100-SXM4-40GB", False),
        ("v100", "Tesla V100-SXM2-32GB", True),
        ("h200", "NVIDIA H200", True),
        ("h200", "NVIDIA GH200 480GB", False),
        ("gh200", "NVIDIA GH200 480GB", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("l40", "NVIDIA L40S", False),
        ("l40s", "NVIDIA L40S", True),
        ("a6000", "NVIDIA RTX A6000", True),
        ("3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx_3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx_6000_ada", "NVIDIA RTX 6000 Ada Generation", True),
        ("a100", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", False),
        ("a100_3g.20gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", True),
        ("a100_3g.20gb", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_a_word_names_a_gpu(claim: str, name: str, named: bool) -> None:
    assert is_model(claim, name) is named


@pytest.mark.gpu
@pytest.mark.skipif(not gpus.has_gpu(), reason="needs NVIDIA's driver and a GPU")
def test_a_real_node_is_as_nvidia_smi_prints_it() -> None:
    def printed(*words: str) -> str:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True).stdout

    node = list(gpus.survey().values())
    names = [gpu.bus for gpu in node]
    for row, entries in topology(printed("topo", "-m")).items():
        assert node[row].links == {names[column]: entry for column, entry in entries.items()}
    for index, rates in nvlink_rates(printed("nvlink", "--status")).items():
        assert node[index].nvlinks == [rate for rate in rates if rate]
        assert node[index].idle_nvlinks == rates.count(0)
    fields = "pci.bus_id,name,driver_version,pcie.link.gen.max,pcie.link.width.max"
    for gpu, line in zip(
        node, printed(f"--query-gpu={fields}", "--format=csv,noheader").splitlines(), strict=True
    ):
        bus, name, version, generation, width = line.split(", ")
        assert (gpu.bus, gpu.name, gpu.driver) == (bus.upper(), name, version)
        if generation.isdigit() and width.isdigit():
            assert gpu.pcie == pcie_rate(int(generation), int(width))
