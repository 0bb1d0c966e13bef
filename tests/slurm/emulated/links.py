"""Helpers for tests of emulated links: networks of their own, and checks that nothing is left of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm.emulated import network, switch
from slurm.emulated.network import EmulatedLink, EmulatedNetwork
from tests.launch.troubled import await_

NUMBERS = itertools.count(1)
GONE_S = 10.0


def may_have_networks() -> bool:
    """Tell whether this machine allows networks of namespaces."""
    try:
        network.unshare_command()
    except ValueError:
        return False
    return True


needs_namespaces = pytest.mark.skipif(not may_have_networks(), reason="this machine allows no namespaces")
needs_tun = pytest.mark.skipif(
    not os.access(switch.TUN, os.R_OK | os.W_OK), reason=f"nobody may use {switch.TUN} here"
)


def a_link(bytes_per_s: float) -> EmulatedLink:
    """Return a link that no other network of this machine has: its processes are known by its alpha."""
    return EmulatedLink("test", (1000 * os.getpid() + next(NUMBERS)) * 1e-13, 1 / bytes_per_s)


@contextmanager
def opened(link: EmulatedLink, *how: Any) -> Iterator[EmulatedNetwork]:
    """Open a network within a block: its nodes, by which means, and on which CPUs."""
    made = EmulatedNetwork(link, *how)
    try:
        yield made
    finally:
        made.close()


def processes(link: EmulatedLink) -> list[int]:
    """Return the processes that were told of this link: its network's holder, and others that name it."""
    told = f'"alpha_s": {link.alpha_s}'
    every = psutil.process_iter(["cmdline"])
    return [process.pid for process in every if told in " ".join(process.info["cmdline"] or ())]


def devices() -> set[str]:
    """Return this machine's own network devices."""
    return {line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def await_gone(link: EmulatedLink) -> None:
    await_(lambda: not processes(link), "the end of a network's processes", GONE_S)
