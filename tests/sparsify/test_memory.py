"""What docs/methods.md states of a method's memory is what malloc was asked for."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sparsify.kernels import trouble_with_native
from sparsify.kernels.native_library import COMPILERS
from tests.sparsify.laws import METHODS
from tests.sparsify.memory import LOCAL, LOCALLY, SEARCHES, Memory, table
from tests.sparsify.worker_functions import memory_of_methods, on_processes

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
SIZE = 2
TOLERANCE = 0.1  # n: half a digit, and what gloo's threads do earlier or later

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or COMPILER is None or trouble_with_native() is not None,
    reason="counts what glibc's malloc is asked for, of searches in C++",
)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Memory]]:
    """Of each method by search: the most of any worker."""
    folder = tmp_path_factory.mktemp("memory")
    source, library = Path(__file__).with_name("malloc_counted.cpp"), folder / "malloc_counted.so"
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        workers = on_processes(memory_of_methods, SIZE, folder, forks=False)

    def most(key: str) -> Memory:
        return Memory(*torch.stack([worker[key] for worker in workers]).amax(dim=0).tolist())

    every_step = {name: {select: most(f"{name} {select}") for select in SEARCHES} for name in METHODS}
    return every_step | {name: {LOCALLY: most(name)} for name in LOCAL}


def test_the_table_of_methods_has_what_each_takes(counted: dict[str, dict[str, Memory]]) -> None:
    stated = table()
    wrong = [
        f"| `{name}` | ... | {' | '.join(str(memory) for memory in searches.values())} | ... |"
        for name, searches in counted.items()
        if name not in stated
        or not all(stated[name][select].fits(memory, TOLERANCE) for select, memory in searches.items())
    ]
    assert not wrong, "these rows of docs/methods.md are to have:\n" + "\n".join(wrong)
