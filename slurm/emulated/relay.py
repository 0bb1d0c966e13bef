"""The relay's program: compiled once by the machine's own compiler, and kept in its user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("relay.cpp")
FLAGS = ("-O2", "-std=c++17", "-static-libstdc++", "-static-libgcc")
COMPILERS = ("c++", "g++", "clang++")
LIMIT_S = 60.0


def relay_program() -> Path:
    """The relay's program, from the cache or compiled now.

    Raises:
        ValueError: there is no compiler, or it fails.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsify" / "relay"
    made_of = repr((SOURCE.read_bytes(), FLAGS, platform.machine(), platform.libc_ver())).encode()
    path = folder / f"relay-{hashlib.sha256(made_of).hexdigest()[:16]}"
    if not os.access(path, os.X_OK):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as place:
            compile_relay(Path(place) / "relay").replace(path)
    return path


def compile_relay(path: Path) -> Path:
    """relay.cpp compiled to this path, which is returned."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError(f"no compiler for its relay: none of {', '.join(COMPILERS)} is installed")
    words = [compiler, *FLAGS, str(SOURCE), "-o", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise ValueError(f"{compiler} can't compile its relay: {done.stderr.strip()[-500:]}")
    return path
