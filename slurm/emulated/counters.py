"""The kernel's counters at a node's end of its cable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slurm.emulated.switch import INTERFACE

DEVICES_FILE = Path("/proc/net/dev")  # of the reader's network namespace
PROTOCOLS_FILE = Path("/proc/net/snmp")

# Headers of a packet over what it carries (Ethernet's, IP's and TCP's, 66 bytes of 1,448), and half as many
# acknowledgements; gloo's words and TCP's acknowledgements of a small message to one other worker.
HEADER_SHARE = 0.08
SMALL_BYTES = 1024
LARGEST_SEGMENT = 2**16


class InterfaceCounters(NamedTuple):
    """Counters of one node, since it was made."""

    sent_bytes: int  # with all headers that the interface saw
    resent_segments: int  # that TCP sent once more


def read_interface_counters() -> InterfaceCounters | None:
    """Return the counters of this process's node; None where it is on none."""
    fields_by_interface = {}
    for line in DEVICES_FILE.read_text().splitlines():
        name, _, numbers = line.partition(":")
        fields_by_interface[name.strip()] = numbers.split()
    if INTERFACE not in fields_by_interface:
        return None
    lines = PROTOCOLS_FILE.read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    tcp_counters = dict(zip(names, values, strict=True))
    return InterfaceCounters(int(fields_by_interface[INTERFACE][8]), int(tcp_counters["RetransSegs"]))


def explain_uncounted_bytes(totals: Mapping[str, float], size: int) -> str:
    """Return a sentence where interfaces have sent other bytes than were counted; else nothing.

    Headers and segments that were sent again may explain some of the difference.

    Args:
        totals: sent_bytes, counted_bytes, resent and calls of all workers together.
        size: number of workers.
    """
    sent = totals["sent_bytes"]
    counted = totals["counted_bytes"]
    resent = totals["resent"]
    explained = HEADER_SHARE * counted + SMALL_BYTES * size * totals["calls"] + LARGEST_SEGMENT * resent
    if counted <= sent <= counted + explained:
        return ""
    return (
        f"the interfaces of all nodes sent {sent:,.0f} bytes, and {counted:,.0f} were counted, to which "
        f"headers, acknowledgements and {resent:,.0f} segments that were sent again add "
        f"{explained:,.0f} at most; something is sent that nobody counts, or the other way round"
    )
