"""A node's GPUs and the links between them, as NVIDIA's driver tells them through NVML.

NVML numbers GPUs by their place on the bus and shows those that this process may open (SLURM's cgroups and
containers hide others), whatever CUDA_VISIBLE_DEVICES says. What a driver does not know is None.
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
# What two GPUs have in common on the way to each other, in the words of `nvidia-smi topo -m`.
CONNECTION_BY_ANCESTOR = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two on one board, behind its switch
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
# What stays as it is where a GPU has no NVLink, or fewer.
NO_LINK_ERRORS = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
T = TypeVar("T")


class NodeGpu(NamedTuple):
    """One GPU of this node.

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

    rates: list[float]  # GB/s of each active one in one direction; 0: the driver does not say
    remotes: list[str | None]  # the bus id at the other end of each active one: a GPU's, or a switch's
    idle: int
    are_switched: bool  # do they lead to switches?


@cache  # nothing of it changes during the life of a process
def gpus_by_bus_id() -> dict[str, NodeGpu]:
    """The GPUs that this process may use, by bus id; empty without NVIDIA's driver."""
    with nvml_session() as is_there:
        handles = _handles_by_bus_id() if is_there else {}
        driver_version = try_query(pynvml.nvmlSystemGetDriverVersion) or ""
        nvlinks = {bus: _query_nvlinks(handle) for bus, handle in handles.items()}
        return {
            bus: NodeGpu(
                bus,
                try_query(pynvml.nvmlDeviceGetName, handle) or "",
                driver_version,
                pcie_gb_s(
                    try_query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
                    try_query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
                ),
                own.rates if (own := nvlinks[bus]) else None,
                own.idle if own else 0,
                {
                    other: entry
                    for other in handles
                    if other != bus and (entry := _connection(handles, nvlinks, bus, other))
                },
            )
            for bus, handle in handles.items()
        }


def has_gpu() -> bool:
    """Tell whether NVIDIA's driver lists a GPU. Asked without torch, which takes seconds to import."""
    with nvml_session() as is_there:
        return is_there and bool(try_query(pynvml.nvmlDeviceGetCount))


def gpu_state(bus: str) -> dict[str, str] | None:
    """Clocks, power and temperature of a GPU at this moment, in the words of `nvidia-smi --query-gpu`; None
    where there is none with this bus id.
    """
    with nvml_session() as is_there:
        handle = try_query(pynvml.nvmlDeviceGetHandleByPciBusId, bus) if is_there else None
        if handle is None:
            return None
        power = try_query(pynvml.nvmlDeviceGetPowerUsage, handle)  # mW
        reasons = try_query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        facts = {
            "driver_version": try_query(pynvml.nvmlSystemGetDriverVersion),
            "clocks.sm": try_query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "clocks.mem": try_query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "power.draw": None if power is None else f"{power / 1000:.2f}",
            "temperature.gpu": try_query(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            "clocks_throttle_reasons.active": None if reasons is None else f"0x{reasons:016X}",
        }
        return {name: "[N/A]" if fact is None else str(fact) for name, fact in facts.items()}


@contextmanager
def nvml_session() -> Iterator[bool]:
    """NVML, opened; False where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        try_query(pynvml.nvmlShutdown)


def try_query(ask: Callable[..., T], *words: Any) -> T | None:
    """The driver's answer; None where it does not know."""
    try:
        return ask(*words)
    except pynvml.NVMLError:
        return None


def _handles_by_bus_id() -> dict[str, Any]:
    """NVML's handle of each GPU, by bus id; one that has failed is left out."""
    found = {}
    for index in range(try_query(pynvml.nvmlDeviceGetCount) or 0):
        handle = try_query(pynvml.nvmlDeviceGetHandleByIndex, index)
        place = None if handle is None else try_query(pynvml.nvmlDeviceGetPciInfo, handle)
        if place is not None:
            found[format_bus_id(place.domain, place.bus, place.device)] = handle
    return found


def _query_nvlinks(handle: Any) -> NvLinks | None:
    """The NVLinks of a GPU; None where the driver knows nothing of any."""
    rates, remotes, idle, kinds = list[float](), list[str | None](), 0, list[int | None]()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            is_active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError as error:
            if error.value not in NO_LINK_ERRORS:
                return None
            continue
        if not is_active:
            idle += 1
            continue
        place = try_query(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        rates.append(_nvlink_gb_s(handle, link))
        remotes.append(None if place is None else format_bus_id(place.domain, place.bus, place.device))
        kinds.append(try_query(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))
    return NvLinks(rates, remotes, idle, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH in kinds)


def _nvlink_gb_s(handle: Any, link: int) -> float:
    """GB/s of an NVLink in one direction; 0 where the driver does not say. Older drivers have a field for
    each of the first links, newer ones one field for all.
    """
    fields: list[Any] = [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)]
    if older := getattr(pynvml, f"NVML_FI_DEV_NVLINK_SPEED_MBPS_L{link}", None):
        fields.append(older)
    for answer in try_query(pynvml.nvmlDeviceGetFieldValues, handle, fields) or ():
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.value.uiVal:
            return float(answer.value.uiVal / 1000)
    return 0.0


def _connection(
    handles: dict[str, Any], nvlinks: dict[str, NvLinks | None], one: str, other: str
) -> str | None:
    """The connection of two GPUs, as in the matrix of `nvidia-smi topo -m`: NV12, PIX, SYS ..."""
    if count := _count_nvlinks_between(handles, nvlinks, one, other):
        return f"NV{count}"
    level = try_query(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other])
    return None if level is None else CONNECTION_BY_ANCESTOR.get(level)


def _count_nvlinks_between(
    handles: dict[str, Any], nvlinks: dict[str, NvLinks | None], one: str, other: str
) -> int:
    """Number of NVLinks that lead from one GPU to the other: its own that end there, or all of them where
    switches are between. A virtual machine may be shown no switch: then the driver says whether the two can
    reach each other.
    """
    mine, others = nvlinks[one], nvlinks[other]
    if not mine or not others:
        return 0
    if direct := mine.remotes.count(other):
        return direct
    by_nvlink = (handles[one], handles[other], pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    reaches = try_query(pynvml.nvmlDeviceGetP2PStatus, *by_nvlink) == pynvml.NVML_P2P_STATUS_OK
    is_switched = (mine.are_switched and others.are_switched) or reaches
    return min(len(mine.rates), len(others.rates)) if is_switched else 0


def pcie_gb_s(generation: int | None, width: int | None) -> float | None:
    """GB/s in one direction; None where the driver does not know the slot."""
    return (
        None
        if width is None or generation not in PCIE_LANE_GB_S
        else round(PCIE_LANE_GB_S[generation] * width, 1)
    )


def format_bus_id(domain: int, bus: int, device: int) -> str:
    """A bus id as nvidia-smi writes it, from CUDA's numbers, or NVML's."""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def count_nvlinks(entry: str | None) -> int:
    """The number of NVLinks in an entry of the matrix: 12 for NV12, 0 for PIX."""
    return int(entry[2:]) if entry and re.fullmatch(r"NV\d+", entry) else 0


def is_gpu_model(claim: str, name: str) -> bool:
    """Tell whether a config's word names this GPU.

    a100 and a100_80gb name 'NVIDIA A100 80GB PCIe'; 3090 and rtx_3090 name 'NVIDIA GeForce RTX 3090'; h200
    does not name 'NVIDIA GH200 480GB'. A slice (MIG) needs its own name: a100_3g.20gb.
    """
    asked, words = re.split(r"[\s_-]+", claim.lower()), re.split(r"[\s-]+", name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    is_slice = "mig" in words
    return names.issuperset(asked) and (not is_slice or words[-1] in asked)
