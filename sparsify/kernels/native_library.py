"""native.cpp as a shared library: compiled once by the machine's own compiler, tried in a process of its own,
and kept in a cache that only its user can write.

Not through torch.utils.cpp_extension: without torch's headers it takes two seconds instead of half a minute,
needs no ninja, and one library serves every version of torch. This file needs the standard library alone, for
it is also the program that tries what was compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("native.cpp")
# A product is rounded before it is added to something, as torch does it.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
LIMIT_S = 20.0  # for waiting until another process has built it, compiling and trying, together
POLL_S = 0.05
TRIED, CHOSEN = 20_000, 50  # elements that it is tried with, enough for a sampled bound, and how many of them
KINDS = {1: 4, 2: 2, 3: 2}  # of gradients, and bytes of an element: enum Kind of native.cpp


class KernelUnavailableError(RuntimeError):
    """The library can't be built, or can't be loaded."""


def load_or_build() -> ctypes.CDLL:
    """The library, from a cache or built now.

    Raises:
        KernelUnavailableError: there is no compiler, or what it makes does not run here.
    """
    try:
        folders = [folder for folder in places() if is_private(folder)]
        for folder in folders:
            if found := kept(folder):
                return found
        writable = [folder for folder in folders if os.access(folder, os.W_OK)]
        if not writable:
            raise KernelUnavailableError(
                f"no folder that its user alone may write: {', '.join(map(str, places()))}"
            )
        folder, until = writable[0], time.monotonic() + LIMIT_S
        with turn(folder, until):
            return kept(folder) or load(built(folder, until))
    except OSError as error:
        raise KernelUnavailableError(f"what was compiled can't be kept or loaded here: {error}") from error


def places() -> Iterator[Path]:
    """Folders for the library: in the home, which machines may share, else on this machine."""
    with contextlib.suppress(RuntimeError):  # there is no home
        cache = os.environ.get("XDG_CACHE_HOME")
        yield (Path(cache) if cache else Path.home() / ".cache") / "sparsify" / "kernels"
    yield Path(tempfile.gettempdir()) / f"sparsify-kernels-{os.geteuid()}"


def is_private(folder: Path) -> bool:
    """True if it is there now, ours, and nobody else can write into it.

    Its libraries are loaded into the process: who can put one there commands the process.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if {folder.lstat().st_uid, folder.stat().st_uid} != {os.geteuid()}:  # of a link and of what it names
            return False
        if folder.stat().st_mode & 0o077:
            with contextlib.suppress(OSError):  # on a read-only disk, where it may do as it is
                folder.chmod(0o700)
        return not folder.stat().st_mode & 0o022
    except OSError:
        return False


def kept(folder: Path) -> ctypes.CDLL | None:
    """The library of this folder that is undamaged and loads here."""
    for path in sorted(folder.glob(f"native-{key()}-*.so")):
        if is_as_built(path):
            with contextlib.suppress(OSError):  # built on a system with other libraries, that shares our home
                return load(path)
    return None


def key() -> str:
    """Name by what a library was built from and what it was tried on."""
    facts = (SOURCE.read_bytes(), FLAGS, platform.machine(), platform.libc_ver(), cpu_features())
    return digest(repr(facts).encode())


def cpu_features() -> str:
    """The instructions of this processor, as Linux lists them."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return platform.processor()


def digest(content: bytes) -> str:
    """Name of a content."""
    return hashlib.sha256(content).hexdigest()[:16]


def is_as_built(path: Path) -> bool:
    """True if this file is ours, and has the content that its name promises."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            seen = os.fstat(file.fileno())
            ours = seen.st_uid == os.geteuid() and not seen.st_mode & 0o022
            return ours and stat.S_ISREG(seen.st_mode) and path.stem.endswith(f"-{digest(file.read())}")
    except OSError:
        return False


@contextlib.contextmanager
def turn(folder: Path, until: float) -> Iterator[None]:
    """Workers that start together build one after the other: the first builds, the others find it; or
    `KernelUnavailableError`.
    """
    with (folder / "lock").open("w") as lock:
        while is_locked_by_another(lock.fileno()):
            if time.monotonic() > until:
                raise KernelUnavailableError(f"another process has been compiling it for {LIMIT_S:g} s")
            time.sleep(POLL_S)
        yield


def is_locked_by_another(lock: int) -> bool:
    """Try to lock it. A file system that has no locks lets everybody build, which costs time only."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def built(folder: Path, until: float) -> Path:
    """native.cpp compiled, tried, and put into this folder, named by its digest; or `KernelUnavailableError`."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelUnavailableError(f"no compiler: none of {', '.join(COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as place:
        made = Path(place) / "native.so"
        run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], place, until, f"{compiler} {' '.join(FLAGS)}")
        # It might crash, so not in this process. Isolated: no module of the user's is imported.
        run([sys.executable, "-I", "-S", __file__, str(made)], place, until, f"what {compiler} made")
        made.chmod(0o700)
        path = folder / f"native-{key()}-{digest(made.read_bytes())}.so"
        made.replace(path)
    return path


def run(command: Sequence[str], place: str, until: float, what: str) -> None:
    """Raises KernelUnavailableError where it fails or takes too long; then it is killed, with all that it
    started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": place},  # compilers that are killed leave files there
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise KernelUnavailableError(f"{what} did not end within {LIMIT_S:g} s") from error
            raise
    if process.returncode < 0:
        raise KernelUnavailableError(f"{what} was ended by {signal.Signals(-process.returncode).name}")
    if process.returncode:
        raise KernelUnavailableError(f"{what} failed: {said.strip()[-500:]}")


def load(path: Path) -> ctypes.CDLL:
    """The library, with the types of its functions. Raises OSError."""
    library = ctypes.CDLL(str(path))
    int32, long, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    for name, result, arguments in (
        ("level", int32, []),
        ("parts", long, [long, long]),
        ("topk", int32, [
            pointer, long, pointer, long, pointer, long, int32, int32, long, long, pointer, pointer,
            pointer,
        ]),
        ("above", None, [
            pointer, pointer, int32, long, ctypes.c_uint32, int32, long, pointer, pointer, long, pointer,
        ]),
        ("add", None, [pointer, long, pointer, long, ctypes.c_float, int32]),
        ("clear_at", None, [pointer, long, pointer]),
        ("norms", None, [pointer, pointer, long, int32, int32, long, pointer]),
        ("statistical2", None, [pointer, pointer, long, pointer, pointer]),
        ("move", None, [pointer, pointer, long, pointer, long, ctypes.c_float, ctypes.c_float]),
        ("chunks", None, [pointer, long, ctypes.c_float, int32, long, int32, long, pointer, pointer]),
    ):  # fmt: skip
        function = getattr(library, f"sparsify_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def try_out(library: ctypes.CDLL) -> None:
    """Assert that it finds the largest numbers, at each level of this processor and for each kind of
    gradient.
    """
    numbers = array("f", (i * 0.618034 % 1 - 0.5 for i in range(TRIED)))
    largest = sorted(sorted(range(TRIED), key=lambda i: -abs(numbers[i]))[:CHOSEN])
    border = min((numbers[i] for i in largest), key=abs)
    bound = int.from_bytes(array("f", [abs(border)]).tobytes(), sys.byteorder)
    norm = sum(number * number for number in numbers) ** 0.5
    for level in range(library.sparsify_level() + 1):
        for kind, size in KINDS.items():
            zeros, acc, counts = array("B", bytes(TRIED * size)), array("f", numbers), array("q", [0])
            candidates, found, report = empty(TRIED), empty(CHOSEN), array("q", bytes(24))
            half = TRIED // 2 + 1  # in two pieces
            accs = array("q", [at(acc), TRIED])
            grads = array("q", [at(zeros), half, at(zeros) + half * size, TRIED - half])
            wanted = array("q", [TRIED, CHOSEN, 7, 0, 0])
            assert not library.sparsify_topk(
                at(wanted), 1, at(accs), 1, at(grads), 2, kind, level, 1, -1, *map(at, found), at(report)
            )
            assert [index - 7 for index in found[0]] == largest, (level, kind)
            assert list(found[1]) == [numbers[i] for i in largest], (level, kind)
            inputs = at(acc), at(zeros), kind, TRIED
            library.sparsify_above(*inputs, bound, level, 1, *map(at, candidates), TRIED, at(counts))
            assert list(candidates[0][: counts[0]]) == largest, (level, kind)
            assert acc == numbers, (level, kind)
        seen, tensor = array("f", [0.0]), array("q", [at(numbers), TRIED])
        library.sparsify_norms(at(tensor), at(tensor) + 8, 1, 1, level, 1, at(seen))
        assert abs(seen[0] - norm) < 1e-3 * norm, level
        # Tiles that lie side by side, 4 x 1000.
        grid = array("q", [at(acc), 0, 0, 0, TRIED // 4, 4, 1000, 1, TRIED // 4000, 7, 0])
        spots, read = empty(35)
        library.sparsify_chunks(at(grid), 1, 1.0, 0, TRIED, level, 1, at(spots), at(read))
        assert [numbers[i] for i in spots] == list(read), level
        for first in range(0, TRIED // 4, 1000):
            tile = [row + i for row in range(first, TRIED, TRIED // 4) for i in range(1000)]
            best = sorted(sorted(tile, key=lambda i: -abs(numbers[i]))[:7])
            assert list(spots[7 * (first // 1000) :][:7]) == best, level
    memories = array("q", [at(acc), 7, 7 + half, at(acc) + 4 * half, 7 + half, 7 + TRIED])
    part = array("q", [*map(at, found), CHOSEN])
    library.sparsify_add(at(memories), 2, at(part), 1, -1.0, 0)
    assert [i for i in range(TRIED) if acc[i] != numbers[i]] == largest
    assert not any(acc[i] for i in largest)
    acc[largest[0]] = 1.0
    library.sparsify_clear_at(at(memories), 2, at(part))
    assert not any(acc[i] for i in largest)
    library.sparsify_add(at(memories), 2, 0, 0, 1.0, 1)
    assert not any(acc)
    # Two tensors; the deviation of the first is 0.82, so that -1, 0 and 1 are in three bins.
    values, counts = array("f", [-1, -1, 0, 0, 0, 1, 1, 9]), array("q", [7, 1])
    means, bins = array("f", bytes(32)), array("B", bytes(8))
    library.sparsify_statistical2(at(values), at(counts), 2, at(means), at(bins))
    assert list(means) == [0, -1, 0, 1, 0, 0, 9, 0]
    assert list(bins) == [1, 1, 2, 2, 2, 3, 3, 2]
    both = part * 2
    for parts, alpha in ((1, 1.0), (2, 0.5)):
        spaces = array("f", numbers), array("f", numbers)
        tables = [
            array("q", [at(space), 7, 7 + half, at(space) + 4 * half, 7 + half, 7 + TRIED])
            for space in spaces
        ]
        library.sparsify_move(*map(at, tables), 2, at(both), parts, alpha, -1.0)
        assert spaces[0] == spaces[1]
        assert [i for i in range(TRIED) if spaces[0][i] != numbers[i]] == largest
        assert not any(spaces[0][i] for i in largest)


def empty(size: int) -> tuple[array[Any], array[Any]]:
    """Room for indices and values."""
    return array("i", bytes(4 * size)), array("f", bytes(4 * size))


def at(numbers: array[Any]) -> int:
    """Address of an array."""
    return numbers.buffer_info()[0]


if __name__ == "__main__":
    try_out(load(Path(sys.argv[1])))
