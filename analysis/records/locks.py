"""Locks of files that the kernel keeps (flock): gone with the last process that holds them, whatever ends it.

Between the nodes of a cluster they hold where the file system hands them to its server: NFS from version 4,
Lustre mounted with `flock`, GPFS, BeeGFS with `tuneUseGlobalFileLocks`. Some file systems have none at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

POLL_S = 0.1
REPORT_AFTER_S = 3.0  # after which a wait for another process is told
UNSUPPORTED_ERRNOS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)
FlockOutcome = Literal["locked", "held elsewhere", "unsupported"]  # the last: by the file system
ELSEWHERE = "a file system with locks (Lustre: mounted with -o flock; NFS: from version 4)"


def try_flock(path: Path, descriptor: int, how: int = fcntl.LOCK_EX) -> FlockOutcome:
    """Try to lock an open file, without waiting."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED_ERRNOS:
            return "unsupported"
        if error.errno in HELD_ERRNOS:
            return "held elsewhere"
        raise OSError(error.errno, error.strerror, str(path)) from error
    return "locked"


def touch_and_probe_lock_support(path: Path) -> bool:
    """Tell whether a file lies on a file system with locks; make the file where it is not there."""
    with path.open("ab") as file:
        return try_flock(path, file.fileno(), fcntl.LOCK_SH) != "unsupported"


def describe_lock_holder(path: Path) -> str | None:
    """Return who holds a file's lock, in words; None if nobody does, or there are no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it is not there, or no file that can be locked
        return None
    try:
        if try_flock(path, descriptor, fcntl.LOCK_SH) != "held elsewhere":
            return None
        inode = os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # Linux tells who holds the locks of this machine
        holder = re.search(rf"FLOCK .* (\d+) \w+:\w+:{inode} ", Path("/proc/locks").read_text())
        if holder and holder[1] != "0":
            return f"process {holder[1]} of this machine"
    return "a process of another machine or container"


def machine_lock_folder() -> Path:
    """Return the folder of locks between this user's processes on this machine."""
    return Path(tempfile.gettempdir()) / f"sparsify-locks-{os.geteuid()}"


class FileLock:
    """A lock that one process holds at a time, by the file at `path`.

    Where the file system of `path` has no locks, a file of this machine's temporary folder stands for it, and
    the lock is `is_machine_local`: it keeps out this user's processes on this machine, and no others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_machine_local = False
        self.descriptor: int | None = None

    def acquire(self, timeout_s: float = math.inf, report_wait: Callable[[str], None] | None = None) -> bool:
        """Take the lock, waiting for so long; return False where another process keeps it.

        Args:
            timeout_s: how long to wait.
            report_wait: is told, after some seconds, for whom this process waits.

        Raises:
            ValueError: there are no locks here at all.
        """
        started = time.monotonic()
        while not self._try_acquire():
            waited_s = time.monotonic() - started
            if waited_s >= timeout_s:
                return False
            if report_wait is not None and waited_s >= REPORT_AFTER_S:
                holder = describe_lock_holder(self.path) or "another process"
                report_wait(f"waiting for {holder}, which holds {self.path}")
                report_wait = None
            time.sleep(POLL_S)
        return True

    def release(self) -> None:
        """Give up the lock."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try_acquire(self) -> bool:
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            undo.callback(os.close, descriptor)
            outcome = try_flock(self.path, descriptor)
            if outcome == "unsupported":
                self._use_file_of_machine()
                return self._try_acquire()
            # Whoever has removed the file meanwhile left this lock without a name by which others find it.
            if outcome == "locked" and os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                undo.pop_all()
                self.descriptor = descriptor
        return self.descriptor is not None

    def _use_file_of_machine(self) -> None:
        """Continue with a file of this machine in place of `path`."""
        folder = machine_lock_folder()
        if self.is_machine_local:
            raise ValueError(
                f"no file can be locked in {folder}, nor where the results are: set TMPDIR or "
                f"SPARSIFY_RESULTS to a folder on {ELSEWHERE}"
            )
        self.is_machine_local = True
        self.path = folder / f"{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]}.lock"
