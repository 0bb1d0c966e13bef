"""Is the machine what the config says? Asked when the group is up, before anything is measured."""

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
from experiments.worker.cores import OwnCores, all_cpus, crowded
from experiments.worker.hardware_claims import (
    NO_CLAIM,
    OTHERWISE,
    Worker,
    WorkerGroup,
    between,
    kind_of,
    mismatches,
)
from slurm import environment, gpus
from slurm.environment import WorkerPlace
from sparsify.comm import Comm, gather_json

# 8 A100 reach 203 of their 234 GB/s with it, in 0.6 ms (nccl-tests on Azure's NDv4).
PROBE_BYTES = 64 * 2**20
WARMUPS, REPEATS = 2, 5
# Over PCIe, through the host's memory. NCCL can't refuse NVLink and keep peer-to-peer over PCIe: it maps the
# other GPU's memory, and CUDA takes NVLink where there is one, whatever NCCL_P2P_LEVEL says (NVIDIA/nccl #777
# and #1358, nccl-tests #250). The others keep it from NVSwitch's reductions and from NVLink between nodes.
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
SLICE_S = 1e-4  # the shortest that Linux grants
# Linux, uapi/asm/unistd.h: sched_setattr and sched_getattr, for which the C library has no functions.
CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
GPU_LINKS = ("nvlink", "pcie")
ON_CPU = (
    "link={link} was asked for, but it joins GPUs, and device=cpu; choose device=cuda, link=loopback on one "
    f"machine or link=ethernet on several, {OTHERWISE}"
)


class MachineMismatch(ValueError):
    """The machine is not what the config claims, so a record would have a wrong label."""

    kind = "machine"


def settings(link: str, node: Mapping[str, gpus.NodeGpu]) -> dict[str, str]:
    """Variables that NCCL must be told so that `link` is true on this node: on NVLink, pcie is a downgrade.

    A node without NVLink is left to NCCL, which uses peer-to-peer below one PCIe switch.
    """
    has_nvlink = any(gpu.nvlinks or any(map(gpus.count_nvlinks, gpu.links.values())) for gpu in node.values())
    return NO_PEERS if kind_of(link) == "pcie" and (has_nvlink or not node) else {}


def prepare(
    config: Config, place: WorkerPlace, device: torch.device, network: Mapping[str, Any] | None = None
) -> None:
    """Make the link true, before the group starts. Under Horovod, NCCL reads the same variables.

    Args:
        network: facts about the emulated one.
    """
    if is_emulated(config.cluster):
        per_node, of_relay = config.workers_per_node, (network or {}).get("relay_cpus", ())
        take_cores(place.rank // per_node, -(-place.size // per_node), of_relay)
    if device.type == "cuda" and not isinstance(config.cluster, VirtualCluster):
        environment.set_default_variables(settings(config.cluster.link.name, gpus.gpus_by_bus_id()))


def check(
    config: Config, device: torch.device, comm: Comm, network: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Facts about the machine, for the record. Collective; costs nothing on CPUs and for virtual ranks, but a
    second where the link is emulated.

    Args:
        network: facts about the emulated one, from who made it.

    Raises:
        MachineMismatch: on all workers alike, unless launch.on_mismatch=label.
    """
    cluster, gpu, link = config.cluster, config.cluster.gpu, config.cluster.link.name
    simulated = isinstance(cluster, VirtualCluster)  # the link too; and all ranks share a process
    if simulated or comm.size == 1:
        link = "none"
    found: dict[str, Any] = {}
    if is_emulated(cluster) and comm.size > 1:
        asked = config.launch.probe == "collectives"
        seen = link_probe.probe(comm, cluster.link, config.workers_per_node, asked)
        found = {"link": {**seen.recorded(), **core_facts(), **(network or {})}}
        wrong = link_probe.mismatches(link, seen, cluster.link.loss > 0)
    elif device.type == "cpu":
        gpu, link = "none", link if kind_of(link) in GPU_LINKS else "none"
        wrong = [ON_CPU.format(link=link)] if link != "none" else []
    else:
        mine = facts(device)
        workers = [mine] if simulated else [Worker(*seen) for seen in gather_json(comm, mine, device)]
        seconds = gather_json(comm, probe(comm, device), device) if len(workers) > 1 else None
        group = WorkerGroup(workers, bus_bandwidth(seconds) if seconds else None)
        found, wrong = {**fingerprint(group), "probe_s": seconds}, mismatches(gpu, link, group)
    if wrong and config.launch.on_mismatch == "stop":
        raise MachineMismatch("; ".join(wrong))
    checked = [name for name, claim in (("gpu", gpu), ("link", link)) if claim not in NO_CLAIM]
    return {"checked": checked, **found, **({"mismatch": wrong} if wrong else {})}


def shared_cores(threads: int, comm: Comm, device: torch.device) -> dict[str, list[str]]:
    """What must be said of workers that share cores, for the record. Collective."""
    everybody = gather_json(comm, OwnCores.of_this_process(threads), device)
    few = crowded([OwnCores(*own) for own in everybody])
    if comm.rank == 0:
        for text in few:
            print(text, file=sys.stderr)
    return {"crowded": few} if few else {}


def is_emulated(cluster: AnyCluster) -> bool:
    """Tell whether the link between its nodes is slowed down on purpose, to what cluster.link says."""
    return isinstance(cluster, EmulatedCluster) or (isinstance(cluster, SlurmCluster) and bool(cluster.enter))


def facts(device: torch.device) -> Worker:
    """The machine as this worker sees it."""
    own, mine = torch.cuda.get_device_properties(device), bus(device.index)
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    told = gpus.gpus_by_bus_id().get(mine)
    by_driver = {name: getattr(told, name, None) for name in ("driver", "pcie", "nvlinks", "idle_nvlinks")}
    return Worker(
        host=platform.node(),
        gpu=own.name,
        memory_gib=round(own.total_memory / 2**30, 1),
        bus=mine,
        **by_driver,
        links=told.links if told else {},
        peers={bus(index): torch.cuda.can_device_access_peer(device, index) for index in others},
        nccl=environment.nccl_settings(),
    )


def probe(comm: Comm, device: torch.device) -> list[float]:
    """Seconds that each of a few all-reduces took on this worker's clock. Collective."""
    data, seconds = torch.zeros(PROBE_BYTES // 4, device=device), []
    for _ in range(WARMUPS + REPEATS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        comm.all_reduce(data)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[WARMUPS:]


def bus_bandwidth(seconds: Sequence[Sequence[float]]) -> float:
    """GB/s by nccl-tests' convention: what each worker's link carries, however many they are.

    The last worker to enter a collective does not wait: the shortest time of a round is its transfer.
    """
    transfer: float = statistics.median(min(times) for times in zip(*seconds, strict=True))
    return round(2 * (len(seconds) - 1) / len(seconds) * PROBE_BYTES / transfer / 1e9, 1)


def fingerprint(group: WorkerGroup) -> dict[str, Any]:
    """The facts as the record keeps them: of links, those between the GPUs that take part, by rank."""
    workers, apart = group.workers, ("links", "peers", "nccl")
    return {
        "hosts": group.hosts,
        "workers": [
            {name: fact for name, fact in worker._asdict().items() if name not in apart} for worker in workers
        ],
        "topology": [["X" if a is b else between(a, b) for b in workers] for a in workers],
        "peer_access": [["X" if a is b else a.peers.get(b.bus) for b in workers] for a in workers],
        "nccl": workers[0].nccl,
        "bus_bandwidth": group.measured,  # GB/s
    }


def bus(index: int) -> str:
    """The name of a CUDA device that the driver knows too, whatever renumbers them."""
    own: Any = torch.cuda.get_device_properties(index)  # torch's types do not list all that it has
    return gpus.format_bus_id(own.pci_domain_id, own.pci_bus_id, own.pci_device_id)


def identity(device: torch.device) -> str:
    """A GPU's name among all GPUs of all nodes, whatever numbers processes have for it. Slices of one (MIG)
    share its bus.
    """
    return f"{bus(device.index)} on {platform.node()} ({torch.cuda.get_device_properties(device).uuid})"


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


def take_cores(node: int, nodes: int, of_relay: Sequence[int] = ()) -> None:
    """Let this thread, and those that it starts, run on the cores of this node only, in short slices.

    Nothing happens where the system has no such thing, or somebody has dealt out cores already.

    Args:
        of_relay: CPUs that no node has.
    """
    shorten()
    if cores := sorted(all_cpus() - {*of_relay}):
        os.sched_setaffinity(0, share_of_cores(cores, node, nodes))


def share_of_cores(cores: Sequence[int], node: int, nodes: int) -> list[int]:
    """The cores of a node: as many for each, where there are enough, else one that it shares with as many
    others as each node does. All cores where that comes out uneven.
    """
    count = len(cores)
    if nodes <= count:
        each = count // nodes
        return list(cores[node * each : (node + 1) * each])
    return [cores[node % count]] if nodes % count == 0 else list(cores)


def shorten(seconds: float = SLICE_S) -> None:
    """Ask for time slices of so many seconds, for this thread and those that it starts. Nothing happens where
    the kernel has none that could be asked for; see `slice_s`.
    """
    had = _asked()
    if had is not None and had.policy == os.SCHED_OTHER:
        had.runtime = round(1e9 * seconds)  # all else stays, nice too
        ctypes.CDLL(None).syscall(CALLS[platform.machine()][0], 0, ctypes.byref(had), 0)


def slice_s() -> float | None:
    """Seconds of this thread's slices; None where Linux does not tell: before 6.12, in a sandbox that forbids
    to ask, with another scheduling policy than the usual, or on another system.
    """
    had = _asked()
    return had.runtime / 1e9 or None if had is not None and had.policy == os.SCHED_OTHER else None


def core_facts() -> dict[str, Any]:
    """Facts for the record."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return {"slice_s": slice_s(), "cores_of_a_node": len(cores) or None}


def _asked() -> SchedAttr | None:
    if platform.system() != "Linux" or platform.machine() not in CALLS:
        return None
    found = SchedAttr()
    size = ctypes.sizeof(SchedAttr)
    _, look = CALLS[platform.machine()]
    return None if ctypes.CDLL(None).syscall(look, 0, ctypes.byref(found), size, 0) else found
