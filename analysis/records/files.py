"""Files that are replaced as a whole or not at all, and that are read as what they should hold or refused.

A results folder may have been through a full disk, a copy, an editor. Whatever lies there, reading it ends
soon, takes memory within bounds, and gives what the schema says or a sentence.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from analysis.records import locks

T = TypeVar("T")

MAX_BYTES = 64 * 2**20  # of a file that is read as one object: a sweep of a thousand runs has 0.2 MiB
MAX_CONFIG_BYTES = 2**20  # of a configuration: one has 4 KB, and 30 variants that take turns 30 times that
MAX_LOG_BYTES = 2**30  # of a log: a million steps
PART_SUFFIX = ".part"  # of the name of what is not finished
LOCK_NAME = "lock"  # of the lock in an unfinished folder
LOCKING_DELAY_S = 10.0  # so old it has its lock
MAX_WRITING_S = 86_400.0  # nothing takes so long to be written, where no lock tells
MAX_DEPTH = 40  # lists and objects within each other; a manifest has 5
ODD_TEXT = re.compile(rb"[0-9]{19}|\\u[dD]")  # of numbers of more than 64 bits, and halves of characters
MAX_COMPLAINT = 160  # characters of a complaint: it may repeat what it complains about
NAME_BY_FILE_TYPE = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip
NO_LINK = "is a link, and no link is followed here: remove it"  # results of others could lead anywhere by one


class DamagedFileError(ValueError):
    """The content of `path` is not what was written there; `why` follows its name in a sentence."""

    def __init__(self, path: Path, why: str) -> None:
        plain = "".join(sign if sign.isprintable() else " " for sign in why)
        self.path = path
        self.why = plain if len(plain) <= MAX_COMPLAINT else f"{plain[:MAX_COMPLAINT]} ..."
        super().__init__(f"{path} {self.why}")

    @property
    def message_without_folder(self) -> str:
        """The sentence with the file's name alone, where its folder is named already."""
        return f"{self.path.name} {self.why}"


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace `path` by `content`, or leave it unchanged; `durable` waits for the disk."""
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}{PART_SUFFIX}")
    raw = content.encode() if isinstance(content, str) else content
    try:
        with part.open("wb") as file:
            locks.try_flock(
                part, file.fileno()
            )  # by which `remove_abandoned_parts` sees that it is being written
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        if error.filename is None:  # as of a disk that is full
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write_if_different(path: Path, content: str) -> None:
    """Write a file unless it has this content already, so that what is made of it need not be made again."""
    if not is_plain_file(path) or path.read_bytes() != content.encode():
        write_atomic(path, content)


@contextlib.contextmanager
def temporary_part_folder(parent: Path) -> Iterator[Path]:
    """Make a folder in `parent` for unfinished files, and remove it at the end of the block."""
    with tempfile.TemporaryDirectory(PART_SUFFIX, ".", parent, ignore_cleanup_errors=True) as name:
        lock = Path(name) / LOCK_NAME
        with lock.open("wb") as file:
            locks.try_flock(lock, file.fileno())
            yield Path(name)


def walk_entries(folder: Path) -> Iterator[Path]:
    """Yield every path in a folder and below.

    Links are not followed, and unreadable folders are passed over.
    """
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                yield Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def remove_abandoned_parts(folder: Path) -> int:
    """Remove what killed processes have not finished, in a folder and below; return how many paths."""
    parts = (path for path in walk_entries(folder) if path.suffix == PART_SUFFIX and path.name[0] == ".")
    abandoned = [path for path in parts if _is_abandoned(path)]
    for path in abandoned:
        remove_path(path)
    return len(abandoned)


def _is_abandoned(part: Path) -> bool:
    """Tell whether nobody writes an unfinished file or folder any more; anything else is not ours."""
    try:
        status = part.lstat()
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder and not stat.S_ISREG(status.st_mode):
            return False
        age_s = time.time() - status.st_mtime
        outcome = _try_lock_file(part / LOCK_NAME if is_folder else part)
    except OSError:  # it was finished meanwhile, or is another user's
        return False
    if outcome == "unsupported":
        return age_s > MAX_WRITING_S
    return outcome == "locked" and age_s > LOCKING_DELAY_S


def _try_lock_file(lock: Path) -> locks.FlockOutcome:
    """Try to lock a file for a moment; one that is not there counts as locked."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "locked"
    try:
        return locks.try_flock(lock, descriptor)
    finally:
        os.close(descriptor)


def is_plain_file(path: Path) -> bool:
    """Tell whether a file is there, and no link to one."""
    return path.is_file() and not path.is_symlink()


def is_plain_folder(path: Path) -> bool:
    """Tell whether a folder is there, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def check_not_link(path: Path) -> None:
    """Refuse a link, whose target could lie outside of the results.

    Raises:
        DamagedFileError: the last part of `path` is a link.
    """
    if path.is_symlink():
        raise DamagedFileError(path, NO_LINK)


def open_for_append(path: Path) -> io.FileIO:
    """Open a file for appending, without following a link or waiting for a FIFO; make it where it is not.

    Raises:
        DamagedFileError: a link is there, or something else than a file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # as of a link, and of a FIFO that nobody reads
            check_plain_file_if_there(path)
        raise
    try:
        _check_is_file(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor, "ab")


def check_plain_file_if_there(path: Path) -> None:
    """Refuse a link, and whatever else is there instead of a file; pass where nothing is.

    Raises:
        DamagedFileError: something is there that is no file.
    """
    check_not_link(path)
    with contextlib.suppress(FileNotFoundError):
        _check_is_file(path, path.lstat().st_mode)


def _check_is_file(path: Path, mode: int) -> None:
    """Raise DamagedFileError where a mode is not that of a file."""
    if not stat.S_ISREG(mode):
        raise DamagedFileError(
            path, f"is {NAME_BY_FILE_TYPE.get(stat.S_IFMT(mode), 'something else')} and no file"
        )


def copy_regular_file(source: Path, target: Path) -> None:
    """Copy the content of a file that is no link.

    Raises:
        FileNotFoundError, DamagedFileError: as `read_bytes`.
    """
    target.write_bytes(read_bytes(source, MAX_LOG_BYTES, follows_link=False))


def remove_path(path: Path) -> None:
    """Remove a file, a folder with all in it, or a link but not its target, if it is there."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except RecursionError:  # so many folders are in each other
        for below in reversed([*walk_entries(path)]):
            if below.is_dir() and not below.is_symlink():
                below.rmdir()
            else:
                below.unlink()
        path.rmdir()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` by an object as JSON, in the layout of all records; see `write_atomic`."""
    write_atomic(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_bytes(path: Path, max_bytes: int = MAX_BYTES, *, follows_link: bool = True) -> bytes:
    """Return the content of a file, unless it is too large.

    Args:
        follows_link: read also what a link leads to.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it can't be read, is something else than a file, or has too many bytes.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # waits for no FIFO's writer
    if not follows_link:
        check_not_link(path)
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        raise DamagedFileError(path, f"can't be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        _check_is_file(path, status.st_mode)
        if status.st_size > max_bytes:
            raise DamagedFileError(
                path, f"has {status.st_size:,} bytes, and no such file has more than {max_bytes:,}"
            )
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise DamagedFileError(path, f"can't be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_json_object_if_there(
    path: Path, schema: type[Any], max_bytes: int = MAX_BYTES
) -> dict[str, Any] | None:
    """Return the object in `path` as a dict, with fields beyond the schema; None without such a file.

    Raises:
        DamagedFileError: something else is there.
    """
    try:
        content = decode_json(read_bytes(path, max_bytes), path)
    except FileNotFoundError:
        return None
    convert_to_schema(content, schema, path)
    assert isinstance(content, dict)
    return content


def read_struct_if_there(path: Path, schema: type[T]) -> T | None:
    """Return the object in `path` as an instance of the schema; None without such a file.

    Raises:
        DamagedFileError: something else is there.
    """
    content = read_json_object_if_there(path, schema)
    return None if content is None else msgspec.convert(content, schema)


def try_read_struct(path: Path, schema: type[T]) -> T | None:
    """Return the object in `path`; None without such a file, or where it does not fit the schema."""
    try:
        return read_struct_if_there(path, schema)
    except DamagedFileError:
        return None


def try_read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`; None without such a file, or where it is no whole JSON object."""
    return try_read_struct(path, dict)


def read_bytes_checking_digest(path: Path, expected_sha256: str) -> bytes:
    """Return the content of a file of a record, once its digest is the recorded one.

    Raises:
        DamagedFileError: it is not, or there is no such file.
    """
    try:
        raw = read_bytes(path, MAX_LOG_BYTES)
    except FileNotFoundError as error:
        raise DamagedFileError(path, "is missing") from error
    if hashlib.sha256(raw).hexdigest() != expected_sha256:
        raise DamagedFileError(path, "is not what was recorded: it has another digest")
    return raw


def size_and_digest(path: Path) -> dict[str, Any]:
    """Return the size and digest of a file, as manifests have them."""
    raw = path.read_bytes()
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def decode_json(raw: bytes, path: Path, where: str = "") -> Any:
    """Return what a JSON text holds.

    Args:
        path, where: of the text, for sentences.

    Raises:
        DamagedFileError: it is no JSON, or no record can hold it.
    """
    try:
        content = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, f"is no text in UTF-8{where}") from error
    except RecursionError as error:
        raise DamagedFileError(path, f"is nested too deeply{where}") from error
    except ValueError as error:
        why = f"is no JSON{where}: {error}" if raw.strip() else f"is empty{where}"
        raise DamagedFileError(path, why) from error
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH or ODD_TEXT.search(raw):  # else there is none for sure
        unstorable = _find_unstorable(content)
        if unstorable:
            raise DamagedFileError(path, f"holds {unstorable}{where}")
    return content


def convert_to_schema(content: Any, schema: Any, path: Path, where: str = "") -> Any:
    """Return JSON values converted to a schema.

    Args:
        path, where: of the values, for sentences.

    Raises:
        DamagedFileError: they do not fit.
    """
    try:
        return msgspec.convert(content, schema)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise DamagedFileError(path, f"is not as it was written{where}: {error}") from error


def _has_half_of_character(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text)


def _find_unstorable(content: Any) -> str:
    """Return the name of what no table could hold, whatever the schema; "" where there is nothing."""
    pending: list[tuple[Any, int]] = [(content, 0)]  # no recursion: the caller may be at Python's limit
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            return "lists and objects nested too deeply"
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            pending += [(part, depth + 1) for part in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            return "a whole number of more than 64 bits"
        elif isinstance(value, str) and _has_half_of_character(value):
            return "half of a character"
    return ""


class FolderReplacementDetector:
    """A handle of a folder, to see whether it was removed, or replaced by another one of its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)

    def is_still_there(self) -> bool:
        """Tell whether the folder is still there, and no other one in its place."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError:  # on NFS what others have removed is stale
            return False

    def close(self) -> None:
        """Close the handle."""
        os.close(self.descriptor)
