"""What the kernel has counted at a node's end of its cable."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm.emulated.switch import INTERFACE

DEVICES, PROTOCOLS = Path("/proc/net/dev"), Path("/proc/net/snmp")  # of the network namespace of who reads


class Counters(NamedTuple):
    """Counters of one node, since it was made."""

    sent_bytes: int  # with all headers that the interface saw
    resent: int  # segments that TCP sent once more


def read() -> Counters | None:
    """The counters of this process's node; None where it is on none."""
    lines = [line.partition(":") for line in DEVICES.read_text().splitlines()]
    found = {name.strip(): numbers.split() for name, _, numbers in lines}
    if INTERFACE not in found:
        return None
    names, numbers = (line.split() for line in PROTOCOLS.read_text().splitlines() if line.startswith("Tcp:"))
    of_tcp = dict(zip(names, numbers, strict=True))
    return Counters(int(found[INTERFACE][8]), int(of_tcp["RetransSegs"]))
