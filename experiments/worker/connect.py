"""How the workers of a run find each other: comm=torch or comm=horovod, on one machine or on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from analysis.records import Attempt
from experiments.training.stop import Preempted, Stop
from experiments.worker.rendezvous import open_store
from slurm import environment
from slurm.environment import Joined, Place
from sparsify.comm import GivenUp, WorkerLost
from sparsify.comm.torch import TorchComm

if TYPE_CHECKING:  # importing it without Horovod is an error
    from sparsify.comm.horovod import HorovodComm

    AnyComm = TorchComm | HorovodComm

PATIENCE = timedelta(minutes=10)  # for the last worker to start; its container may have to be loaded first
# Who starts processes that can meet without our help: the rest needs a folder that all of them see.
MEETS = {"horovodrun": "horovod", "mpirun": "horovod", "torchrun": "torch"}


def open_group(
    config: Mapping[str, Any],
    place: Place,
    folder: Path,
    orders: Mapping[str, Any],
    device: torch.device,
    give_up: Callable[[], bool] = lambda: False,
) -> AnyComm:
    """The communicator of a worker that our launcher, or srun, started.

    Args:
        folder: shared by the workers, and fresh.
        orders: "meet" is "file" where all workers are on this machine, "tcp" elsewhere; "interface" names the
            network to use, None the one of the host's name.
        give_up: asked while waiting; True ends the wait as if the patience were over.

    Raises:
        WorkerLost: somebody did not come.
    """
    here, (rank, size, _) = orders["meet"] == "file", place
    if interface := orders.get("interface"):
        environment.use_interface(interface)
    store, address = open_store(folder, place, here, interface, PATIENCE, give_up)
    if config.get("comm", "torch") == "torch":
        return TorchComm.meet(store, rank, size, device, PATIENCE, give_up)
    from sparsify.comm.horovod import HorovodComm

    interface, tell = "lo" if here else interface, environment.set_for_horovod
    node = environment.node()
    return HorovodComm.meet(store, address, rank, size, node, interface, tell, device, PATIENCE, give_up)


def join(config: Mapping[str, Any], group: Joined, folder: Path, device: torch.device) -> AnyComm:
    """The communicator of one of several processes that mpirun, horovodrun, torchrun or srun started.

    Args:
        folder: for the processes of srun, which meet there.

    Raises:
        ValueError: the processes can't be this run's workers.
    """
    kind, place = config.get("comm", "torch"), group.place
    if config["cluster"]["where"] == "virtual":
        raise ValueError(
            f"{group.starter} started {place.size} processes, and cluster=virtual runs all workers in one; "
            f"add cluster=local, or leave {group.starter} out"
        )
    if config["cluster"]["where"] == "netns":
        raise ValueError(
            f"{group.starter} started {place.size} processes, and cluster=netns starts its workers itself, "
            f"each on its node; leave {group.starter} out"
        )
    if place.size != config["workers"]:
        raise ValueError(
            f"{group.starter} started {place.size} processes for workers={config['workers']}; start as many "
            f"as there are workers, or leave {group.starter} out, and the workers are started for you"
        )
    if config["container"]["name"] != "none":
        raise ValueError(
            f"processes that {group.starter} started can't enter container={config['container']['name']} any "
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
        orders = {"meet": "tcp", "interface": config["cluster"].get("interface")}
        return open_group(config, place, folder, orders, device)
    if kind == "torch":
        return TorchComm.start("env://", place.rank, place.size, device)
    from sparsify.comm.horovod import HorovodComm

    return HorovodComm.join(device)


def connect(
    config: Mapping[str, Any],
    attempt: Attempt,
    place: Place,
    start_folder: Path,
    orders: Mapping[str, Any],
    device: torch.device,
    stop: Stop,
) -> AnyComm:
    """`open_group`, for workers that may be told to stop while they wait for each other.

    Raises:
        Preempted: this worker was told, or would not wait any longer.
        WorkerLost: another worker did not come.
    """
    try:
        return open_group(config, place, start_folder, orders, device, stop.is_overdue)
    except WorkerLost as lost:
        if stop.told or isinstance(lost, GivenUp):
            raise Preempted(attempt.saved_step()) from lost
        raise
