"""Where the workers of a run meet: in a file, those of one machine; at a server of rank 0, those of several,
which find its addresses in a note in a folder that all of them see.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import FileStore, TCPStore
from torch.distributed.distributed_c10d import Store

from analysis.files import read_json, write_json
from slurm.environment import Place
from sparsify.comm import WorkerLost

NOTE = "meet.json"
POLL_S = 0.05
ANSWER = timedelta(seconds=60)  # that the server may take for a request; rank 0 may be loading its data
TRY_S = 3.0  # within which an address that is right accepts a connection
LOOPBACK = "127."


def open_store(
    folder: Path,
    place: Place,
    here: bool,
    interface: str | None,
    patience: timedelta,
    give_up: Callable[[], bool] = lambda: False,
) -> tuple[Store, str]:
    """What the workers tell each other before they are a group, and an address of rank 0's machine.

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


def _in_vain(place: Place, folder: Path, note: Mapping[str, Any] | None) -> str:
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
    """Does anything listen there? Torch's own client would wait long for a machine that is silent."""
    try:
        socket.create_connection((address, port), timeout=TRY_S).close()
    except OSError:
        return False
    return True
