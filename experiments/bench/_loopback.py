"""A loopback interface of the workers' own, whose counter says what they really send."""

from __future__ import annotations

import os

import torch

from slurm.emulated import switch
from slurm.emulated.counters import DEVICES_FILE
from sparsify.comm import Comm

LOOPBACK = "lo"
SENT_BYTES_COLUMN = 8  # of a line of /proc/net/dev


def try_enter_common_loopback(comm: Comm) -> str:
    """Move all workers into one new network namespace, and return why that is impossible; else nothing.

    The namespace has a loopback and nothing else. Only threads that a worker starts afterwards are inside, so
    make new process groups there. The group of `comm` stays outside.
    """
    why = ""
    pid = torch.zeros(1, dtype=torch.int64)
    if comm.rank == 0:
        try:
            switch.enter_new_network_namespace()
            switch.run_ip_or_tc_batch("ip", [f"link set {LOOPBACK} up"])
            pid += os.getpid()
        except (switch.NetworkSetupError, OSError) as error:
            why = (
                f"it needs a network namespace of its own, and this process can make none ({error}); run as "
                "root with iproute2 installed, or within unshare --map-root-user --net"
            )
    comm.all_reduce(pid)
    if comm.rank and pid.item():
        with open(f"/proc/{pid.item()}/ns/net") as namespace:
            switch.enter_network_namespace(namespace.fileno())
    return why


def read_loopback_sent_bytes() -> int:
    """Return the bytes that the loopback of this process's namespace has sent, with all headers."""
    for line in DEVICES_FILE.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(numbers.split()[SENT_BYTES_COLUMN])
    raise OSError(f"{DEVICES_FILE} has no line of {LOOPBACK}")
