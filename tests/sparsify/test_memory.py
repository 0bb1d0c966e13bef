"""Memory that docs/methods.md states of a method is the memory that malloc was asked for."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sparsify.kernels import native_unavailable_reason
from sparsify.kernels.native_library import COMPILERS
from tests.sparsify.memory import table
from tests.sparsify.worker_functions import memory_of_methods, on_processes

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
SIZE = 2
TOLERANCE = 0.1  # n: half a digit, and what gloo's threads do earlier or later

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or COMPILER is None or native_unavailable_reason() is not None,
    reason="counts what glibc's malloc is asked for, of searches in C++",
)


@pytest.mark.extended
def test_the_table_of_methods_has_what_each_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the most that any worker needs, for each method and search."""
    source = Path(__file__).with_name("malloc_counted.cpp")
    library = tmp_path / "malloc_counted.so"
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    workers = on_processes(memory_of_methods, SIZE, tmp_path, forks=False)
    stated = table()
    assert stated.keys() == workers[0].keys()
    wrong = []
    for key, numbers in stated.items():
        most = torch.stack([worker[key] for worker in workers]).amax(dim=0)
        if (most - most.new_tensor(numbers)).abs().max() > TOLERANCE:
            wrong.append(f"{key}: {' + '.join(f'{number:.1f}' for number in most.tolist())}")
    assert not wrong, "these cells of docs/methods.md are to have:\n" + "\n".join(wrong)
