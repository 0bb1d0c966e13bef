"""What the kernel has counted at a node's end of its cable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slurm.emulated.switch import INTERFACE

DEVICES_FILE, PROTOCOLS_FILE = (
    Path("/proc/net/dev"),
    Path("/proc/net/snmp"),
)  # of the network namespace of who reads

# Headers of a packet over what it carries (Ethernet's, IP's and TCP's, 66 bytes of 1,448), and half as many
# acknowledgements; gloo's words and TCP's acknowledgements of a small message to one other worker.
HEADER_SHARE, SMALL_BYTES = 0.08, 1024
LARGEST_SEGMENT = 2**16


class InterfaceCounters(NamedTuple):
    """Counters of one node, since it was made."""

    sent_bytes: int  # with all headers that the interface saw
    resent: int  # segments that TCP sent once more


def read_counters() -> InterfaceCounters | None:
    """The counters of this process's node; None where it is on none."""
    lines = [line.partition(":") for line in DEVICES_FILE.read_text().splitlines()]
    found = {name.strip(): numbers.split() for name, _, numbers in lines}
    if INTERFACE not in found:
        return None
    names, numbers = (
        line.split() for line in PROTOCOLS_FILE.read_text().splitlines() if line.startswith("Tcp:")
    )
    of_tcp = dict(zip(names, numbers, strict=True))
    return InterfaceCounters(int(found[INTERFACE][8]), int(of_tcp["RetransSegs"]))


def explain_uncounted_bytes(found: Mapping[str, float], size: int) -> str:
    """A sentence where an interface has sent other bytes than were counted, by more than headers and resent
    segments explain; else nothing.

    Args:
        found: sent_bytes, counted_bytes, resent and calls of all workers together.
        size: number of workers.
    """
    sent, counted = found["sent_bytes"], found["counted_bytes"]
    more = HEADER_SHARE * counted + SMALL_BYTES * size * found["calls"] + LARGEST_SEGMENT * found["resent"]
    if counted <= sent <= counted + more:
        return ""
    return (
        f"the interfaces of all nodes sent {sent:,.0f} bytes, and {counted:,.0f} were counted, to which "
        f"headers, acknowledgements and {found['resent']:,.0f} segments that were sent again add "
        f"{more:,.0f} at most; something is sent that nobody counts, or the other way round"
    )
