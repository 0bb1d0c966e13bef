"""Nodes with GPUs: what nvidia-smi printed on them, a stand-in for their driver, what workers on them see."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from experiments.worker.hardware_claims import WorkerHardware
from slurm import gpus
from slurm.gpus import format_bus_id


def printed(name: str) -> str:
    """Return what a driver printed, shortened, as nvidia_smi/ has it."""
    return Path(__file__).with_name("nvidia_smi").joinpath(f"{name}.txt").read_text()


DGX1 = printed("dgx1")  # eight V100, 2019
SWITCHED = printed("switched")  # by a newer driver: the header underlined, cards numbered, one column more
BRIDGED = printed("bridged")  # pairs of A100, as somebody pasted it: tabs have become blanks
ALONE = printed("alone")
UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
SWITCH = 0xC0  # the bus of a switch
# The fields in which drivers told an NVLink's speed before there was one field for all links.
OLDER_FIELDS = {getattr(pynvml, f"NVML_FI_DEV_NVLINK_SPEED_MBPS_L{link}"): link for link in range(12)}


def topology(text: str) -> dict[int, dict[int, str]]:
    """`nvidia-smi topo -m`: the connection between every two GPUs, by their indices, without network cards.

    Columns are separated by tabs, or by blanks in pasted output; only affinities, on the right, may be empty.
    """
    lines = [line.split() for line in UNDERLINE.sub("", text).splitlines() if line.strip()]
    if not lines or lines[0][0] != "GPU0":
        return {}
    columns = [_index(word) for word in takewhile(lambda word: word != "CPU", lines[0])]
    return {
        row: {
            column: entry
            for column, entry in zip(columns, words[1:], strict=False)
            if column not in (None, row)
        }
        for words in lines[1:]
        if (row := _index(words[0])) is not None
    }


def _index(word: str) -> int | None:
    return int(word[3:]) if re.fullmatch(r"GPU\d+", word) else None


class Driver:
    """NVIDIA's driver on a node, as nvidia-ml-py's functions ask it. A GPU's handle is its index.

    Args:
        matrix: of `nvidia-smi topo -m`.
        rates: GB/s of each NVLink of each GPU, 0 for an idle one; by default the matrix's, at 25 each.
        is_switched: do the NVLinks lead to switches?
        without: functions that are not there, as in an older driver.
        generation: of the slots; None: it is not known.
        lost: GPUs that have failed.
    """

    def __init__(
        self,
        matrix: str,
        rates: Sequence[Sequence[float]] | None = None,
        is_switched: bool = False,
        without: Sequence[str] = (),
        generation: int | None = 4,
        lost: Sequence[int] = (),
    ) -> None:
        self.rows, self.is_switched, self.without = topology(matrix), is_switched, without
        self.rates = rates or [
            [25.0] * (max(counts, default=0) if is_switched else sum(counts))
            for counts in (
                [gpus.count_nvlinks(entry) for entry in row.values()] for row in self.rows.values()
            )
        ]
        self.generation, self.lost = generation, lost

    def answers(self) -> dict[str, Callable[..., Any]]:
        """By the name of nvidia-ml-py's function."""
        switch, gpu = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        levels = {entry: level for level, entry in gpus.CONNECTION_BY_ANCESTOR.items()}
        known: dict[str, Callable[..., Any]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "SystemGetDriverVersion": lambda: "550.54.15",
            "DeviceGetCount": lambda: len(self.rows),
            "DeviceGetHandleByIndex": self._handle,
            "DeviceGetHandleByPciBusId": self._handle_on_bus,
            "DeviceGetPciInfo": lambda index: place(16 + index),
            "DeviceGetName": lambda _: "NVIDIA H200",
            "DeviceGetMaxPcieLinkGeneration": lambda _: self.generation or refuse("NOT_SUPPORTED"),
            "DeviceGetMaxPcieLinkWidth": lambda _: 16,
            "DeviceGetNvLinkState": self._is_active,
            "DeviceGetFieldValues": lambda index, fields: [self._speed(index, field) for field in fields],
            "DeviceGetNvLinkRemotePciInfo": self._remote,
            "DeviceGetNvLinkRemoteDeviceType": lambda *_: switch if self.is_switched else gpu,
            "DeviceGetTopologyCommonAncestor": lambda one, other: levels.get(
                self.rows[one][other], pynvml.NVML_TOPOLOGY_SYSTEM
            ),
            "DeviceGetP2PStatus": lambda one, other, _: 0 if gpus.count_nvlinks(self.rows[one][other]) else 5,
            "DeviceGetClockInfo": lambda _, which: 1980 if which == pynvml.NVML_CLOCK_SM else 3201,
            "DeviceGetPowerUsage": lambda _: 121_456,
            "DeviceGetTemperature": lambda *_: 31,
            "DeviceGetCurrentClocksThrottleReasons": lambda _: 4,
        }
        for name in known.keys() & {*self.without}:
            known[name] = lambda *_: refuse("FUNCTION_NOT_FOUND")
        return {f"nvml{name}": function for name, function in known.items()}

    def _handle(self, index: int) -> int:
        return refuse("GPU_IS_LOST") if index in self.lost else index

    def _handle_on_bus(self, asked: str) -> int:
        found = [index for index in self.rows if bus(index) == asked]
        return found[0] if found else refuse("NOT_FOUND")

    def _is_active(self, index: int, link: int) -> bool:
        links = self.rates[index]
        return links[link] > 0 if link < len(links) else refuse("INVALID_ARGUMENT")

    def _speed(self, index: int, field: Any) -> SimpleNamespace:
        """Answer to a field of all links, with the link's number, or to an older one of a link."""
        is_new = isinstance(field, tuple)
        if is_new and "GET_SPEED" in self.without:
            return SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
        rate = self.rates[index][field[1] if is_new else OLDER_FIELDS[field]]
        return SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=round(1000 * rate)))

    def _remote(self, index: int, link: int) -> SimpleNamespace:
        ends = [other for other, entry in self.rows[index].items() for _ in range(gpus.count_nvlinks(entry))]
        return place(SWITCH if self.is_switched else 16 + ends[link])


def place(number: int) -> SimpleNamespace:
    return SimpleNamespace(domain=0, bus=number, device=0)


def refuse(why: str) -> Any:
    raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{why}"))


def drive(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """From now on this is the driver, asked anew by each survey of the test; None: there is none."""
    monkeypatch.setattr(gpus, "gpus_by_bus_id", cache(gpus.gpus_by_bus_id.__wrapped__))
    for name, function in (driver or Driver("", without=["Init"])).answers().items():
        monkeypatch.setattr(pynvml, name, function)


def bus(index: int) -> str:
    return format_bus_id(0, 16 + index, 0)


def workers(
    matrix: str,
    chosen: tuple[int, ...] = (0, 1, 2, 3),
    *,
    model: str = "NVIDIA A100-SXM4-80GB",
    host: str = "gpu33",
    pcie: float | None = 31.5,
    nvlinks: list[float] | None = None,
    nccl: dict[str, str] | None = None,
) -> list[WorkerHardware]:
    """Return the workers of a node: worker r has the GPU `chosen[r]` of the matrix."""
    rows = topology(matrix)
    return [
        WorkerHardware(
            host=host,
            gpu=model,
            memory_gib=79.3,
            bus=bus(index),
            driver="535",
            pcie=pcie,
            nvlinks=nvlinks,
            idle_nvlinks=0,
            links={bus(other): entry for other, entry in rows.get(index, {}).items()},
            peers={bus(other): True for other in rows.get(index, {})},
            nccl=nccl or {},
        )
        for index in chosen
    ]


def full(entry: str, size: int = 4) -> str:
    """Return the matrix of a node with the same entry between all pairs."""
    names = [f"GPU{index}" for index in range(size)]
    rows = ["\t".join([a, *(" X " if a == b else entry for b in names), "0-15"]) for a in names]
    return "\n".join(["\t".join(["", *names, "CPU Affinity"]), *rows])


A100_LINKS = [25.0] * 12
OFF = {"NCCL_P2P_DISABLE": "1"}
APART = [WorkerHardware(f"n{rank}", *workers(full("NV12"))[rank][1:]) for rank in range(2)]


def v100s(chosen: tuple[int, ...], host: str = "gpu33", matrix: str = DGX1) -> list[WorkerHardware]:
    """Return workers on a DGX-1."""
    return workers(matrix, chosen, model="Tesla V100-SXM2-32GB", host=host, pcie=15.8, nvlinks=[25.781] * 6)
