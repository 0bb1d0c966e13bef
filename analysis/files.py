"""Files that are replaced as a whole or not at all, and that are read as what they should hold or refused.

A results folder may have been through a full disk, a copy, an editor. Whatever lies there, reading it ends
soon, takes memory within bounds, and gives what the schema says or a sentence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

LOCK_POLL_S = 0.1
# In which the locks of a node that died must be gone: file systems wait some 90 s for it to answer.
PATIENCE_S = 180.0
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
T = TypeVar("T")

MOST_BYTES = 64 * 2**20  # of a file that is read as one object: a sweep of a thousand runs has 0.2 MiB
TELLING = {"loss": "loss", "top1": "val_top1"}  # what shows how a training goes, and where a log has it
MOST_LOG_BYTES = 2**30  # of a log: a million steps
DEEPEST = 40  # lists and objects within each other; a manifest has 5
MOST_WORDS = 160  # characters of a complaint: it may repeat what it complains about
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


class Damaged(ValueError):
    """What lies at `path` is not what was written there; `why` follows its name in a sentence."""

    def __init__(self, path: Path, why: str) -> None:
        plain = "".join(sign if sign.isprintable() else " " for sign in why)
        self.path, self.why = path, plain if len(plain) <= MOST_WORDS else f"{plain[:MOST_WORDS]} ..."
        super().__init__(f"{path} {self.why}")

    @property
    def brief(self) -> str:
        """The sentence with the file's name alone, where its folder is named already."""
        return f"{self.path.name} {self.why}"


def write_atomic(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replace `path` by `content`, or leave it unchanged; `durable` waits for the disk."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    raw = content.encode() if isinstance(content, str) else content
    try:
        with part.open("wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`write_atomic` of an object, in the layout of all records."""
    write_atomic(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it can't be read, is something else than a file, or has more than `most` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no FIFO's writer
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        raise Damaged(path, f"can't be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(path, f"is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')} and no file")
        if found.st_size > most:
            raise Damaged(path, f"has {found.st_size:,} bytes, and no such file has more than {most:,}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(most)
    except OSError as error:
        raise Damaged(path, f"can't be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_object(path: Path, schema: type[Any]) -> dict[str, Any] | None:
    """The object in `path`, once it has proved to fit the schema, with fields that the schema does not name;
    None if there is no such file.

    Raises:
        Damaged: something else is there.
    """
    try:
        content = _decoded(read_bytes(path), path)
    except FileNotFoundError:
        return None
    _converted(content, schema, path)
    assert isinstance(content, dict)
    return content


def read_as(path: Path, schema: type[T]) -> T | None:
    """The same as an instance of the schema."""
    content = read_object(path, schema)
    return None if content is None else msgspec.convert(content, schema)


def read_note(path: Path, schema: type[T]) -> T | None:
    """The same of a note without which its reader can do as well: None too if something else is there."""
    try:
        return read_as(path, schema)
    except Damaged:
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if there is no such file or it does not hold a whole JSON object."""
    return read_note(path, dict)


def _decoded(raw: bytes, path: Path) -> Any:
    try:
        content = json.loads(raw.decode())
        if odd := _odd(content):
            raise Damaged(path, f"holds {odd}")
    except UnicodeDecodeError as error:
        raise Damaged(path, "is no text in UTF-8") from error
    except RecursionError as error:
        raise Damaged(path, "is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Damaged(path, f"is no JSON: {error}" if raw.strip() else "is empty") from error
    except ValueError as error:  # of a number that is too long for Python
        raise error if isinstance(error, Damaged) else Damaged(path, f"is no JSON: {error}") from error
    return content


def _converted(content: Any, schema: Any, path: Path, where: str = "") -> Any:
    try:
        return msgspec.convert(content, schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise Damaged(path, f"is not as it was written{where}: {error}") from error


def _odd(value: Any, depth: int = 0) -> str:
    """What no record can hold, whatever its schema, because no table could; empty where there is nothing."""
    if depth > DEEPEST:
        return "lists and objects nested too deeply"
    if isinstance(value, dict):
        return next(filter(None, (_odd(part, depth + 1) for pair in value.items() for part in pair)), "")
    if isinstance(value, list):
        return next(filter(None, (_odd(part, depth + 1) for part in value)), "")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a whole number of more than 64 bits"
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in value):
        return "half of a character"
    return ""


class Disturbed(ValueError):
    """Somebody else has removed, changed or closed what this process was writing."""

    kind = "disturbed"


class Held(ValueError):
    """Another process is writing this; the message says which."""

    kind = "held"


class RankLog:
    """What one rank measured. Lines are kept in memory until `flush`: no I/O happens in a timed window.

    Who has it open holds its lock, and nobody else can open it. The lock is the kernel's (flock), and gone
    with the last process that holds it, whatever ends it. Between the nodes of a cluster it holds where the
    file system hands locks to its server: NFS from version 4, Lustre mounted with `flock`, GPFS, BeeGFS with
    `tuneUseGlobalFileLocks`. On one without locks, files are written without.

    Args:
        path: of the file, which is made where it is not.
        patience_s: how long to wait for another process to end.
        give_up: asked while waiting; True ends the wait.

    Raises:
        Held: another process has it open.
    """

    def __init__(
        self, path: Path, patience_s: float = 0.0, give_up: Callable[[], bool] = lambda: False
    ) -> None:
        self.path, self.pending = path, list[str]()
        self.newest: dict[str, float] = {}  # what of the values added last shows how a training goes
        self.file = path.open("ab", buffering=0)
        deadline = time.monotonic() + patience_s
        while not _lock(self.file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline or give_up():
                self.file.close()
                holder = lock_holder(path) or "another process"
                raise Held(f"{path} is being written by {holder}: wait for its end, or end it")
            time.sleep(LOCK_POLL_S)
        self.written = self.size()

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock. Lines in memory are lost."""
        self.file.close()

    def add(self, kind: str, **values: Any) -> None:
        """Append a line to those in memory."""
        if "variant" not in values:  # variants that take turns have a loss each
            self.newest |= {name: values[key] for name, key in TELLING.items() if values.get(key) is not None}
        self.pending.append(json.dumps({"kind": kind, **values}, separators=(",", ":"), allow_nan=True))

    def flush(self, durable: bool = False) -> None:
        """Append the lines in memory to the file, in one write; `durable` also waits for the disk.

        Raises:
            Disturbed: it is not the file any more that this process has written.
        """
        if not self.pending and not durable:
            return
        self._check()
        raw = "".join(line + "\n" for line in self.pending).encode()
        while raw:  # a raw write may be partial, for example on a disk that is almost full
            count = self.file.write(raw) or 0
            self.written += count
            raw = raw[count:]
        self.pending.clear()
        if durable:
            os.fsync(self.file.fileno())

    def size(self) -> int:
        """Bytes in the file, without the lines in memory."""
        return os.fstat(self.file.fileno()).st_size

    def sync(self) -> int:
        """`flush` to the disk; returns the size of the file."""
        self.flush(durable=True)
        return self.size()

    def truncate(self, size: int) -> None:
        """Remove everything after the first `size` bytes: it will be measured again."""
        if self.size() > size:
            self.file.truncate(size)
            os.fsync(self.file.fileno())
        self.written = self.size()

    def _check(self) -> None:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            raise Disturbed(f"{self.path} was removed while it was being written") from None
        if not os.path.samestat(there, os.fstat(self.file.fileno())):
            raise Disturbed(f"{self.path} was replaced while it was being written")
        if there.st_size != self.written:
            raise Disturbed(f"{self.path} was changed by another process while it was being written")


class Watched:
    """A folder that may be removed, or replaced by another one of its name, while this process needs it."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)

    def is_there(self) -> bool:
        """Is it the same one?"""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError:  # on NFS what others have removed is stale
            return False

    def close(self) -> None:
        os.close(self.descriptor)


def lock_holder(path: Path) -> str | None:
    """Who holds the lock of a `RankLog`, in words; None: nobody, or this file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it is not there, or no such log
        return None
    try:
        if _lock(descriptor, fcntl.LOCK_SH):
            return None
        inode = os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # Linux tells who holds the locks of this machine
        found = re.search(rf"FLOCK .* (\d+) \w+:\w+:{inode} ", Path("/proc/locks").read_text())
        if found and found[1] != "0":
            return f"process {found[1]} of this machine"
    return "a process of another machine or container"


def _lock(descriptor: int, how: int) -> bool:
    """Take the lock of an open file, if nobody else has it. Where there are no locks, nobody has it."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return True
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects in a log, a line each, and the number of other lines: a killed writer may leave one."""
    return read_lines_as(path, dict)


def read_lines_as(path: Path, schema: Any) -> tuple[list[Any], int]:
    """The lines of a log that fit the schema, which may be a union, and the number of others.

    Raises:
        FileNotFoundError, Damaged: as `read_bytes`.
    """
    found, others = list[Any](), 0
    for line in read_bytes(path, MOST_LOG_BYTES).splitlines():
        try:
            found.append(_line(line, schema, path, ""))
        except Damaged:
            others += 1
    return found, others


def whole_lines(raw: bytes, schema: Any, path: Path) -> tuple[list[Any], int]:
    """The lines of a finished log, and the number of broken ones at its end, which is at most one.

    Raises:
        Damaged: another line is not as it was written.
    """
    if raw.endswith(b"\n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError):  # also of NaN, which is no JSON
            found = msgspec.json.Decoder(schema).decode_lines(raw)
            if len(found) == raw.count(b"\n"):
                return found, 0
    *lines, last = raw.split(b"\n")
    found = [_line(line, schema, path, f" in line {number}") for number, line in enumerate(lines, 1)]
    return found, int(bool(last))


def _line(line: bytes, schema: Any, path: Path, where: str) -> Any:
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"is no JSON{where}") from error
    return _converted(content, schema, path, where)
