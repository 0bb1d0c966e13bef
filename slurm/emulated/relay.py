"""The relay's program: compiled once by the machine's own compiler, and kept in its user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from slurm import environment

SOURCE = Path(__file__).with_name("relay.cpp")
FLAGS = ("-O2", "-std=c++17", "-static-libstdc++", "-static-libgcc")
COMPILERS = ("c++", "g++", "clang++")
LIMIT_S = 60.0


def ensure_relay_compiled() -> Path:
    """Return the path of the relay's program, and compile it first if the cache does not have it.

    Raises:
        ValueError: there is no compiler, or it fails.
    """
    folder = environment.cache_folder() / "sparsify" / "relay"
    sources = repr((SOURCE.read_bytes(), FLAGS, platform.machine(), platform.libc_ver())).encode()
    path = folder / f"relay-{hashlib.sha256(sources).hexdigest()[:16]}"
    if not os.access(path, os.X_OK):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as build_folder:
            program = Path(build_folder) / "relay"
            compile_relay(program)
            program.replace(path)
    return path


def compile_relay(path: Path) -> None:
    """Compile relay.cpp into an executable file at a path."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError(f"no compiler for its relay: none of {', '.join(COMPILERS)} is installed")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if process.returncode:
        raise ValueError(f"{compiler} can't compile its relay: {process.stderr.strip()[-500:]}")
