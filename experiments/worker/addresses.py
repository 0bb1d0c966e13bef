"""This machine's addresses, and the one by which it reaches another machine. Needs no torch."""

from __future__ import annotations

import contextlib
import platform
import socket
from pathlib import Path

import psutil

CONNECT_TIMEOUT_S = 3.0  # within which an address that is right accepts a connection
LOOPBACK = "127."
KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each network interface that has some."""
    addresses_by_name = {
        name: [address.address for address in all_addresses if address.family == socket.AF_INET]
        for name, all_addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in addresses_by_name.items() if addresses}


def hostname_addresses() -> list[str]:
    """Return the addresses that this host's own name resolves to; empty where it does not.

    With Debian's defaults it resolves to 127.0.1.1.
    """
    try:
        return socket.gethostbyname_ex(platform.node())[2]
    except OSError:
        return []


def list_addresses_by_preference(interface: str | None) -> list[str]:
    """Return this machine's IPv4 addresses: the interface's first, then its name's, then all others.

    Loopback leads another machine to itself, so it stands there only alone, or if it was asked for.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    addresses_by_name = addresses_by_interface()
    if interface and interface not in addresses_by_name:
        raise ValueError(
            f"cluster.interface={interface} has no IPv4 address on {platform.node()}; there are: "
            f"{', '.join(addresses_by_name)}"
        )
    preferred = addresses_by_name[interface] if interface else []
    others = [
        *hostname_addresses(),
        *(address for addresses in addresses_by_name.values() for address in addresses),
    ]
    reachable = [address for address in others if not address.startswith(LOOPBACK)]
    return list(dict.fromkeys([*preferred, *reachable])) or ["127.0.0.1"]


def local_address_towards(address: str, port: int) -> str | None:
    """Return the address from which this machine reaches another one, or None if nothing listens there.

    Torch's own client would wait long for a machine that is silent.
    """
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None


def open_listening_socket(ports: range) -> socket.socket:
    """Return a socket that listens at one of these ports.

    Raises:
        ValueError: all are taken.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN
            )
    raise ValueError(
        f"cluster.ports={ports.start}-{ports.stop - 1}: none of them is free on {platform.node()}; give "
        "more, or set exclusive: true"
    )


def ephemeral_ports() -> range | None:
    """Return the ports that the kernel gives to those who ask for any; None where it does not say.

    gloo and NCCL ask so, and can't be told to take others.
    """
    try:
        first, last = map(int, KERNEL_PORTS.read_text().split())
    except (OSError, ValueError):
        return None
    return range(first, last + 1)


def closed_ports_warning(ports: range | None) -> str:
    """Return a warning where workers will use other ports than the open ones; else an empty string."""
    kernel_range = ephemeral_ports()
    if (
        ports is None
        or kernel_range is None
        or (kernel_range.start >= ports.start and kernel_range.stop <= ports.stop)
    ):
        return ""
    return (
        f"gloo and NCCL take ports of {kernel_range.start}-{kernel_range.stop - 1} here, by the kernel's "
        f"setting net.ipv4.ip_local_port_range, and can't be told to keep to "
        f"cluster.ports={ports.start}-{ports.stop - 1}: the site must set the one, or open the other"
    )


def interface_with_address(address: str) -> str | None:
    """Return the interface of this machine that has the address; None where none has it."""
    return next((name for name, addresses in addresses_by_interface().items() if address in addresses), None)
