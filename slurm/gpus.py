"""A node's GPUs and the links between them, as NVIDIA's driver reports them through NVML.

NVML numbers GPUs by their place on the bus and shows those that this process may open (SLURM's cgroups and
containers hide others), whatever CUDA_VISIBLE_DEVICES says. A fact that a driver does not know is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import pynvml

# Generation -> GB/s of one lane in one direction, after line coding: PCI-SIG base specifications 1.1 to 6.0.
PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# The connection of two GPUs in the words of `nvidia-smi topo -m`, by the part of the machine that joins them.
CONNECTION_BY_ANCESTOR = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two on one board, behind its switch
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
# Of a GPU that has no NVLink, or fewer.
NO_LINK_ERRORS = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
T = TypeVar("T")


class NodeGpu(NamedTuple):
    """A GPU of a node.

    Its bus id identifies it: indices change with CUDA_VISIBLE_DEVICES, under SLURM and in containers.
    """

    bus: str  # 00000000:07:00.0
    name: str
    driver: str
    pcie: float | None  # GB/s of its slot in one direction
    # GB/s of each active NVLink in one direction, 0 where the driver does not say; None: it knows of none
    nvlinks: list[float] | None
    idle_nvlinks: int  # normal on some PCIe cards, a fault on others
    links: dict[str, str]  # bus id of another GPU -> the connection: NV12, PIX, PXB, PHB, NODE, SYS


class NvLinks(NamedTuple):
    """The NVLinks of one GPU."""

    rates_gb_s: list[float]  # of each active one in one direction; 0: the driver does not say
    remotes: list[str | None]  # the bus id at the other end of each active one: a GPU's, or a switch's
    num_idle: int
    are_switched: bool  # do they lead to switches?


class _GpuHandle(NamedTuple):
    """NVML's handle of a GPU, and its NVLinks; None where the driver knows of none."""

    bus: str
    handle: Any
    nvlinks: NvLinks | None


@cache  # nothing of it changes during the life of a process
def gpus_by_bus_id() -> dict[str, NodeGpu]:
    """Return the GPUs that this process may use, by bus id; empty without NVIDIA's driver."""
    gpu_by_bus_id = {}
    with nvml_session() as has_driver:
        gpus = _open_gpus() if has_driver else []
        driver = try_query(pynvml.nvmlSystemGetDriverVersion) or ""
        for gpu in gpus:
            connection_by_bus_id = {other.bus: _connection(gpu, other) for other in gpus if other is not gpu}
            gpu_by_bus_id[gpu.bus] = NodeGpu(
                bus=gpu.bus,
                name=try_query(pynvml.nvmlDeviceGetName, gpu.handle) or "",
                driver=driver,
                pcie=pcie_gb_s(
                    try_query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu.handle),
                    try_query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu.handle),
                ),
                nvlinks=gpu.nvlinks.rates_gb_s if gpu.nvlinks else None,
                idle_nvlinks=gpu.nvlinks.num_idle if gpu.nvlinks else 0,
                links={bus: connection for bus, connection in connection_by_bus_id.items() if connection},
            )
    return gpu_by_bus_id


def has_gpu() -> bool:
    """Tell whether NVIDIA's driver lists a GPU, without torch, which takes seconds to import."""
    with nvml_session() as has_driver:
        return has_driver and bool(try_query(pynvml.nvmlDeviceGetCount))


def gpu_state(bus_id: str) -> dict[str, str] | None:
    """Return the clocks, power and temperature of a GPU now, in the words of `nvidia-smi --query-gpu`.

    Returns:
        None where there is no GPU with this bus id.
    """
    with nvml_session() as has_driver:
        handle = try_query(pynvml.nvmlDeviceGetHandleByPciBusId, bus_id) if has_driver else None
        if handle is None:
            return None
        power_mw = try_query(pynvml.nvmlDeviceGetPowerUsage, handle)
        reasons = try_query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        sensor = pynvml.NVML_TEMPERATURE_GPU
        facts = {
            "driver_version": try_query(pynvml.nvmlSystemGetDriverVersion),
            "clocks.sm": try_query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "clocks.mem": try_query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "power.draw": None if power_mw is None else f"{power_mw / 1000:.2f}",
            "temperature.gpu": try_query(pynvml.nvmlDeviceGetTemperature, handle, sensor),
            "clocks_throttle_reasons.active": None if reasons is None else f"0x{reasons:016X}",
        }
        return {name: "[N/A]" if fact is None else str(fact) for name, fact in facts.items()}


@contextmanager
def nvml_session() -> Iterator[bool]:
    """Open NVML inside the block; its value is False where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        try_query(pynvml.nvmlShutdown)


def try_query(query: Callable[..., T], *arguments: Any) -> T | None:
    """Return the driver's answer to a query; None where it does not know."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _open_gpus() -> list[_GpuHandle]:
    """Return each GPU that has not failed."""
    gpus = []
    for index in range(try_query(pynvml.nvmlDeviceGetCount) or 0):
        handle = try_query(pynvml.nvmlDeviceGetHandleByIndex, index)
        pci = None if handle is None else try_query(pynvml.nvmlDeviceGetPciInfo, handle)
        if pci is not None:
            bus = format_bus_id(pci.domain, pci.bus, pci.device)
            gpus.append(_GpuHandle(bus, handle, _query_nvlinks(handle)))
    return gpus


def _query_nvlinks(handle: Any) -> NvLinks | None:
    """Return the NVLinks of a GPU; None where the driver knows nothing of any."""
    rates: list[float] = []
    remotes: list[str | None] = []
    remote_types: list[int | None] = []
    num_idle = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            is_active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError as error:
            if error.value not in NO_LINK_ERRORS:
                return None
            continue
        if not is_active:
            num_idle += 1
            continue
        pci = try_query(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        rates.append(_nvlink_gb_s(handle, link))
        remotes.append(None if pci is None else format_bus_id(pci.domain, pci.bus, pci.device))
        remote_types.append(try_query(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))
    return NvLinks(rates, remotes, num_idle, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH in remote_types)


def _nvlink_gb_s(handle: Any, link: int) -> float:
    """Return the GB/s of an NVLink in one direction; 0 where the driver does not say.

    Older drivers have a field for each of the first links, newer ones one field for all.
    """
    fields: list[Any] = [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)]
    older_field = getattr(pynvml, f"NVML_FI_DEV_NVLINK_SPEED_MBPS_L{link}", None)
    if older_field:
        fields.append(older_field)
    for answer in try_query(pynvml.nvmlDeviceGetFieldValues, handle, fields) or ():
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.value.uiVal:
            return float(answer.value.uiVal / 1000)
    return 0.0


def _connection(gpu: _GpuHandle, other: _GpuHandle) -> str | None:
    """Return the connection of two GPUs, as in the matrix of `nvidia-smi topo -m`: NV12, PIX, SYS ..."""
    num_nvlinks = _count_nvlinks_between(gpu, other)
    if num_nvlinks:
        return f"NV{num_nvlinks}"
    ancestor = try_query(pynvml.nvmlDeviceGetTopologyCommonAncestor, gpu.handle, other.handle)
    return None if ancestor is None else CONNECTION_BY_ANCESTOR.get(ancestor)


def _count_nvlinks_between(gpu: _GpuHandle, other: _GpuHandle) -> int:
    """Return the number of NVLinks that lead from one GPU to the other.

    These are its own that end there, or all of them where switches are between. A virtual machine may be
    shown no switch: then the driver says whether the two can reach each other.
    """
    if not gpu.nvlinks or not other.nvlinks:
        return 0
    num_direct = gpu.nvlinks.remotes.count(other.bus)
    if num_direct:
        return num_direct
    status = try_query(
        pynvml.nvmlDeviceGetP2PStatus, gpu.handle, other.handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    )
    are_switched = gpu.nvlinks.are_switched and other.nvlinks.are_switched
    if are_switched or status == pynvml.NVML_P2P_STATUS_OK:
        return min(len(gpu.nvlinks.rates_gb_s), len(other.nvlinks.rates_gb_s))
    return 0


def pcie_gb_s(generation: int | None, width: int | None) -> float | None:
    """Return the GB/s of a slot in one direction; None where the driver does not know the slot."""
    if width is None or generation not in PCIE_LANE_GB_S:
        return None
    return round(PCIE_LANE_GB_S[generation] * width, 1)


def format_bus_id(domain: int, bus: int, device: int) -> str:
    """Return a bus id as nvidia-smi writes it, from CUDA's numbers, or NVML's."""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def count_nvlinks(connection: str | None) -> int:
    """Return the number of NVLinks of a connection: 12 for NV12, 0 for PIX."""
    return int(connection[2:]) if connection and re.fullmatch(r"NV\d+", connection) else 0


def is_gpu_model(claim: str, gpu_name: str) -> bool:
    """Tell whether a config's word means the GPU of this name.

    a100 and a100_80gb mean 'NVIDIA A100 80GB PCIe'; 3090 and rtx_3090 mean 'NVIDIA GeForce RTX 3090'; h200
    does not mean 'NVIDIA GH200 480GB'. A slice (MIG) needs its own name: a100_3g.20gb.
    """
    claimed = re.split(r"[\s_-]+", claim.lower())
    words = re.split(r"[\s-]+", gpu_name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    is_slice = "mig" in words
    return names.issuperset(claimed) and (not is_slice or words[-1] in claimed)
