"""The size of the pages of a process's memory: huge (2 MB) or small (4 kB), and what it really has."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from experiments.bench._compared_rows import PageSize
from experiments.bench._select_steps import (
    TUNABLE_FOR_HUGE_PAGES,
    StepUnavailableError,
    check_malloc_can_give_huge_pages,
)

TUNABLES = "GLIBC_TUNABLES"
PR_SET_THP_DISABLE = 41  # linux/prctl.h


def check_pages_can_be_had(pages: PageSize) -> None:
    """Refuse a machine that cannot give a process pages of this size, and say which it gave.

    Raises:
        StepUnavailableError: the message says what is needed.
    """
    if platform.system() != "Linux":
        raise StepUnavailableError("needs Linux, which tells and sets the size of pages")
    if pages == "huge":
        check_malloc_can_give_huge_pages()


@contextmanager
def malloc_tuned_for(pages: PageSize) -> Iterator[None]:
    """Let the malloc of processes that begin in the block have huge pages, or none."""
    earlier = os.environ.pop(TUNABLES, None)
    if pages == "huge":
        os.environ[TUNABLES] = f"{TUNABLE_FOR_HUGE_PAGES}=1"
    try:
        yield
    finally:
        os.environ.pop(TUNABLES, None)
        if earlier is not None:
            os.environ[TUNABLES] = earlier


def switch_off_huge_pages() -> None:
    """Let this process have no transparent huge pages, whoever asks for them.

    Raises:
        OSError: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "transparent huge pages can't be switched off")


def measure_huge_page_share(tensor: Tensor) -> float:
    """Return the share in huge pages of the resident memory of the mapping that holds a tensor's middle."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    kib_by_field = dict[str, int]()
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            is_inside = start <= middle < end
        elif is_inside and first != "VmFlags:":
            kib_by_field[first] = int(words[0])
    return kib_by_field["AnonHugePages:"] / kib_by_field["Rss:"]
