"""Meeting of a run's workers: comm=torch or comm=horovod, on one machine or on several.

Those of one machine meet in a file, if it can be locked; else, and those of several, at a server of rank 0,
whose addresses are in a note in a folder that all of them see; those that mpirun or torchrun started as these
have it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore
from torch.distributed.distributed_c10d import Store

from analysis.records import locks
from analysis.records.files import try_read_json_object, write_json
from analysis.records.store import Attempt
from experiments.config.config import Config
from experiments.config.machines import Container, EmulatedCluster, SlurmCluster, VirtualCluster
from experiments.training.stop_signal import Preempted, StopSignal
from experiments.worker import hardware
from experiments.worker.addresses import (
    closed_ports_warning,
    interface_with_address,
    list_addresses_by_preference,
    local_address_towards,
    open_listening_socket,
)
from experiments.worker.orders import RunOrders
from slurm import environment
from slurm.environment import LauncherGroup, WorkerPlace
from sparsify.comm import JoinCancelled, WorkerLost
from sparsify.comm.torch import TorchComm, wait_for_workers

if TYPE_CHECKING:  # importing it without Horovod is an error
    from sparsify.comm.horovod import HorovodComm

    AnyComm = TorchComm | HorovodComm

# For the last worker to start; its container may have to be loaded first.
START_TIMEOUT = timedelta(minutes=10)
# Who starts processes that can meet without our help: the rest needs a folder that all of them see.
COMM_BY_LAUNCHER = {"horovodrun": "horovod", "mpirun": "horovod", "torchrun": "torch"}
ADDRESS_FILE = "meet.json"
POLL_S = 0.05
# That the server may take for a request; rank 0 may be loading its data.
REQUEST_TIMEOUT = timedelta(seconds=60)


def print_to_stderr(line: str) -> None:
    """Print a line to stderr, which is the worker's log."""
    print(line, file=sys.stderr, flush=True)


def join_group_or_preempt(
    config: Config,
    orders: RunOrders,
    place: WorkerPlace,
    start_folder: Path,
    device: torch.device,
    stop: StopSignal,
) -> AnyComm:
    """Join the group of workers that our launcher started; a stop signal ends the wait.

    Raises:
        Preempted: this worker was told to stop, or would not wait any longer.
        WorkerLost: another worker did not come.
    """
    try:
        return join_group_via_folder(
            config, place, start_folder, orders.same_host, orders.interface, device, stop.is_overdue
        )
    except WorkerLost as lost:
        if stop.is_set or isinstance(lost, JoinCancelled):
            raise Preempted(
                Attempt(Path(orders.attempt_folder)).newest_whole_checkpoint_step_or_zero()
            ) from lost
        raise


def join_external_group(
    config: Config,
    group: LauncherGroup,
    folder: Path,
    device: torch.device,
    give_up: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print_to_stderr,
) -> AnyComm:
    """Join the group of the processes that mpirun, horovodrun, torchrun or srun started.

    Args:
        folder: meeting place of the processes of srun.
        give_up: asked while waiting for the others; True ends the wait.
        say: gets a sentence on whom this process waits for.

    Raises:
        ValueError: the processes can't be this run's workers.
        WorkerLost: another process did not come.
    """
    kind = config.comm
    place = group.place
    cluster = config.cluster
    if isinstance(cluster, VirtualCluster):
        raise ValueError(
            f"{group.launcher} started {place.size} processes, and cluster=virtual runs all workers in one; "
            f"add cluster=local, or leave {group.launcher} out"
        )
    if isinstance(cluster, EmulatedCluster):
        raise ValueError(
            f"{group.launcher} started {place.size} processes, and cluster=netns starts its workers itself, "
            f"each on its node; leave {group.launcher} out"
        )
    if place.size != config.workers:
        raise ValueError(
            f"{group.launcher} started {place.size} processes for workers={config.workers}; start as many "
            f"as there are workers, or leave {group.launcher} out, and the workers are started for you"
        )
    if isinstance(config.container, Container):
        raise ValueError(
            f"processes that {group.launcher} started can't enter container={config.container.name} any "
            f"more; add container=none and let {group.launcher} start them inside the image, or leave it out"
        )
    if COMM_BY_LAUNCHER.get(group.launcher, kind) != kind:
        others = " or ".join(starter for starter, meets in COMM_BY_LAUNCHER.items() if meets == kind)
        raise ValueError(
            f"processes that {group.launcher} starts can't meet with comm={kind}; take "
            f"comm={COMM_BY_LAUNCHER[group.launcher]}, or {others}, or start one process, which starts the "
            "workers"
        )
    if group.launcher == "srun":
        folder.mkdir(parents=True, exist_ok=True)
        interface = getattr(cluster, "interface", None)
        return join_group_via_folder(config, place, folder, False, interface, device, give_up, say)
    if kind == "torch":
        store, rank, size = next(dist.rendezvous("env://", place.rank, place.size, timeout=START_TIMEOUT))
        return TorchComm.join_at_store(
            store,
            rank,
            size,
            device,
            START_TIMEOUT,
            announce_arrival_and_wrap_give_up(store, place, give_up, say),
        )
    from sparsify.comm.horovod import HorovodComm

    return HorovodComm.join(device)


def join_group_via_folder(
    config: Config,
    place: WorkerPlace,
    folder: Path,
    same_host: bool,
    interface: str | None,
    device: torch.device,
    give_up: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print_to_stderr,
) -> AnyComm:
    """Join the group of workers that our launcher, or srun, started; see `open_rendezvous_store`.

    Args:
        folder: meeting place, shared by the workers, and fresh.
        say: gets a sentence on whom this worker waits for.

    Raises:
        WorkerLost: somebody did not come.
    """
    rank, size, _ = place
    cluster = config.cluster
    ports = cluster.port_range() if isinstance(cluster, SlurmCluster) else None
    for_rank_0 = with_waiting_message(give_up, lambda: "worker 0", say)
    rendezvous = open_rendezvous_store(folder, place, same_host, interface, START_TIMEOUT, for_rank_0, ports)
    store = rendezvous.store
    give_up = announce_arrival_and_wrap_give_up(store, place, give_up, say)
    if device.type == "cuda" and not same_host:
        check_gpus_differ(store, rank, size, hardware.gpu_identity(device), give_up)
    if not same_host and not interface:
        interface = find_interface_to_others(rendezvous, rank, size, give_up)
        environment.set_default_variables({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    elif interface:
        environment.set_default_variables({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
    if config.comm == "torch":
        try:
            return TorchComm.join_at_store(store, rank, size, device, START_TIMEOUT, give_up)
        except RuntimeError as error:  # gloo has no type for it
            raise WorkerLost(
                "; ".join(
                    filter(None, (_explain_failed_connection(rank, size, error), closed_ports_warning(ports)))
                )
            ) from error
    from sparsify.comm.horovod import HorovodComm

    interface = "lo" if same_host else interface
    tell = environment.set_horovod_variables
    node = environment.node_name()
    return HorovodComm.join_at_store(
        store, rendezvous.rank_0_address, rank, size, node, interface, tell, device, START_TIMEOUT, give_up
    )


def with_waiting_message(
    give_up: Callable[[], bool], name_missing: Callable[[], str], say: Callable[[str], None]
) -> Callable[[], bool]:
    """Return a `give_up` for a wait that begins now, which also says once whom the wait is for."""
    says_at = time.monotonic() + locks.REPORT_AFTER_S
    has_said = False

    def ask() -> bool:
        nonlocal has_said
        if not has_said and time.monotonic() > says_at:
            has_said = True
            missing = name_missing()
            if missing:
                say(f"waiting for {missing} to come; Ctrl-C ends the wait")
        return give_up()

    return ask


def announce_arrival_and_wrap_give_up(
    store: Store, place: WorkerPlace, give_up: Callable[[], bool], say: Callable[[str], None]
) -> Callable[[], bool]:
    """Note in the store that this worker has come; return `give_up`, which names the missing on rank 0."""
    store.set(f"begun/{place.rank}", "")
    if place.rank:
        return give_up

    def name_missing() -> str:
        missing = [str(rank) for rank in range(place.size) if not store.check([f"begun/{rank}"])]
        return f"workers {', '.join(missing)}" if missing else ""

    return with_waiting_message(give_up, name_missing, say)


class RendezvousStore(NamedTuple):
    """A store by which workers communicate before they are a group, and the addresses by which they do."""

    store: Store
    rank_0_address: str
    worker_address: str | None = None  # of this worker, towards rank 0; None on rank 0's own node


def check_gpus_differ(
    store: Store, rank: int, size: int, gpu: str, give_up: Callable[[], bool] = lambda: False
) -> None:
    """Check that all workers compute on different GPUs. Collective: returns when all came.

    Args:
        gpu: identity of this worker's GPU.

    Raises:
        ValueError: some share one; on all workers alike.
        WorkerLost: somebody did not come.
    """
    store.set(f"gpu/{rank}", gpu)
    wait_for_workers(store, rank, size, START_TIMEOUT, give_up)
    gpus = [store.get(f"gpu/{other}").decode() for other in range(size)]
    for shared_gpu in gpus:
        if gpus.count(shared_gpu) > 1:
            ranks = " and ".join(str(other) for other in range(size) if gpus[other] == shared_gpu)
            raise ValueError(
                f"workers {ranks} have the same GPU, {shared_gpu}: SLURM shows them fewer GPUs than workers; "
                "ask for as many (cluster.gres; `plan --sbatch` shows what is asked for), or have one bound "
                "to each, as cluster.srun=['--gpus-per-task=1'] does"
            )


def find_interface_to_others(
    rendezvous: RendezvousStore, rank: int, size: int, give_up: Callable[[], bool] = lambda: False
) -> str | None:
    """Return this node's interface to the others; None where all workers are on one node. Collective.

    Gloo would take the address of the host's name, which is 127.0.1.1 where Debian set it up, or which nobody
    knows. An interface may have another name on each node, but workers have found a way to rank 0: they take
    the interface by which they went, and those of rank 0's node the one by which most came. NCCL chooses
    among interfaces itself, whatever names are, and may use several: it is left its choice.

    Raises:
        WorkerLost: somebody did not come.
    """
    store = rendezvous.store
    store.set(f"came/{rank}", rendezvous.rank_0_address if rendezvous.worker_address else "")
    wait_for_workers(store, rank, size, START_TIMEOUT, give_up)
    routes = [store.get(f"came/{other}").decode() for other in range(size)]
    routes = [route for route in routes if route]
    if not routes:
        return None
    return interface_with_address(rendezvous.worker_address or max(routes, key=routes.count))


def open_rendezvous_store(
    folder: Path,
    place: WorkerPlace,
    same_host: bool,
    interface: str | None,
    timeout: timedelta,
    give_up: Callable[[], bool] = lambda: False,
    ports: range | None = None,
) -> RendezvousStore:
    """Open the store by which workers communicate before they are a group.

    Args:
        folder: shared by the workers, and fresh.
        same_host: all workers are on this machine.
        interface: of the network to use; None for any that works.
        give_up: asked while waiting; True ends the wait as if the time were over.
        ports: open ports between machines; None: all.

    Raises:
        WorkerLost: rank 0 can't be found.
        ValueError: there is no such interface, or no free port.
    """
    if same_host:
        file = folder / "rendezvous"
        if locks.touch_and_probe_lock_support(file):  # which torch locks
            return RendezvousStore(FileStore(str(file), place.size), "127.0.0.1")
        interface = environment.gloo_interface()
    if place.rank == 0:
        addresses = list_addresses_by_preference(interface)
        options: dict[str, Any] = {
            "is_master": True,
            "wait_for_workers": False,
            "timeout": REQUEST_TIMEOUT,
            "port": 0,
        }
        if ports is not None:
            with open_listening_socket(ports) as listener:  # which is then the store's
                options |= {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
        store = TCPStore("localhost", **options)
        machine = {"host": platform.node(), "node": environment.node_name()}
        write_json(folder / ADDRESS_FILE, {"addresses": addresses, "port": store.port, **machine})
        return RendezvousStore(store, addresses[0])
    deadline = time.monotonic() + timeout.total_seconds()
    note: dict[str, Any] = {}
    while True:
        # Listing the folder makes a network file system look again.
        if ADDRESS_FILE in os.listdir(folder):
            note = try_read_json_object(folder / ADDRESS_FILE) or note
        for address in note.get("addresses", ()):
            worker_address = local_address_towards(address, note["port"])
            if worker_address is not None:
                store = TCPStore(address, note["port"], is_master=False, timeout=REQUEST_TIMEOUT)
                is_same_node = note["node"] == environment.node_name()
                return RendezvousStore(store, address, None if is_same_node else worker_address)
        if time.monotonic() > deadline or give_up():
            raise WorkerLost(_explain_missing_rank_0(place, folder, note))
        time.sleep(POLL_S)


def _explain_missing_rank_0(place: WorkerPlace, folder: Path, note: Mapping[str, Any]) -> str:
    worker = f"worker {place.rank} of {place.size}, on {platform.node()},"
    if not note:
        return (
            f"{worker} found no {ADDRESS_FILE} of rank 0 in {folder}: rank 0 has not started (its log may "
            "say why), or its node does not share this folder; results must lie where all nodes see them"
        )
    return (
        f"{worker} can't reach rank 0 on {note['host']} at {' or '.join(note['addresses'])}, port "
        f"{note['port']}; set cluster.interface to the network that joins the nodes"
    )


def _explain_failed_connection(rank: int, size: int, error: RuntimeError) -> str:
    interface = environment.gloo_interface()
    reason = str(error).partition("\n")[0].strip()
    address = f"its network interface {interface}" if interface else "the address of its host's name"
    return (
        f"worker {rank} of {size}, on {platform.node()}, found the others, but can't connect to them by "
        f"{address} ({reason}); set cluster.interface to the network that joins the nodes, or "
        "GLOO_SOCKET_IFNAME in cluster.setup where it has another name on each"
    )
