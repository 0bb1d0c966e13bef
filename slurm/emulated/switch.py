"""The process that holds an emulated network: a bridge, and nodes that are joined to it by slow cables.

Started in a network namespace of its own, the switch (`unshare --net`), it makes one more per node, all
without a name: they live as long as this process, and those that entered them; then the kernel removes them,
with all that is in them. Nothing of the machine's own network is touched, and nothing is left behind.

Run as a file, by any Python, with the standard library alone: the development cluster's scripts do so, too.

    switch.py '{"nodes": 4, "alpha_s": 5e-5, "beta_s_per_byte": 8e-9}'
says in a line of JSON what it made (`main`), and ends when its standard input does; with a further word,
`stay`, when it is told to.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000  # linux/sched.h
INTERFACE = "eth0"  # of every node
NETWORK = "10.77"  # /16, known inside only
MOST_NODES = 1000  # a bridge has 1,023 ports (BR_MAX_PORTS)
# A token bucket (tc-tbf) is filled at the rate, and what it holds passes at once. A small one is exact, but
# loses what comes in while a busy processor lets its timer wait; a large one lets the beginning of a message
# pass for nothing. So there are two, one behind the other: one at the rate, and a small one a bit above it.
BURST_S, PEAK, PEAK_BURST_S = 1e-3, 1.1, 2e-4
# TCP hands its packets over in bundles (GSO), each of which must fit into the small bucket.
BUNDLE_S, LEAST_BUNDLE, MOST_BUNDLE = 1e-4, 3_000, 65_000  # bytes
HEADERS = 1.1  # times a bundle: with Ethernet's, IP's and TCP's
QUEUE_S = 0.05  # that a packet may wait at a port before others are dropped: a switch with large buffers
LEAST_QUEUE = 4 * 2**20  # bytes, so that all workers may send to one without loss
# What a connection may have waiting at its own node's port. Where nodes send and receive at once, the
# acknowledgements of what they receive wait behind it, and longer queues make both directions slow. Linux
# takes fair queues (fq_codel) against that, which not every kernel has.
OWN_QUEUE_S = 5e-4
CONGESTION = "reno"


def bandwidth(beta_s_per_byte: float) -> int:
    """Bits per second of a link."""
    return round(8 / beta_s_per_byte)


def bundle(rate: int) -> int:
    """Bytes that travel at once at a rate of so many bits per second."""
    return round(min(max(BUNDLE_S * rate / 8, LEAST_BUNDLE), MOST_BUNDLE))


def bucket(rate: int) -> str:
    """The words of tc for the buckets of this rate, in bits per second."""
    least = HEADERS * bundle(rate)
    burst, peak_burst = (round(max(seconds * rate / 8, least)) for seconds in (BURST_S, PEAK_BURST_S))
    queue = round(max(QUEUE_S * rate / 8, LEAST_QUEUE))
    peak = f"peakrate {round(PEAK * rate)}bit mtu {peak_burst}"
    return f"tbf rate {rate}bit burst {burst} {peak} limit {queue}"


def address(node: int) -> str:
    """Address of a node, counted from 0."""
    return f"{NETWORK}.{(node + 1) // 256}.{(node + 1) % 256}"


class SetUpFailed(Exception):
    """A program said why something can't be made."""


def run(program: str, lines: Iterable[str]) -> None:
    """Let `ip` or `tc` carry out these lines in the namespace that this process is in."""
    done = subprocess.run(
        [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetUpFailed(f"{program}: {' '.join(done.stderr.split())}")


def enter(descriptor: int) -> None:
    """Go into the network namespace of this descriptor."""
    _call("setns", descriptor, CLONE_NEWNET)


def new_namespace() -> int:
    """Go into a new one; returns the descriptor that keeps it."""
    _call("unshare", CLONE_NEWNET)
    return this_namespace()


def this_namespace() -> int:
    """A descriptor of the network namespace that this process is in."""
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise SetUpFailed(f"{name}: {os.strerror(ctypes.get_errno())}")


def prepare_tcp(rate: int) -> str:
    """No IPv6, short queues, and the usual congestion control where there is it; returns the one that there
    is. A pause between two exchanges does not let TCP forget how fast the link is.
    """
    settings = Path("/proc/sys/net")
    asked = {
        "ipv6/conf/all/disable_ipv6": 1,
        "ipv4/tcp_slow_start_after_idle": 0,
        "ipv4/tcp_limit_output_bytes": round(max(OWN_QUEUE_S * rate / 8, 2 * bundle(rate))),
        "ipv4/tcp_congestion_control": CONGESTION,
    }
    for name, value in asked.items():
        with contextlib.suppress(OSError):  # containers may forbid it
            (settings / name).write_text(str(value))
    return (settings / "ipv4/tcp_congestion_control").read_text().strip()


def build(nodes: int, alpha_s: float, beta_s_per_byte: float) -> dict[str, Any]:
    """Make it all; see `main` for what is returned."""
    rate, switch = bandwidth(beta_s_per_byte), this_namespace()
    run("ip", ["link set lo up", "link add switch type bridge", "link set switch up"])
    kept, congestion, delay_s = [], "", alpha_s
    for node in range(nodes):
        kept.append(new_namespace())
        congestion = prepare_tcp(rate)
        pipe = f"/proc/{os.getpid()}/fd/{switch}"
        run("ip", [
            "link set lo up",
            f"link add {INTERFACE} type veth peer name port{node} netns {pipe}",
            f"addr add {address(node)}/16 dev {INTERFACE}",
            f"link set {INTERFACE} gso_max_size {bundle(rate)} up",
        ])  # fmt: skip
        run("tc", [f"qdisc add dev {INTERFACE} root handle 1: {bucket(rate)}"])
        delay_s = delay_s and delay(delay_s)
    enter(switch)
    ports = [f"port{node}" for node in range(nodes)]
    run("ip", [f"link set {port} gso_max_size {bundle(rate)} master switch up" for port in ports])
    run("tc", [f"qdisc add dev {port} root {bucket(rate)}" for port in ports])
    return {"nodes": kept, "delay_s": delay_s, "congestion": congestion}


def delay(seconds: float) -> float:
    """Delay what this node sends; returns by how much: 0 where the kernel has no netem."""
    packets = 10_000  # more than are ever under way
    try:
        run("tc", [f"qdisc add dev {INTERFACE} parent 1:1 netem delay {seconds * 1e6:g}us limit {packets}"])
    except SetUpFailed:
        return 0.0
    return seconds


def main(asked: str, stay: bool = False) -> int:
    """Writes {"pid", "nodes": a descriptor of this process for each, "delay_s", "congestion"}, or {"why"}."""
    try:
        made = {"pid": os.getpid(), **build(**json.loads(asked))}
    except (SetUpFailed, OSError) as error:
        print(json.dumps({"why": str(error)}), flush=True)
        return 2
    print(json.dumps(made), flush=True)
    if stay:
        signal.pause()
    while os.read(0, 1):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] == ["stay"]))
