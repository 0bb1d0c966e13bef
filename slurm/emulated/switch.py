"""The process that holds an emulated network: nodes, and a bridge or a relay at the end of their slow cables.

Started in a network namespace of its own, the switch (`unshare --net`), it makes one more per node, all
without a name: they live as long as this process, and those that entered them; then the kernel removes them,
with all that is in them. Nothing of the machine's own network is touched, and nothing is left behind.

A cable to the bridge is slow by the kernel's token buckets, and long where the kernel has netem. Where it has
not, long cables are TUN devices whose other ends the relay has: relay.cpp, the program that this process goes
on as.

Run as a file, by any Python, with the standard library alone: the development cluster's scripts do so, too.

    switch.py '{"nodes": 4, "alpha_s": 5e-5, "beta_s_per_byte": 8e-9}'
prints a line of JSON on the network that it made (`hold_network`), and ends when its standard input does;
with a further word, `stay`, when it is told to.
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
from typing import Any, Literal, NamedTuple

CLONE_NEWNET = 0x40000000  # linux/sched.h
INTERFACE = "eth0"  # of every node
NETWORK = "10.77"  # /16, known inside only
MOST_NODES = 1000  # a bridge has 1,023 ports (BR_MAX_PORTS)
# A token bucket (tc-tbf) is filled at the rate, and what it holds passes at once. A small one is exact, but
# loses what comes in while a busy processor lets its timer wait; a large one lets the beginning of a message
# pass for nothing. So there are two, one behind the other: one at the rate, and a small one a bit above it.
BURST_S = 1e-3
PEAK = 1.1
PEAK_BURST_S = 2e-4
# TCP hands its packets over in bundles (GSO), each of which must fit into the small bucket.
BUNDLE_S = 1e-4
LEAST_BUNDLE = 3_000  # bytes
MOST_BUNDLE = 65_000
HEADERS = 1.1  # times a bundle: with Ethernet's, IP's and TCP's
QUEUE_S = 0.05  # that a packet may wait at a port before others are dropped: a switch with large buffers
LEAST_QUEUE = 4 * 2**20  # bytes, so that all workers may send to one without loss
# Bytes of a connection that may wait at its own node's port, in seconds. Where nodes send and receive at
# once, the acknowledgements of what they receive wait behind them, and longer queues slow both directions.
# Linux takes fair queues (fq_codel) against that, which not every kernel has.
OWN_QUEUE_S = 5e-4
CONGESTION = "reno"
TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA  # linux/if_tun.h
TUN_WITHOUT_HEADER = 0x1001
# Over a long link a bundle takes a small share of the delay: fewer are cheaper for the relay. TCP begins with
# as many bytes as over Ethernet, ten packets (RFC 6928).
BUNDLE_SHARE = 1 / 40
FIRST_BYTES = 14_600
# Bytes that TCP may have under way, in round trips at the full rate: one fills the link, the system counts
# the memory of a packet as well, and the window opens past what fits.
WINDOWS = 4
LEAST_WINDOW = 2**18
# A queue of a long link holds what comes in two round trips: a connection that lost something is still as
# fast as the link.
QUEUE_WAYS = 4


def bandwidth_bit_s(beta_s_per_byte: float) -> int:
    """Return the bits per second of a link."""
    return round(8 / beta_s_per_byte)


def gso_bundle_bytes(rate_bit_s: int) -> int:
    """Return the bytes that TCP hands over in one bundle (GSO) at this rate."""
    return round(min(max(BUNDLE_S * rate_bit_s / 8, LEAST_BUNDLE), MOST_BUNDLE))


def relay_mtu_bytes(rate_bit_s: int, delay_s: float) -> int:
    """Return the bytes of a packet over a long link, with its headers."""
    return round(min(max(BUNDLE_SHARE * delay_s * rate_bit_s / 8, gso_bundle_bytes(rate_bit_s)), MOST_BUNDLE))


def tcp_window_bytes(rate_bit_s: int, delay_s: float) -> int:
    """Return the bytes that TCP may have under way over a link, so that the link limits it."""
    return round(max(WINDOWS * 2 * delay_s * rate_bit_s / 8, LEAST_WINDOW))


def tbf_qdisc_options(rate_bit_s: int) -> str:
    """Return the words of tc for the token buckets of this rate."""
    least = HEADERS * gso_bundle_bytes(rate_bit_s)
    burst = round(max(BURST_S * rate_bit_s / 8, least))
    peak_burst = round(max(PEAK_BURST_S * rate_bit_s / 8, least))
    queue = round(max(QUEUE_S * rate_bit_s / 8, LEAST_QUEUE))
    peak = f"peakrate {round(PEAK * rate_bit_s)}bit mtu {peak_burst}"
    return f"tbf rate {rate_bit_s}bit burst {burst} {peak} limit {queue}"


def node_address(node: int) -> str:
    """Return the address of a node, counted from 0."""
    return f"{NETWORK}.{(node + 1) // 256}.{(node + 1) % 256}"


class LinkRequest(NamedTuple):
    """The numbers of `conf/link` that were requested, and the relay."""

    alpha_s: float  # delay of a packet
    beta_s_per_byte: float  # of what a node sends
    down_s_per_byte: float = 0.0  # of what a node receives; 0: as much
    jitter_s: float = 0.0  # that a packet takes longer at most
    loss: float = 0.0  # share of packets
    windows: str = "raised"  # TCP's; else the system's
    relay: str = ""  # the program; without it, the kernel makes cables slow


class NetworkSetupError(Exception):
    """Something of a network can't be made; the message says why."""


def run_ip_or_tc_batch(program: Literal["ip", "tc"], lines: Iterable[str]) -> None:
    """Let `ip` or `tc` carry out lines of commands in the namespace that this process is in."""
    process = subprocess.run(
        [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise NetworkSetupError(f"{program}: {' '.join(process.stderr.split())}")


def enter_network_namespace(descriptor: int) -> None:
    """Move this process into the network namespace of a descriptor."""
    _call_libc("setns", descriptor, CLONE_NEWNET)


def enter_new_network_namespace() -> int:
    """Move this process into a new network namespace, and return the descriptor that keeps it."""
    _call_libc("unshare", CLONE_NEWNET)
    return open_current_network_namespace()


def open_current_network_namespace() -> int:
    """Return a descriptor of the network namespace that this process is in."""
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _call_libc(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise NetworkSetupError(f"{name}: {os.strerror(ctypes.get_errno())}")


def configure_tcp(rate_bit_s: int, delay_s: float, raise_windows: bool) -> dict[str, Any]:
    """Set no IPv6, short queues and usual congestion control in this namespace, as far as allowed.

    Args:
        raise_windows: also set windows for the delay, which a pause between two exchanges does not close.

    Returns:
        the congestion control and window that there are.
    """
    folder = Path("/proc/sys/net")
    window_files = [folder / "ipv4/tcp_rmem", folder / "ipv4/tcp_wmem"]
    setting_by_path: dict[Path, object] = {
        folder / "ipv6/conf/all/disable_ipv6": 1,
        folder / "ipv4/tcp_limit_output_bytes": round(
            max(OWN_QUEUE_S * rate_bit_s / 8, 2 * gso_bundle_bytes(rate_bit_s))
        ),
        folder / "ipv4/tcp_congestion_control": CONGESTION,
    }
    if raise_windows:
        setting_by_path[folder / "ipv4/tcp_slow_start_after_idle"] = 0
        for path in window_files:
            least, usual, most = path.read_text().split()
            setting_by_path[path] = f"{least} {usual} {max(int(most), tcp_window_bytes(rate_bit_s, delay_s))}"
    for path, setting in setting_by_path.items():
        with contextlib.suppress(OSError):  # containers may forbid it
            path.write_text(str(setting))
    return {
        "congestion": (folder / "ipv4/tcp_congestion_control").read_text().strip(),
        "window_bytes": min(int(path.read_text().split()[-1]) for path in window_files),
    }


class RelayedNodes(NamedTuple):
    """Facts about nodes with long cables, and the arguments of the relay at the other ends."""

    facts: dict[str, Any]
    relay_arguments: list[str]


def make_relayed_nodes(nodes: int, link: LinkRequest) -> RelayedNodes:
    """Make nodes with long cables, whose other ends wait for the relay."""
    slow, fast = sorted(map(bandwidth_bit_s, (link.beta_s_per_byte, link.down_s_per_byte)))
    mtu = relay_mtu_bytes(slow, link.alpha_s)
    namespaces = []
    devices = []
    tcp: dict[str, Any] = {}
    for node in range(nodes):
        namespaces.append(enter_new_network_namespace())
        devices.append(open_tun_device(INTERFACE))
        tcp = configure_tcp(fast, link.alpha_s, link.windows == "raised")
        first_packets = max(1, round(FIRST_BYTES / mtu))
        run_ip_or_tc_batch(
            "ip",
            [
                "link set lo up",
                f"addr add {node_address(node)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} mtu {mtu} txqueuelen 10000 up",
                f"route change {NETWORK}.0.0/16 dev {INTERFACE} initcwnd {first_packets}",
            ],
        )
    statistics = os.memfd_create("statistics")  # a file that goes with its last reader
    for descriptor in (statistics, *namespaces, *devices):
        os.set_inheritable(descriptor, True)
    queue_s = max(QUEUE_S, QUEUE_WAYS * link.alpha_s)
    numbers = [link.alpha_s, link.jitter_s, link.loss, link.beta_s_per_byte, link.down_s_per_byte, queue_s, 0]
    words = [*(f"{number:.12g}" for number in numbers), str(statistics), *map(str, devices)]
    facts = {
        "nodes": namespaces,
        "by": "relay",
        "delay_s": link.alpha_s,
        "mtu": mtu,
        "queue_s": queue_s,
        **tcp,
        "statistics": statistics,
    }
    return RelayedNodes(facts, words)


def open_tun_device(name: str) -> int:
    """Make a TUN device in this namespace, and return its descriptor.

    Bytes that are written to the descriptor come out of the device as if a wire had brought them.
    """
    try:
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    except OSError as error:
        advice = f"load the module (modprobe tun), or give the container --device={TUN}"
        if isinstance(error, PermissionError):
            advice = f"let all users have it, as most systems do (as root: chmod 666 {TUN})"
        raise NetworkSetupError(
            f"a long link needs TUN devices, and {TUN} gives none: {error.strerror}; {advice}"
        ) from error
    return descriptor


def make_bridged_nodes(nodes: int, link: LinkRequest) -> dict[str, Any]:
    """Make nodes with slow cables to a bridge, and return facts about them."""
    rate = bandwidth_bit_s(link.beta_s_per_byte)
    switch = open_current_network_namespace()
    run_ip_or_tc_batch("ip", ["link set lo up", "link add switch type bridge", "link set switch up"])
    namespaces = []
    tcp: dict[str, Any] = {}
    delay_s = link.alpha_s
    for node in range(nodes):
        namespaces.append(enter_new_network_namespace())
        tcp = configure_tcp(rate, link.alpha_s, link.windows == "raised")
        run_ip_or_tc_batch(
            "ip",
            [
                "link set lo up",
                f"link add {INTERFACE} type veth peer name port{node} netns /proc/{os.getpid()}/fd/{switch}",
                f"addr add {node_address(node)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} gso_max_size {gso_bundle_bytes(rate)} up",
            ],
        )
        run_ip_or_tc_batch("tc", [f"qdisc add dev {INTERFACE} root handle 1: {tbf_qdisc_options(rate)}"])
        if delay_s and not try_add_netem_delay(link):
            delay_s = 0.0
    enter_network_namespace(switch)
    ports = [f"port{node}" for node in range(nodes)]
    run_ip_or_tc_batch(
        "ip", [f"link set {port} gso_max_size {gso_bundle_bytes(rate)} master switch up" for port in ports]
    )
    buckets = tbf_qdisc_options(bandwidth_bit_s(link.down_s_per_byte))
    run_ip_or_tc_batch("tc", [f"qdisc add dev {port} root {buckets}" for port in ports])
    return {"nodes": namespaces, "by": "netem" if delay_s else "buckets", "delay_s": delay_s, **tcp}


def try_add_netem_delay(link: LinkRequest) -> bool:
    """Delay what this node sends; return False where the kernel has no netem."""
    words = f"delay {link.alpha_s * 1e6:g}us"
    if link.jitter_s:
        words += f" {link.jitter_s * 1e6:g}us"
    if link.loss:
        words += f" loss {100 * link.loss:g}%"
    packets = 10_000  # more than are ever under way
    try:
        run_ip_or_tc_batch("tc", [f"qdisc add dev {INTERFACE} parent 1:1 netem {words} limit {packets}"])
    except NetworkSetupError:
        return False
    return True


def hold_network(request_json: str, stay: bool = False) -> int:
    """Make the network of a request, print facts about it in JSON, and hold it until standard input ends.

    The facts are {"pid", "nodes": a descriptor of this process for each, "by": who makes cables slow,
    "delay_s", "congestion", "window_bytes"}, with a relay "mtu", "queue_s", "statistics" (a descriptor) and,
    if requested, "relay_cpus" as well; or {"why"}.

    Args:
        stay: hold the network when standard input ends, too, until a signal.
    """
    request = json.loads(request_json)
    link = LinkRequest(**{name: request[name] for name in LinkRequest._fields if name in request})
    link = link._replace(down_s_per_byte=link.down_s_per_byte or link.beta_s_per_byte)
    relay_arguments: list[str] = []
    try:
        if link.relay:
            facts, relay_arguments = make_relayed_nodes(request["nodes"], link)
            cpus = request.get("relay_cpus")
            if cpus:
                os.sched_setaffinity(0, cpus)  # it keeps them as this process goes on as it
                facts["relay_cpus"] = cpus
        else:
            facts = make_bridged_nodes(request["nodes"], link)
    except (NetworkSetupError, OSError) as error:
        print(json.dumps({"why": str(error)}), flush=True)
        return 2
    print(json.dumps({"pid": os.getpid(), **facts}), flush=True)
    if link.relay:
        if stay:  # it ends with its standard input, which then nobody closes
            reading, writing = os.pipe()
            os.dup2(reading, 0)
            os.set_inheritable(writing, True)
        os.execv(link.relay, [f"relay {request_json}", *relay_arguments])
    if stay:
        signal.pause()
    while os.read(0, 1):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(hold_network(sys.argv[1], sys.argv[2:] == ["stay"]))
