"""Is the machine what the config says? Asked when the group is up, before anything is measured."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.worker import link_probe, own_cores
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
from slurm.environment import Place
from sparsify.comm import Comm, gather_json

# 8 A100 reach 203 of their 234 GB/s with it, in 0.6 ms (nccl-tests on Azure's NDv4).
PROBE_BYTES = 64 * 2**20
WARMUPS, REPEATS = 2, 5
# Over PCIe, through the host's memory. NCCL can't refuse NVLink and keep peer-to-peer over PCIe: it maps the
# other GPU's memory, and CUDA takes NVLink where there is one, whatever NCCL_P2P_LEVEL says (NVIDIA/nccl #777
# and #1358, nccl-tests #250). The others keep it from NVSwitch's reductions and from NVLink between nodes.
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
GPU_LINKS = ("nvlink", "pcie")
ON_CPU = (
    "link={link} was asked for, but it joins GPUs, and device=cpu; choose device=cuda, link=loopback on one "
    f"machine or link=ethernet on several, {OTHERWISE}"
)


class MachineMismatch(ValueError):
    """The machine is not what the config claims, so a record would have a wrong label."""

    kind = "machine"


def settings(link: str, node: Mapping[str, gpus.Gpu]) -> dict[str, str]:
    """What NCCL must be told so that `link` is true on this node: on NVLink, pcie is a downgrade.

    A node without NVLink is left to NCCL, which uses peer-to-peer below one PCIe switch.
    """
    has_nvlink = any(gpu.nvlinks or any(map(gpus.lanes, gpu.links.values())) for gpu in node.values())
    return NO_PEERS if kind_of(link) == "pcie" and (has_nvlink or not node) else {}


def prepare(config: Mapping[str, Any], place: Place, device: torch.device) -> None:
    """Make the link true, before the group starts. Under Horovod, NCCL reads the same variables."""
    if is_emulated(config["cluster"]):
        per_node = config["cluster"]["workers_per_node"]
        own_cores.take(place.rank // per_node, -(-place.size // per_node))
    if device.type == "cuda" and config["cluster"]["where"] != "virtual":
        environment.set_for_nccl(settings(config["cluster"]["link"]["name"], gpus.survey()))


def check(
    config: Mapping[str, Any], device: torch.device, comm: Comm, network: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What there is, for the record. Collective; costs nothing on CPUs and for virtual ranks, but a second
    where the link is emulated.

    Args:
        network: facts about the emulated one, from who made it.

    Raises:
        MachineMismatch: on all workers alike, unless launch.on_mismatch=label.
    """
    gpu, link = config["cluster"]["gpu"], config["cluster"]["link"]["name"]
    simulated = config["cluster"]["where"] == "virtual"  # the link too; and all ranks share a process
    if simulated or comm.size == 1:
        link = "none"
    found: dict[str, Any] = {}
    if is_emulated(config["cluster"]) and comm.size > 1:
        cluster = config["cluster"]
        seen = link_probe.probe(comm, cluster["link"], cluster["workers_per_node"])
        found = {"link": {**seen._asdict(), **own_cores.facts(), **(network or {})}}
        wrong = link_probe.mismatches(link, seen)
    elif device.type == "cpu":
        gpu, link = "none", link if kind_of(link) in GPU_LINKS else "none"
        wrong = [ON_CPU.format(link=link)] if link != "none" else []
    else:
        mine = facts(device)
        workers = [mine] if simulated else [Worker(*seen) for seen in gather_json(comm, mine, device)]
        seconds = gather_json(comm, probe(comm, device), device) if len(workers) > 1 else None
        group = WorkerGroup(workers, bus_bandwidth(seconds) if seconds else None)
        found, wrong = {**fingerprint(group), "probe_s": seconds}, mismatches(gpu, link, group)
    if wrong and config.get("launch", {}).get("on_mismatch", "stop") == "stop":
        raise MachineMismatch("; ".join(wrong))
    checked = [name for name, claim in (("gpu", gpu), ("link", link)) if claim not in NO_CLAIM]
    return {"checked": checked, **found, **({"mismatch": wrong} if wrong else {})}


def is_emulated(cluster: Mapping[str, Any]) -> bool:
    """Is the link between its nodes slowed down on purpose, to what cluster.link says?"""
    return cluster["where"] == "netns" or bool(cluster.get("enter"))


def facts(device: torch.device) -> Worker:
    """What this worker sees."""
    own, mine = torch.cuda.get_device_properties(device), bus(device.index)
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    gpu = gpus.survey().get(mine)
    return Worker(
        host=platform.node(),
        gpu=own.name,
        memory_gib=round(own.total_memory / 2**30, 1),
        bus=mine,
        driver=gpu.driver if gpu else None,
        pcie=gpu.pcie if gpu else None,
        nvlinks=gpu.nvlinks if gpu else None,
        idle_nvlinks=gpu.idle_nvlinks if gpu else None,
        links=gpu.links if gpu else {},
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
    return gpus.bus_id(own.pci_domain_id, own.pci_bus_id, own.pci_device_id)
