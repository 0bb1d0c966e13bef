"""How the workers of a run find each other: comm=torch or comm=horovod, on one machine or on several.

Those of one machine meet in a file; those of several at a server of rank 0, which find its addresses in a
note in a folder that all of them see; those that mpirun or torchrun started as these have it.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.distributed import FileStore, TCPStore
from torch.distributed.distributed_c10d import Store

from analysis.records.files import read_json, write_json
from analysis.records.store import Attempt
from experiments.config.config import Config
from experiments.config.machines import Container, EmulatedCluster, VirtualCluster
from experiments.training.stop import Preempted, Stop
from experiments.worker.orders import Orders
from slurm import environment
from slurm.environment import Joined, WorkerPlace
from sparsify.comm import GivenUp, WorkerLost
from sparsify.comm.torch import TorchComm

if TYPE_CHECKING:  # importing it without Horovod is an error
    from sparsify.comm.horovod import HorovodComm

    AnyComm = TorchComm | HorovodComm

PATIENCE = timedelta(minutes=10)  # for the last worker to start; its container may have to be loaded first
# Who starts processes that can meet without our help: the rest needs a folder that all of them see.
MEETS = {"horovodrun": "horovod", "mpirun": "horovod", "torchrun": "torch"}
NOTE = "meet.json"
POLL_S = 0.05
ANSWER = timedelta(seconds=60)  # that the server may take for a request; rank 0 may be loading its data
TRY_S = 3.0  # within which an address that is right accepts a connection
LOOPBACK = "127."


def connect(
    config: Config, orders: Orders, place: WorkerPlace, start_folder: Path, device: torch.device, stop: Stop
) -> AnyComm:
    """The group of workers that our launcher started, which may be told to stop while they wait for it.

    Raises:
        Preempted: this worker was told, or would not wait any longer.
        WorkerLost: another worker did not come.
    """
    try:
        return open_group(
            config, place, start_folder, orders.same_host, orders.interface, device, stop.is_overdue
        )
    except WorkerLost as lost:
        if stop.told or isinstance(lost, GivenUp):
            raise Preempted(Attempt(Path(orders.attempt)).saved_step()) from lost
        raise


def join(config: Config, group: Joined, folder: Path, device: torch.device) -> AnyComm:
    """The communicator of one of several processes that mpirun, horovodrun, torchrun or srun started.

    Args:
        folder: for the processes of srun, which meet there.

    Raises:
        ValueError: the processes can't be this run's workers.
    """
    kind, place, cluster = config.comm, group.place, config.cluster
    if isinstance(cluster, VirtualCluster):
        raise ValueError(
            f"{group.starter} started {place.size} processes, and cluster=virtual runs all workers in one; "
            f"add cluster=local, or leave {group.starter} out"
        )
    if isinstance(cluster, EmulatedCluster):
        raise ValueError(
            f"{group.starter} started {place.size} processes, and cluster=netns starts its workers itself, "
            f"each on its node; leave {group.starter} out"
        )
    if place.size != config.workers:
        raise ValueError(
            f"{group.starter} started {place.size} processes for workers={config.workers}; start as many "
            f"as there are workers, or leave {group.starter} out, and the workers are started for you"
        )
    if isinstance(config.container, Container):
        raise ValueError(
            f"processes that {group.starter} started can't enter container={config.container.name} any "
            f"more; add container=none and let {group.starter} start them inside the image, or leave it out"
        )
    if MEETS.get(group.starter, kind) != kind:
        others = " or ".join(starter for starter, meets in MEETS.items() if meets == kind)
        raise ValueError(
            f"processes that {group.starter} starts can't meet with comm={kind}; take "
            f"comm={MEETS[group.starter]}, or {others}, or start one process, which starts the workers"
        )
    if group.starter == "srun":
        folder.mkdir(parents=True, exist_ok=True)
        interface = getattr(cluster, "interface", None)
        return open_group(config, place, folder, False, interface, device)
    if kind == "torch":
        return TorchComm.start("env://", place.rank, place.size, device)
    from sparsify.comm.horovod import HorovodComm

    return HorovodComm.join(device)


def open_group(
    config: Config,
    place: WorkerPlace,
    folder: Path,
    here: bool,
    interface: str | None,
    device: torch.device,
    give_up: Callable[[], bool] = lambda: False,
) -> AnyComm:
    """The communicator of a worker that our launcher, or srun, started; see `open_store`.

    Raises:
        WorkerLost: somebody did not come.
    """
    rank, size, _ = place
    if interface:
        environment.offer({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
    store, address = open_store(folder, place, here, interface, PATIENCE, give_up)
    if config.comm == "torch":
        return TorchComm.meet(store, rank, size, device, PATIENCE, give_up)
    from sparsify.comm.horovod import HorovodComm

    interface, tell = "lo" if here else interface, environment.set_for_horovod
    node = environment.node()
    return HorovodComm.meet(store, address, rank, size, node, interface, tell, device, PATIENCE, give_up)


def open_store(
    folder: Path,
    place: WorkerPlace,
    here: bool,
    interface: str | None,
    patience: timedelta,
    give_up: Callable[[], bool] = lambda: False,
) -> tuple[Store, str]:
    """The store by which workers speak before they are a group, and an address of rank 0's machine.

    Args:
        folder: shared by the workers, and fresh.
        here: all workers are on this machine.
        interface: of the network to use; None for any that works.
        give_up: asked while waiting; True ends the wait as if the patience were over.

    Raises:
        WorkerLost: rank 0 can't be found.
        ValueError: there is no such interface.
    """
    if here:
        return FileStore(str(folder / "rendezvous"), place.size), "127.0.0.1"
    if place.rank == 0:
        listed = addresses(interface)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=ANSWER)
        write_json(folder / NOTE, {"addresses": listed, "port": store.port, "host": platform.node()})
        return store, listed[0]
    deadline, tried = time.monotonic() + patience.total_seconds(), None
    while True:
        # Listing the folder makes a network file system look again.
        if NOTE in os.listdir(folder) and (tried := read_json(folder / NOTE)):
            for address in tried["addresses"]:
                if answers(address, tried["port"]):
                    return TCPStore(address, tried["port"], is_master=False, timeout=ANSWER), address
        if time.monotonic() > deadline or give_up():
            raise WorkerLost(_in_vain(place, folder, tried))
        time.sleep(POLL_S)


def _in_vain(place: WorkerPlace, folder: Path, note: Mapping[str, Any] | None) -> str:
    who = f"worker {place.rank} of {place.size}, on {platform.node()},"
    if note is None:
        return (
            f"{who} found no {NOTE} of rank 0 in {folder}: rank 0 has not started (its log may say why), or "
            "its node does not share this folder; results must lie where all nodes see them"
        )
    return (
        f"{who} can't reach rank 0 on {note['host']} at {' or '.join(note['addresses'])}, port "
        f"{note['port']}; set cluster.interface to the network that joins the nodes"
    )


def addresses(interface: str | None) -> list[str]:
    """This machine's IPv4 addresses: the interface's first, then its name's, then all others. Loopback leads
    another machine to itself, so it stands there only alone, or if it was asked for.
    """
    by_interface = {
        name: [address.address for address in found if address.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    wanted = by_interface.get(interface, []) if interface else []
    if interface and not wanted:
        known = ", ".join(name for name, found in by_interface.items() if found)
        raise ValueError(
            f"cluster.interface={interface} has no IPv4 address on {platform.node()}; there are: {known}"
        )
    try:
        named = socket.gethostbyname_ex(platform.node())[2]
    except OSError:  # the host's name has no address
        named = []
    others = [*named, *(address for found in by_interface.values() for address in found)]
    reachable = [address for address in others if not address.startswith(LOOPBACK)]
    return list(dict.fromkeys([*wanted, *reachable])) or ["127.0.0.1"]


def answers(address: str, port: int) -> bool:
    """Tell whether anything listens there. Torch's own client would wait long for a machine that is
    silent.
    """
    try:
        socket.create_connection((address, port), timeout=TRY_S).close()
    except OSError:
        return False
    return True
