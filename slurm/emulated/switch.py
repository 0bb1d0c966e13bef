"""The process that holds an emulated network: nodes, and what their slow cables end in, a bridge or a relay.

Started in a network namespace of its own, the switch (`unshare --net`), it makes one more per node, all
without a name: they live as long as this process, and those that entered them; then the kernel removes them,
with all that is in them. Nothing of the machine's own network is touched, and nothing is left behind.

A cable to the bridge is slow by the kernel's token buckets, and long where the kernel has netem. Where it has
not, long cables are TUN devices whose other ends the relay has: relay.cpp, the program that this process goes
on as.

Run as a file, by any Python, with the standard library alone: the development cluster's scripts do so, too.

    switch.py '{"nodes": 4, "alpha_s": 5e-5, "beta_s_per_byte": 8e-9}'
says in a line of JSON what it made (`main`), and ends when its standard input does; with a further word,
`stay`, when it is told to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
TUN, TUNSETIFF, TUN_WITHOUT_HEADER = "/dev/net/tun", 0x400454CA, 0x1001  # linux/if_tun.h
# Over a long link a bundle takes a small share of the delay: fewer are cheaper for the relay. TCP begins with
# as many bytes as over Ethernet, ten packets (RFC 6928).
BUNDLE_SHARE, FIRST_BYTES = 1 / 40, 14_600
# What TCP may have under way, in round trips at the full rate: one fills the link, the system counts what a
# packet takes in memory as well, and the window opens past what fits.
WINDOWS, LEAST_WINDOW = 4, 2**18
# A queue of a long link holds what comes in two round trips: a connection that lost something is still as
# fast as the link.
QUEUE_WAYS = 4


def bandwidth_bit_s(beta_s_per_byte: float) -> int:
    """Bits per second of a link."""
    return round(8 / beta_s_per_byte)


def bundle_bytes(rate: int) -> int:
    """Bytes that travel at once at a rate of so many bits per second."""
    return round(min(max(BUNDLE_S * rate / 8, LEAST_BUNDLE), MOST_BUNDLE))


def long_bundle_bytes(rate: int, delay_s: float) -> int:
    """The same over a long link, with its headers."""
    return round(min(max(BUNDLE_SHARE * delay_s * rate / 8, bundle_bytes(rate)), MOST_BUNDLE))


def tcp_window_bytes(rate: int, delay_s: float) -> int:
    """Bytes that TCP may have under way over a link, so that it is the link that limits it."""
    return round(max(WINDOWS * 2 * delay_s * rate / 8, LEAST_WINDOW))


def token_bucket_options(rate: int) -> str:
    """The words of tc for the buckets of this rate, in bits per second."""
    least = HEADERS * bundle_bytes(rate)
    burst, peak_burst = (round(max(seconds * rate / 8, least)) for seconds in (BURST_S, PEAK_BURST_S))
    queue = round(max(QUEUE_S * rate / 8, LEAST_QUEUE))
    peak = f"peakrate {round(PEAK * rate)}bit mtu {peak_burst}"
    return f"tbf rate {rate}bit burst {burst} {peak} limit {queue}"


def node_address(node: int) -> str:
    """Address of a node, counted from 0."""
    return f"{NETWORK}.{(node + 1) // 256}.{(node + 1) % 256}"


class LinkRequest(NamedTuple):
    """What was asked for: `conf/link`, and the relay."""

    alpha_s: float  # of a packet's way
    beta_s_per_byte: float  # of what a node sends
    down_s_per_byte: float = 0.0  # of what it receives; 0: as much
    jitter_s: float = 0.0  # that a packet takes longer at most
    loss: float = 0.0  # share of packets
    windows: str = "raised"  # TCP's; else the system's
    relay: str = ""  # the program; without it, the kernel makes cables slow


class SetUpError(Exception):
    """A program said why something can't be made."""


def run_batch(program: str, lines: Iterable[str]) -> None:
    """Let `ip` or `tc` carry out these lines in the namespace that this process is in."""
    done = subprocess.run(
        [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetUpError(f"{program}: {' '.join(done.stderr.split())}")


def enter_namespace(descriptor: int) -> None:
    """Go into the network namespace of this descriptor."""
    _call_libc("setns", descriptor, CLONE_NEWNET)


def enter_new_namespace() -> int:
    """Go into a new one; returns the descriptor that keeps it."""
    _call_libc("unshare", CLONE_NEWNET)
    return open_current_namespace()


def open_current_namespace() -> int:
    """A descriptor of the network namespace that this process is in."""
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _call_libc(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise SetUpError(f"{name}: {os.strerror(ctypes.get_errno())}")


def configure_tcp(rate: int, delay_s: float = 0.0, raised: bool = True) -> dict[str, Any]:
    """No IPv6, short queues, the usual congestion control where there is it, and, if `raised`, windows for
    the delay, which a pause between two exchanges does not close; returns what there is.
    """
    settings = Path("/proc/sys/net")
    windows = [settings / f"ipv4/tcp_{kind}mem" for kind in "rw"]
    for path in windows if raised else ():
        least, usual, most = path.read_text().split()
        with contextlib.suppress(OSError):  # as below
            path.write_text(f"{least} {usual} {max(int(most), tcp_window_bytes(rate, delay_s))}")
    asked = {
        "ipv6/conf/all/disable_ipv6": 1,
        **({"ipv4/tcp_slow_start_after_idle": 0} if raised else {}),
        "ipv4/tcp_limit_output_bytes": round(max(OWN_QUEUE_S * rate / 8, 2 * bundle_bytes(rate))),
        "ipv4/tcp_congestion_control": CONGESTION,
    }
    for name, value in asked.items():
        with contextlib.suppress(OSError):  # containers may forbid it
            (settings / name).write_text(str(value))
    congestion = (settings / "ipv4/tcp_congestion_control").read_text().strip()
    return {
        "congestion": congestion, "window_bytes": min(int(path.read_text().split()[-1]) for path in windows)
    }  # fmt: skip


def make_relayed_nodes(nodes: int, asked: LinkRequest) -> tuple[dict[str, Any], list[str]]:
    """Nodes with long cables; and the words of the relay that has the other ends."""
    slow, fast = sorted(map(bandwidth_bit_s, (asked.beta_s_per_byte, asked.down_s_per_byte)))
    kept, devices, tcp, size = [], [], {}, long_bundle_bytes(slow, asked.alpha_s)
    for node in range(nodes):
        kept.append(enter_new_namespace())
        devices.append(open_tun_device(INTERFACE))
        tcp = configure_tcp(fast, asked.alpha_s, asked.windows == "raised")
        run_batch("ip", [
            "link set lo up",
            f"addr add {node_address(node)}/16 dev {INTERFACE}",
            f"link set {INTERFACE} mtu {size} txqueuelen 10000 up",
            f"route change {NETWORK}.0.0/16 dev {INTERFACE} initcwnd {max(1, round(FIRST_BYTES / size))}",
        ])  # fmt: skip
    statistics = os.memfd_create("statistics")  # a file that goes with its last reader
    for descriptor in (statistics, *kept, *devices):
        os.set_inheritable(descriptor, True)
    queue_s = max(QUEUE_S, QUEUE_WAYS * asked.alpha_s)
    numbers = (
        asked.alpha_s, asked.jitter_s, asked.loss, asked.beta_s_per_byte, asked.down_s_per_byte, queue_s, 0
    )  # fmt: skip
    words = [f"{number:.12g}" for number in numbers]
    made = {"nodes": kept, "by": "relay", "delay_s": asked.alpha_s, "mtu": size, "queue_s": queue_s, **tcp}
    return {**made, "statistics": statistics}, [*words, *map(str, (statistics, *devices))]


def open_tun_device(name: str) -> int:
    """A new TUN device of this namespace: what is written to its descriptor comes out of it as if a wire had
    brought it.
    """
    try:
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    except OSError as error:
        advice = f"load the module (modprobe tun), or give the container --device={TUN}"
        if isinstance(error, PermissionError):
            advice = f"let all users have it, as most systems do (as root: chmod 666 {TUN})"
        raise SetUpError(
            f"a long link needs TUN devices, and {TUN} gives none: {error.strerror}; {advice}"
        ) from error
    return descriptor


def make_bridged_nodes(nodes: int, asked: LinkRequest) -> dict[str, Any]:
    """Nodes with slow cables to a bridge."""
    rate, switch = bandwidth_bit_s(asked.beta_s_per_byte), open_current_namespace()
    down, alpha_s = bandwidth_bit_s(asked.down_s_per_byte), asked.alpha_s
    run_batch("ip", ["link set lo up", "link add switch type bridge", "link set switch up"])
    kept, tcp, delay_s = [], {}, alpha_s
    for node in range(nodes):
        kept.append(enter_new_namespace())
        tcp = configure_tcp(rate, alpha_s, asked.windows == "raised")
        pipe = f"/proc/{os.getpid()}/fd/{switch}"
        run_batch("ip", [
            "link set lo up",
            f"link add {INTERFACE} type veth peer name port{node} netns {pipe}",
            f"addr add {node_address(node)}/16 dev {INTERFACE}",
            f"link set {INTERFACE} gso_max_size {bundle_bytes(rate)} up",
        ])  # fmt: skip
        run_batch("tc", [f"qdisc add dev {INTERFACE} root handle 1: {token_bucket_options(rate)}"])
        delay_s = delay_s and add_delay(delay_s, asked.jitter_s, asked.loss)
    enter_namespace(switch)
    ports = [f"port{node}" for node in range(nodes)]
    run_batch("ip", [f"link set {port} gso_max_size {bundle_bytes(rate)} master switch up" for port in ports])
    run_batch("tc", [f"qdisc add dev {port} root {token_bucket_options(down)}" for port in ports])
    return {"nodes": kept, "by": "netem" if delay_s else "buckets", "delay_s": delay_s, **tcp}


def add_delay(seconds: float, jitter_s: float = 0.0, loss: float = 0.0) -> float:
    """Delay what this node sends; returns by how much: 0 where the kernel has no netem."""
    words = [f"delay {seconds * 1e6:g}us"]
    words += [f"{jitter_s * 1e6:g}us"] if jitter_s else []
    words += [f"loss {100 * loss:g}%"] if loss else []
    packets = 10_000  # more than are ever under way
    try:
        run_batch("tc", [f"qdisc add dev {INTERFACE} parent 1:1 netem {' '.join(words)} limit {packets}"])
    except SetUpError:
        return 0.0
    return seconds


def main(words: str, stay: bool = False) -> int:
    """Writes {"pid", "nodes": a descriptor of this process for each, "by": who makes cables slow, "delay_s",
    "congestion", "window_bytes"}, with a relay "mtu", "queue_s", "statistics" (a descriptor) and, if asked
    for, "relay_cpus" as well; or {"why"}.
    """
    told = json.loads(words)
    asked = LinkRequest(**{name: told[name] for name in LinkRequest._fields if name in told})
    asked = asked._replace(down_s_per_byte=asked.down_s_per_byte or asked.beta_s_per_byte)
    try:
        if asked.relay:
            made, relay = make_relayed_nodes(told["nodes"], asked)
            if cpus := told.get("relay_cpus"):
                os.sched_setaffinity(0, cpus)  # it keeps them as this process goes on as it
                made["relay_cpus"] = cpus
        else:
            made, relay = make_bridged_nodes(told["nodes"], asked), []
    except (SetUpError, OSError) as error:
        print(json.dumps({"why": str(error)}), flush=True)
        return 2
    print(json.dumps({"pid": os.getpid(), **made}), flush=True)
    if asked.relay:
        if stay:  # it ends with its standard input, which then nobody closes
            reads, writes = os.pipe()
            os.dup2(reads, 0)
            os.set_inheritable(writes, True)
        os.execv(asked.relay, [f"relay {words}", *relay])
    if stay:
        signal.pause()
    while os.read(0, 1):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] == ["stay"]))
