"""Nodes with GPUs: what nvidia-smi printed on them, a stand-in for their driver, what workers on them see.

The stand-in takes the place of NVIDIA's library (libnvidia-ml.so) below nvidia-ml-py, so that everything in
between is the real thing.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pynvml
import pytest

from experiments.worker.hardware_claims import Worker
from slurm import gpus
from slurm.gpus import bus_id


def printed(name: str) -> str:
    """What a driver printed, shortened, as nvidia_smi/ has it."""
    return Path(__file__).with_name("nvidia_smi").joinpath(f"{name}.txt").read_text()


DGX1 = printed("dgx1")  # eight V100, 2019
SWITCHED = printed("switched")  # by a newer driver: the header underlined, cards numbered, one column more
BRIDGED = printed("bridged")  # pairs of A100, as somebody pasted it: tabs have become blanks
ALONE = printed("alone")
STATUS = printed("status")  # of four GPUs of four machines
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


def nvlink_rates(text: str) -> dict[int, list[float]]:
    """`nvidia-smi nvlink --status`: index -> GB/s of every link of the GPU, 0 for an inactive one."""
    rates: dict[int, list[float]] = {}
    current: list[float] = []
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            rates[int(gpu[1])] = current = []
        elif link := re.match(r"\s*Link \d+: (?:([\d.]+) GB/s|<?inactive>?)", line, re.IGNORECASE):
            current.append(float(link[1] or 0))
    return rates


def _index(word: str) -> int | None:
    return int(word[3:]) if re.fullmatch(r"GPU\d+", word) else None


SILENT = {"nvmlInitWithFlags": None, "nvmlShutdown": None}
TEXTS = {"nvmlDeviceGetName": b"NVIDIA H200", "nvmlSystemGetDriverVersion": b"550.54.15"}
# What a function answers whatever it is asked of: through its last pointer, or into the text before its size.
ANSWERS: dict[str, Any] = {
    **SILENT,
    **TEXTS,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPowerUsage": 121_456,
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
}


class Driver:
    """NVIDIA's library on a node: answers as functions of C do, by a number and through pointers.

    What it lacks, an older driver does not have.

    Args:
        matrix: of `nvidia-smi topo -m`.
        rates: GB/s of each NVLink of each GPU, 0 for an idle one; by default the matrix's, at 25 each.
        is_switched: do the NVLinks lead to switches?
        without: functions that are not there, or say that they are not supported.
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
            for counts in ([gpus.lanes(entry) for entry in row.values()] for row in self.rows.values())
        ]
        self.generation, self.lost = generation, lost

    def __getattr__(self, name: str) -> Callable[..., int]:
        answer = vars(Driver).get(f"_{name}")
        if name in self.without or not (answer or name in ANSWERS):
            raise AttributeError(name)

        def function(*words: Any) -> int:
            try:
                if answer:
                    answer(self, *words)
                elif name in TEXTS:
                    words[-2].value = ANSWERS[name]
                elif name not in SILENT:
                    words[-1]._obj.value = ANSWERS[name]
            except pynvml.NVMLError as error:
                return int(error.value)
            return 0

        return function

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.rows)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        if index.value in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        _point(handle, index.value)

    def _nvmlDeviceGetHandleByPciBusId_v2(self, asked: Any, handle: Any) -> None:
        found = [index for index in self.rows if bus(index).encode() == asked.value]
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        _point(handle, found[0])

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, place: Any) -> None:
        place._obj.domain, place._obj.bus, place._obj.device = 0, 16 + _index_of(handle), 0

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, generation: Any) -> None:
        if self.generation is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        generation._obj.value = self.generation

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: int, is_active: Any) -> None:
        links = self.rates[_index_of(handle)]
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        is_active._obj.value = links[link] > 0

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, answers: Any) -> None:
        for answer in answers._obj:
            is_new = answer.fieldId == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
            if is_new and "GET_SPEED" in self.without:
                answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                continue
            link = answer.scopeId if is_new else OLDER_FIELDS[answer.fieldId]
            answer.value.uiVal = round(1000 * self.rates[_index_of(handle)][link])

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, place: Any) -> None:
        row = self.rows[_index_of(handle)]
        ends = [other for other, entry in row.items() for _ in range(gpus.lanes(entry))]
        other_end = SWITCH if self.is_switched else 16 + ends[link]
        place._obj.domain, place._obj.bus, place._obj.device = 0, other_end, 0

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, kind: Any) -> None:
        switch, gpu = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        kind._obj.value = switch if self.is_switched else gpu

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, level: Any) -> None:
        levels = {entry: level for level, entry in gpus.ANCESTORS.items()}
        level._obj.value = levels.get(self._entry(one, other), pynvml.NVML_TOPOLOGY_SYSTEM)

    def _nvmlDeviceGetP2PStatus(self, one: Any, other: Any, by: Any, status: Any) -> None:
        status._obj.value = 0 if gpus.lanes(self._entry(one, other)) else 5

    def _nvmlDeviceGetClockInfo(self, handle: Any, which: Any, mhz: Any) -> None:
        mhz._obj.value = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[which.value]

    def _entry(self, one: Any, other: Any) -> str:
        return self.rows[_index_of(one)][_index_of(other)]


def drive(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """From now on this is the driver, asked anew by each survey of the test; None: there is none."""
    monkeypatch.setattr(gpus, "survey", cache(gpus.survey.__wrapped__))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "nvmlLib", driver or Driver("", without=["nvmlInitWithFlags"]))


def _point(handle: Any, index: int) -> None:
    """A handle is an address, which means something to the driver alone: here the index, counted from 1."""
    address = ctypes.c_void_p(index + 1)
    ctypes.memmove(handle, ctypes.byref(address), ctypes.sizeof(address))


def _index_of(handle: Any) -> int:
    return (ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


def bus(index: int) -> str:
    return bus_id(0, 16 + index, 0)


def workers(
    matrix: str,
    chosen: tuple[int, ...] = (0, 1, 2, 3),
    *,
    model: str = "NVIDIA A100-SXM4-80GB",
    host: str = "gpu33",
    pcie: float | None = 31.5,
    nvlinks: list[float] | None = None,
    nccl: dict[str, str] | None = None,
) -> list[Worker]:
    """The workers of a node: worker r has the GPU `chosen[r]` of the matrix."""
    rows = topology(matrix)
    return [
        Worker(
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
    """The matrix of a node with the same between all pairs."""
    names = [f"GPU{index}" for index in range(size)]
    rows = ["\t".join([a, *(" X " if a == b else entry for b in names), "0-15"]) for a in names]
    return "\n".join(["\t".join(["", *names, "CPU Affinity"]), *rows])


A100_LINKS = [25.0] * 12
OFF = {"NCCL_P2P_DISABLE": "1"}
APART = [Worker(f"n{rank}", *workers(full("NV12"))[rank][1:]) for rank in range(2)]


def v100s(chosen: tuple[int, ...], host: str = "gpu33", matrix: str = DGX1) -> list[Worker]:
    """Workers on a DGX-1."""
    return workers(matrix, chosen, model="Tesla V100-SXM2-32GB", host=host, pcie=15.8, nvlinks=[25.781] * 6)
