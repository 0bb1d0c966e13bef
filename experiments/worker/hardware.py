"""Checks of the machine against the config, when the group is up and before anything is measured."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.config.config import Config
from experiments.config.machines import AnyCluster, EmulatedCluster, SlurmCluster, VirtualCluster
from experiments.worker import link_probe
from experiments.worker.cores import (
    WorkerCores,
    all_cpus_unless_restricted,
    describe_core_shortages,
    usable_cpus,
)
from experiments.worker.hardware_claims import (
    LABEL_ADVICE,
    UNCHECKED,
    GroupHardware,
    WorkerHardware,
    connection_between,
    describe_mismatches,
    link_kind,
)
from slurm import environment, gpus
from slurm.environment import WorkerPlace
from sparsify.comm import Comm, gather_json

# 8 A100 reach 203 of their 234 GB/s with it, in 0.6 ms (nccl-tests on Azure's NDv4).
PROBE_BYTES = 64 * 2**20
WARMUPS = 2
REPEATS = 5
# Over PCIe, through the host's memory. NCCL can't refuse NVLink and keep peer-to-peer over PCIe: it maps the
# other GPU's memory, and CUDA takes NVLink where there is one, whatever NCCL_P2P_LEVEL says (NVIDIA/nccl #777
# and #1358, nccl-tests #250). The others keep it from NVSwitch's reductions and from NVLink between nodes.
NCCL_WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
SLICE_S = 1e-4  # the shortest that Linux grants
# Linux, uapi/asm/unistd.h: sched_setattr and sched_getattr, for which the C library has no functions.
SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
GPU_LINKS = ("nvlink", "pcie")
GPU_LINK_ON_CPU = (
    "link={link} was asked for, but it joins GPUs, and device=cpu; choose device=cuda, link=loopback on one "
    f"machine or link=ethernet on several, {LABEL_ADVICE}"
)


class MachineMismatch(ValueError):
    """The machine is not what the config claims, so a record would have a wrong label."""

    kind = "machine"


def nccl_variables(link: str, gpu_by_bus_id: Mapping[str, gpus.NodeGpu]) -> dict[str, str]:
    """Return NCCL's variables that make `link` true on this node: on NVLink, pcie is a downgrade.

    A node without NVLink is left to NCCL, which uses peer-to-peer below one PCIe switch.
    """
    has_nvlink = any(
        gpu.nvlinks or any(map(gpus.count_nvlinks, gpu.links.values())) for gpu in gpu_by_bus_id.values()
    )
    return NCCL_WITHOUT_PEERS if link_kind(link) == "pcie" and (has_nvlink or not gpu_by_bus_id) else {}


def pin_if_emulated_and_set_nccl_defaults(
    config: Config, place: WorkerPlace, device: torch.device, network_facts: Mapping[str, Any] | None = None
) -> None:
    """Pin this worker to its node's cores where links are emulated; on a GPU, set NCCL variables not yet set.

    Call it before the group starts. Under Horovod, NCCL reads the same variables.

    Args:
        network_facts: facts about the emulated network.
    """
    if has_emulated_link(config.cluster):
        per_node = config.workers_per_node
        relay_cpus = (network_facts or {}).get("relay_cpus", ())
        pin_to_node_cores(place.rank // per_node, -(-place.size // per_node), relay_cpus)
    if device.type == "cuda" and not isinstance(config.cluster, VirtualCluster):
        environment.set_default_variables(nccl_variables(config.cluster.link.name, gpus.gpus_by_bus_id()))


def verify_machine_and_collect_facts(
    config: Config, device: torch.device, comm: Comm, network_facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Check the machine against the config, and return facts about it for the record.

    Collective; costs nothing on CPUs and for virtual ranks, but a second where the link is emulated.

    Args:
        network_facts: facts about the emulated network, from who made it.

    Raises:
        MachineMismatch: on all workers alike, unless launch.on_mismatch=label.
    """
    cluster = config.cluster
    gpu = config.cluster.gpu
    link = config.cluster.link.name
    simulated = isinstance(cluster, VirtualCluster)  # the link too; and all ranks share a process
    if simulated or comm.size == 1:
        link = "none"
    facts: dict[str, Any] = {}
    if has_emulated_link(cluster) and comm.size > 1:
        asks_collectives = config.launch.probe == "collectives"
        probed = link_probe.probe_link(comm, cluster.link, config.workers_per_node, asks_collectives)
        facts = {"link": {**probed.to_record(), **describe_time_slice_and_cores(), **(network_facts or {})}}
        wrong = link_probe.describe_bandwidth_mismatch(link, probed, cluster.link.loss > 0)
    elif device.type == "cpu":
        gpu = "none"
        link = link if link_kind(link) in GPU_LINKS else "none"
        wrong = [GPU_LINK_ON_CPU.format(link=link)] if link != "none" else []
    else:
        hardware = describe_worker_gpu_and_links(device)
        workers = (
            [hardware]
            if simulated
            else [WorkerHardware(*fields) for fields in gather_json(comm, hardware, device)]
        )
        seconds = gather_json(comm, time_all_reduces(comm, device), device) if len(workers) > 1 else None
        group = GroupHardware(workers, bus_bandwidth_gb_s(seconds) if seconds else None)
        facts = {**describe_group_hardware(group), "probe_s": seconds}
        wrong = describe_mismatches(gpu, link, group)
    if wrong and config.launch.on_mismatch == "stop":
        raise MachineMismatch("; ".join(wrong))
    checked = [name for name, claim in (("gpu", gpu), ("link", link)) if claim not in UNCHECKED]
    return {"checked": checked, **facts, **({"mismatch": wrong} if wrong else {})}


def report_core_shortages(threads: int, comm: Comm, device: torch.device) -> dict[str, list[str]]:
    """Print which workers have too few cores among them, and return that for the record. Collective."""
    cores_of_workers = gather_json(comm, WorkerCores.from_this_process(threads), device)
    sentences = describe_core_shortages([WorkerCores(*fields) for fields in cores_of_workers])
    if comm.rank == 0:
        for sentence in sentences:
            print(sentence, file=sys.stderr)
    return {"crowded": sentences} if sentences else {}


def has_emulated_link(cluster: AnyCluster) -> bool:
    """Tell whether the link between a cluster's nodes is emulated, as cluster.link says."""
    return isinstance(cluster, EmulatedCluster) or (isinstance(cluster, SlurmCluster) and bool(cluster.enter))


def describe_worker_gpu_and_links(device: torch.device) -> WorkerHardware:
    """Return a worker's GPU, its links to others, and NCCL's settings, as this process sees them."""
    properties = torch.cuda.get_device_properties(device)
    bus_id = gpu_bus_id(device.index)
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    node_gpu = gpus.gpus_by_bus_id().get(bus_id)
    by_driver = {
        name: getattr(node_gpu, name, None) for name in ("driver", "pcie", "nvlinks", "idle_nvlinks")
    }
    return WorkerHardware(
        host=platform.node(),
        gpu=properties.name,
        memory_gib=round(properties.total_memory / 2**30, 1),
        bus=bus_id,
        **by_driver,
        links=node_gpu.links if node_gpu else {},
        peers={gpu_bus_id(index): torch.cuda.can_device_access_peer(device, index) for index in others},
        nccl=environment.nccl_settings_with_paths_hidden(),
    )


def time_all_reduces(comm: Comm, device: torch.device) -> list[float]:
    """Return the seconds that each of REPEATS all-reduces took on this worker's clock. Collective."""
    data = torch.zeros(PROBE_BYTES // 4, device=device)
    seconds = []
    for _ in range(WARMUPS + REPEATS):
        torch.cuda.synchronize(device)
        started_s = time.perf_counter()
        comm.all_reduce(data)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    return seconds[WARMUPS:]


def bus_bandwidth_gb_s(seconds: Sequence[Sequence[float]]) -> float:
    """Return GB/s by nccl-tests' convention: what each worker's link carries, for any number of workers.

    The last worker to enter a collective does not wait: the shortest time of a round is its transfer.
    """
    transfer: float = statistics.median(min(times) for times in zip(*seconds, strict=True))
    return round(2 * (len(seconds) - 1) / len(seconds) * PROBE_BYTES / transfer / 1e9, 1)


def describe_group_hardware(group: GroupHardware) -> dict[str, Any]:
    """Return facts about the workers' hardware for the record; links by rank, between these GPUs only."""
    workers = group.workers
    unlisted_fields = ("links", "peers", "nccl")
    return {
        "hosts": group.hosts,
        "workers": [
            {name: fact for name, fact in worker._asdict().items() if name not in unlisted_fields}
            for worker in workers
        ],
        "topology": [["X" if a is b else connection_between(a, b) for b in workers] for a in workers],
        "peer_access": [["X" if a is b else a.peers.get(b.bus) for b in workers] for a in workers],
        "nccl": workers[0].nccl,
        "bus_bandwidth": group.bus_bandwidth_gb_s,  # GB/s
    }


def gpu_bus_id(index: int) -> str:
    """Return the bus id of a CUDA device, which the driver knows too, whatever renumbers devices."""
    properties: Any = torch.cuda.get_device_properties(index)  # torch's types do not list all that it has
    return gpus.format_bus_id(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)


def gpu_identity(device: torch.device) -> str:
    """Return a GPU's name among all GPUs of all nodes, whatever numbers processes have for it.

    Slices of one GPU (MIG) share its bus, and with some drivers its UUID: their own name tells them apart.
    """
    visible = environment.visible_gpus() or []
    is_slice = len(visible) == 1 and environment.is_gpu_slice(visible[0])
    uuid = visible[0] if is_slice else torch.cuda.get_device_properties(device).uuid
    return f"{gpu_bus_id(device.index)} on {platform.node()} ({uuid})"


# Workers that stand for several machines and share the cores of one: as if each machine had its own.
#
# On a machine of its own, a worker's threads find a free core when a message comes. Here the kernel moves
# them among cores on which other workers compute, and lets those finish their time slices: a message of
# 0.3 ms then takes 3. So the cores are dealt out to the nodes, and slices are short, that a woken thread need
# not wait.


class SchedAttr(ctypes.Structure):
    """struct sched_attr of Linux, uapi/linux/sched/types.h. Times in nanoseconds."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32), ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64), ("period", ctypes.c_uint64),
        ("util_min", ctypes.c_uint32), ("util_max", ctypes.c_uint32),
    )  # fmt: skip


def pin_to_node_cores(node: int, nodes: int, relay_cpus: Sequence[int] = ()) -> None:
    """Let this thread, and those that it starts, run on the cores of one emulated node, in short slices.

    Nothing happens where the system has no such thing, or somebody has dealt out cores already.

    Args:
        relay_cpus: CPUs that no node gets.
    """
    shorten_time_slices()
    cores = sorted(all_cpus_unless_restricted() - {*relay_cpus})
    if cores:
        os.sched_setaffinity(0, cores_of_node(cores, node, nodes))


def cores_of_node(cores: Sequence[int], node: int, nodes: int) -> list[int]:
    """Return the cores of one node: equally many for each node, where there are enough.

    With fewer cores than nodes, return one core, shared by equally many nodes; all cores where that comes out
    uneven.
    """
    count = len(cores)
    if nodes <= count:
        cores_per_node = count // nodes
        return list(cores[node * cores_per_node : (node + 1) * cores_per_node])
    return [cores[node % count]] if nodes % count == 0 else list(cores)


def shorten_time_slices() -> None:
    """Set time slices of SLICE_S for this thread and those that it starts.

    Nothing happens where the kernel has no such setting; see `time_slice_s`.
    """
    scheduling = _read_scheduling()
    if scheduling is not None and scheduling.policy == os.SCHED_OTHER:
        scheduling.runtime = round(1e9 * SLICE_S)  # all else stays, nice too
        ctypes.CDLL(None).syscall(SYSCALLS[platform.machine()][0], 0, ctypes.byref(scheduling), 0)


def time_slice_s() -> float | None:
    """Return the seconds of this thread's slices; None where Linux does not tell.

    That is before 6.12, in a sandbox that forbids to ask, with another scheduling policy than the usual, or
    on another system.
    """
    scheduling = _read_scheduling()
    return (
        scheduling.runtime / 1e9 or None
        if scheduling is not None and scheduling.policy == os.SCHED_OTHER
        else None
    )


def describe_time_slice_and_cores() -> dict[str, Any]:
    """Return facts about time slices and cores, for the record."""
    return {"slice_s": time_slice_s(), "cores_of_a_node": len(usable_cpus()) or None}


def _read_scheduling() -> SchedAttr | None:
    if platform.system() != "Linux" or platform.machine() not in SYSCALLS:
        return None
    scheduling = SchedAttr()
    size = ctypes.sizeof(SchedAttr)
    _, look = SYSCALLS[platform.machine()]
    return None if ctypes.CDLL(None).syscall(look, 0, ctypes.byref(scheduling), size, 0) else scheduling
