"""States in files that are either whole or refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

BLOCK = 2**20


class Faulty(Exception):
    """A file is not what was written."""


class Digested:
    """A file to write to that knows the digest and the size of what it was given.

    It remembers an error and takes the rest calmly: thrown through torch's writer, which is C++, an
    OSError would come out as something else.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, 0
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, raw: bytes | bytearray | memoryview) -> int:
        if self.error is None:
            try:
                self.file.write(raw)
            except OSError as error:
                self.error = error
        self.sha256.update(raw)
        self.size += len(raw)
        return len(raw)

    def flush(self) -> None:
        """Torch asks for it; `write_state` does it, where errors can be raised."""


def digest(state: Any) -> str:
    """The same for states of the same bits, whatever their layout in memory."""
    sha256 = hashlib.sha256()

    def take(part: Any) -> None:
        if isinstance(part, Tensor):
            sha256.update(f"{part.dtype}{tuple(part.shape)}".encode())
            raw = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            sha256.update(raw.numpy().data)
        elif isinstance(part, Mapping):
            for name, value in part.items():
                take(name)
                take(value)
        elif isinstance(part, list | tuple):
            for value in part:
                take(value)
        else:
            sha256.update(f"{part!r};".encode())

    take(state)
    return sha256.hexdigest()


def write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `path`, wait for the disk, and return what `read_state` will compare. It is there whole or not
    at all.
    """
    part = path.with_suffix(".part")
    try:
        with part.open("wb", buffering=0) as file:
            digested = Digested(file)
            torch.save(dict(state), cast(IO[bytes], digested))  # of a file it needs `write` and `flush`
            if digested.error is not None:
                raise digested.error
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
    return {"bytes": digested.size, "sha256": digested.sha256.hexdigest()}


def read_state(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """What `write_state` wrote, on the CPU.

    Raises:
        Faulty: it is not that.
    """
    sha256 = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise Faulty(f"a file has {size} bytes instead of {expected['bytes']}")
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                sha256.update(block)
    except FileNotFoundError as error:
        raise Faulty("a file is missing") from error
    if sha256.hexdigest() != expected["sha256"]:
        raise Faulty("a file was changed after it was written")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
