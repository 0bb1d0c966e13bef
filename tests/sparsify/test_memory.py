"""What docs/methods.md states of a method's memory is what malloc was asked for."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparsify.kernels import native_unavailable_reason
from sparsify.kernels.native_library import COMPILERS
from tests.sparsify.memory import LOCALLY, Memory, table
from tests.sparsify.worker_functions import memory_of_methods, on_processes

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
SIZE = 2
TOLERANCE = 0.1  # n: half a digit, and what gloo's threads do earlier or later

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or COMPILER is None or native_unavailable_reason() is not None,
    reason="counts what glibc's malloc is asked for, of searches in C++",
)


def count(folder: Path) -> Iterator[tuple[str, str, Memory]]:
    """Yield each method, its search, and the most that any worker needs."""
    source, library = Path(__file__).with_name("malloc_counted.cpp"), folder / "malloc_counted.so"
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        workers = on_processes(memory_of_methods, SIZE, folder, forks=False)
    for key in workers[0]:
        name, _, select = key.partition(" ")
        most = torch.stack([worker[key] for worker in workers]).amax(dim=0)
        yield name, select or LOCALLY, Memory(*most.tolist())


@pytest.mark.extended
def test_the_table_of_methods_has_what_each_takes(tmp_path: Path) -> None:
    stated = table()
    wrong = [
        f"`{name}`, {select}: {memory}"
        for name, select, memory in count(tmp_path)
        if name not in stated or not stated[name][select].fits(memory, TOLERANCE)
    ]
    assert not wrong, "these cells of docs/methods.md are to have:\n" + "\n".join(wrong)
