"""Workers that stand for several machines and share the cores of one: as if each machine had its own.

On a machine of its own, a worker's threads find a free core when a message comes. Here the kernel moves them
among cores on which other workers compute, and lets those finish their time slices: a message of 0.3 ms then
takes 3. So the cores are dealt out to the nodes, and slices are short, that a woken thread need not wait.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from typing import Any

SLICE_S = 1e-4  # the shortest that Linux grants
# Linux, uapi/asm/unistd.h: sched_setattr and sched_getattr, for which the C library has no functions.
CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


class SchedAttr(ctypes.Structure):
    """struct sched_attr of Linux, uapi/linux/sched/types.h. Times in nanoseconds."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32), ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64), ("period", ctypes.c_uint64),
        ("util_min", ctypes.c_uint32), ("util_max", ctypes.c_uint32),
    )  # fmt: skip


def take(node: int, nodes: int) -> None:
    """Let this thread, and those that it starts, run on the cores of this node only, in short slices.

    Nothing happens where the system has no such thing, or somebody has dealt out cores already.
    """
    shorten()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == os.cpu_count():
            os.sched_setaffinity(0, share(cores, node, nodes))


def share(cores: Sequence[int], node: int, nodes: int) -> list[int]:
    """The cores of a node: as many for each, where there are enough, else one that it shares with as many
    others as each node does. All cores where that comes out uneven.
    """
    count = len(cores)
    if nodes <= count:
        each = count // nodes
        return list(cores[node * each : (node + 1) * each])
    return [cores[node % count]] if nodes % count == 0 else list(cores)


def shorten(seconds: float = SLICE_S) -> None:
    """Ask for time slices of so many seconds, for this thread and those that it starts. Nothing happens where
    the kernel has none that could be asked for; see `slice_s`.
    """
    had = _asked()
    if had is not None and had.policy == os.SCHED_OTHER:
        had.runtime = round(1e9 * seconds)  # all else stays, nice too
        ctypes.CDLL(None).syscall(CALLS[platform.machine()][0], 0, ctypes.byref(had), 0)


def slice_s() -> float | None:
    """Seconds of this thread's slices; None where Linux does not tell: before 6.12, in a sandbox that forbids
    to ask, with another scheduling policy than the usual, or on another system.
    """
    had = _asked()
    return had.runtime / 1e9 or None if had is not None and had.policy == os.SCHED_OTHER else None


def facts() -> dict[str, Any]:
    """For the record."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return {"slice_s": slice_s(), "cores_of_a_node": len(cores) or None}


def _asked() -> SchedAttr | None:
    if platform.system() != "Linux" or platform.machine() not in CALLS:
        return None
    found = SchedAttr()
    size = ctypes.sizeof(SchedAttr)
    _, look = CALLS[platform.machine()]
    return None if ctypes.CDLL(None).syscall(look, 0, ctypes.byref(found), size, 0) else found
