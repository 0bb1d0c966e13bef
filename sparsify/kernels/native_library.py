"""The shared library of native.cpp, which is compiled on first use.

The machine's own compiler makes it once. It is tried in a process of its own, and kept in a cache that only
its user can write.

torch.utils.cpp_extension is not used: without torch's headers compiling takes two seconds instead of half a
minute, needs no ninja, and one library serves every version of torch. This file needs the standard library
alone, for it is also the program that tries what was compiled.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("native.cpp")
# A product is rounded before it is added to something, as torch does it.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 20.0  # for waiting until another process has built it, compiling and trying, together
POLL_INTERVAL_S = 0.05
TRIAL_NUMEL = 20_000  # elements that it is tried with, enough for a sampled bound
TRIAL_K = 50  # of which so many are selected
ITEMSIZE_BY_KIND = {1: 4, 2: 2, 3: 2}  # bytes of an element of a gradient; enum Kind of native.cpp


class KernelUnavailableError(RuntimeError):
    """An error of a kernel that does not work here: it can't be built or loaded, or does not exist."""


def load_or_build() -> ctypes.CDLL:
    """Load the library from a cache, or build it.

    Raises:
        KernelUnavailableError: there is no compiler, or what it makes does not run here.
    """
    try:
        folders = [folder for folder in cache_folders() if try_ensure_private(folder)]
        for folder in folders:
            library = try_load_cached(folder)
            if library:
                return library
        writable = [folder for folder in folders if os.access(folder, os.W_OK)]
        if not writable:
            named = ", ".join(map(str, cache_folders()))
            raise KernelUnavailableError(f"no folder that its user alone may write: {named}")
        folder = writable[0]
        deadline = time.monotonic() + TIMEOUT_S
        with hold_build_lock(folder, deadline):
            return try_load_cached(folder) or load_shared_library(build_library(folder, deadline))
    except OSError as error:
        raise KernelUnavailableError(f"what was compiled can't be kept or loaded here: {error}") from error


def cache_folders() -> Iterator[Path]:
    """Yield folders for the library: in the home, which machines may share, else on this machine."""
    with contextlib.suppress(RuntimeError):  # there is no home
        cache = os.environ.get("XDG_CACHE_HOME")
        yield (Path(cache) if cache else Path.home() / ".cache") / "sparsify" / "kernels"
    yield Path(tempfile.gettempdir()) / f"sparsify-kernels-{os.geteuid()}"


def try_ensure_private(folder: Path) -> bool:
    """Make a folder where there is none; tell whether it is ours, and nobody else can write into it.

    Its libraries are loaded into the process: who can put one there commands the process.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if {folder.lstat().st_uid, folder.stat().st_uid} != {os.geteuid()}:  # of a link and of its target
            return False
        if folder.stat().st_mode & 0o077:
            with contextlib.suppress(OSError):  # on a read-only disk, where it may do as it is
                folder.chmod(0o700)
        return not folder.stat().st_mode & 0o022
    except OSError:
        return False


def try_load_cached(folder: Path) -> ctypes.CDLL | None:
    """Load the library of a folder that is undamaged and loads here; None where there is none."""
    for path in sorted(folder.glob(f"native-{build_digest()}-*.so")):
        if is_ours_and_undamaged(path):
            with contextlib.suppress(OSError):  # built on a system with other libraries, that shares our home
                return load_shared_library(path)
    return None


def build_digest() -> str:
    """Return a digest of all that a library is built from and tried on."""
    facts = (SOURCE.read_bytes(), FLAGS, platform.machine(), platform.libc_ver(), cpu_features())
    return content_digest(repr(facts).encode())


def cpu_features() -> str:
    """Return the instructions of this processor, as Linux lists them."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return platform.processor()


def content_digest(content: bytes) -> str:
    """Return a digest of a content, 16 characters."""
    return hashlib.sha256(content).hexdigest()[:16]


def is_ours_and_undamaged(path: Path) -> bool:
    """Tell whether a file is ours, and has the content of which its name has the digest."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            is_file = stat.S_ISREG(status.st_mode)
            return is_ours and is_file and path.stem.endswith(f"-{content_digest(file.read())}")
    except OSError:
        return False


@contextlib.contextmanager
def hold_build_lock(folder: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of a folder, so that of workers that start together the first builds for the others.

    Raises:
        KernelUnavailableError: another process has held it until the deadline, in seconds of time.monotonic.
    """
    with (folder / "lock").open("w") as lock:
        while not try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                raise KernelUnavailableError(f"another process has been compiling it for {TIMEOUT_S:g} s")
            time.sleep(POLL_INTERVAL_S)
        yield


def try_lock(file: int) -> bool:
    """Lock a file descriptor, unless another process has. Where there are no locks everybody may build."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: building several times costs time only
        return True
    return True


def build_library(folder: Path, deadline: float) -> Path:
    """Compile native.cpp, try the library, and put it into a folder, named by its digest.

    Raises:
        KernelUnavailableError: there is no compiler, or what it makes does not work.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelUnavailableError(f"no compiler: none of {', '.join(COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as place:
        library = Path(place) / "native.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(library)]
        run_until_deadline(deadline, command, place, f"{compiler} {' '.join(FLAGS)}")
        # It might crash, so not in this process. Isolated: no module of the user's is imported.
        trial = [sys.executable, "-I", "-S", __file__, str(library)]
        run_until_deadline(deadline, trial, place, f"what {compiler} made")
        library.chmod(0o700)
        path = folder / f"native-{build_digest()}-{content_digest(library.read_bytes())}.so"
        library.replace(path)
    return path


def run_until_deadline(deadline: float, command: Sequence[str], folder: str, description: str) -> None:
    """Run a command; at the deadline it is killed, with all that it started.

    Args:
        deadline: in seconds of time.monotonic.
        folder: for its temporary files.
        description: names the command in messages.

    Raises:
        KernelUnavailableError: it fails or takes too long.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": folder},  # compilers that are killed leave files there
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise KernelUnavailableError(f"{description} did not end within {TIMEOUT_S:g} s") from error
            raise
    if process.returncode < 0:
        raise KernelUnavailableError(f"{description} was ended by {signal.Signals(-process.returncode).name}")
    if process.returncode:
        raise KernelUnavailableError(f"{description} failed: {errors.strip()[-500:]}")


def load_shared_library(path: Path) -> ctypes.CDLL:
    """Load a library, and set the types of its functions; OSError where it does not load."""
    library = ctypes.CDLL(str(path))
    int32, long, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    for name, result, arguments in (
        ("level", int32, []),
        ("num_blocks", long, [long, long]),
        ("topk", int32, [
            pointer, long, pointer, long, pointer, long, int32, int32, long, long, pointer, pointer,
            pointer,
        ]),
        ("above", None, [
            pointer, pointer, int32, long, ctypes.c_uint32, int32, long, pointer, pointer, long, pointer,
        ]),
        ("add", None, [pointer, long, pointer, long, ctypes.c_float, int32]),
        ("clear_at", None, [pointer, long, pointer, long]),
        ("norms", None, [pointer, pointer, long, int32, int32, long, pointer]),
        ("statistical2", None, [pointer, pointer, long, pointer, pointer]),
        ("move", int32, [pointer, pointer, long, pointer, long, ctypes.c_float, ctypes.c_float]),
        ("chunks", None, [pointer, long, ctypes.c_float, int32, long, int32, long, pointer, pointer]),
    ):  # fmt: skip
        function = getattr(library, f"sparsify_{name}")
        function.argtypes = arguments
        function.restype = result
    return library


def check_library(library: ctypes.CDLL) -> None:
    """Assert that each function does what it should, at each level and for each kind that it has.

    Raises:
        AssertionError: a function does not; the message says at which level and for which kind.
    """
    numbers = array("f", (i * 0.618034 % 1 - 0.5 for i in range(TRIAL_NUMEL)))
    largest = largest_indices(numbers, range(TRIAL_NUMEL), TRIAL_K)
    for level in range(library.sparsify_level() + 1):
        for kind in ITEMSIZE_BY_KIND:
            check_topk_and_above(library, numbers, largest, level, kind)
        check_norms(library, numbers, level)
        check_chunks(library, numbers, level)
    check_add_clear_move(library, numbers, largest)
    check_statistical2(library)


def check_topk_and_above(
    library: ctypes.CDLL, numbers: array[float], largest: list[int], level: int, kind: int
) -> None:
    """Assert that the largest elements are found, by their number and by a threshold."""
    itemsize = ITEMSIZE_BY_KIND[kind]
    grad = array("B", bytes(TRIAL_NUMEL * itemsize))
    acc = array("f", numbers)
    counts = array("q", bytes(24))
    indices, values = allocate_selection(TRIAL_K)
    first = TRIAL_NUMEL // 2 + 1  # elements of the first of two pieces
    accs = array("q", [address(acc), TRIAL_NUMEL])
    grads = array("q", [address(grad), first, address(grad) + first * itemsize, TRIAL_NUMEL - first])
    request = array("q", [TRIAL_NUMEL, TRIAL_K, 7, 0, 0])
    topk_arguments = (request, 1, accs, 1, grads, 2, kind, level, 1, -1, indices, values, counts)
    assert not call(library.sparsify_topk, *topk_arguments)
    assert [index - 7 for index in indices] == largest, (level, kind)
    assert list(values) == [numbers[i] for i in largest], (level, kind)
    border = min(abs(value) for value in values)
    key = int.from_bytes(array("f", [border]).tobytes(), sys.byteorder)
    indices, values = allocate_selection(TRIAL_NUMEL)
    above_arguments = (acc, grad, kind, TRIAL_NUMEL, key, level, 1, indices, values, TRIAL_NUMEL, counts)
    call(library.sparsify_above, *above_arguments)
    assert list(indices[: counts[0]]) == largest, (level, kind)
    assert acc == numbers, (level, kind)


def check_norms(library: ctypes.CDLL, numbers: array[float], level: int) -> None:
    """Assert that the norm of a tensor is right."""
    norm = array("f", [0.0])
    tensor = array("q", [address(numbers), TRIAL_NUMEL])
    call(library.sparsify_norms, tensor, tensor[1:], 1, 1, level, 1, norm)
    expected = sum(number * number for number in numbers) ** 0.5
    assert abs(norm[0] - expected) < 1e-3 * expected, level


def check_chunks(library: ctypes.CDLL, numbers: array[float], level: int) -> None:
    """Assert that the 7 largest are found of each chunk, 4 x 1000, of those that lie side by side."""
    columns = TRIAL_NUMEL // 4
    grid = array("q", [address(numbers), 0, 0, 0, columns, 4, 1000, 1, columns // 1000, 7, 0])
    indices, values = allocate_selection(7 * (columns // 1000))
    call(library.sparsify_chunks, grid, 1, 1.0, 0, TRIAL_NUMEL, level, 1, indices, values)
    assert [numbers[i] for i in indices] == list(values), level
    for chunk, start in enumerate(range(0, columns, 1000)):
        members = [row + i for row in range(start, TRIAL_NUMEL, columns) for i in range(1000)]
        assert list(indices[7 * chunk :][:7]) == largest_indices(numbers, members, 7), level


def check_add_clear_move(library: ctypes.CDLL, numbers: array[float], largest: list[int]) -> None:
    """Assert that a selection is added, cleared and moved where it lies, in memory of two pieces."""
    indices = array("i", [7 + index for index in largest])
    values = array("f", [numbers[i] for i in largest])
    selection = array("q", [address(indices), address(values), TRIAL_K])
    expected = array("f", numbers)
    for i in largest:
        expected[i] = 0.0
    acc = array("f", numbers)
    memories = memory_table(acc)
    call(library.sparsify_add, memories, 2, selection, 1, -1.0, 0)
    assert acc == expected
    acc[largest[0]] = 1.0
    call(library.sparsify_clear_at, memories, 2, selection, 1)
    assert acc == expected
    call(library.sparsify_add, memories, 2, selection, 0, 1.0, 1)
    assert not any(acc)
    for num_selections, alpha in ((1, 1.0), (2, 0.5)):
        spaces = array("f", numbers), array("f", numbers)
        tables = map(memory_table, spaces)
        assert not call(library.sparsify_move, *tables, 2, selection * 2, num_selections, alpha, -1.0)
        assert spaces == (expected, expected)


def check_statistical2(library: ctypes.CDLL) -> None:
    """Assert that two tensors are coded."""
    # The deviation of the first one is 0.82, so that -1, 0 and 1 are in three bins.
    values = array("f", [-1, -1, 0, 0, 0, 1, 1, 9])
    means = array("f", bytes(32))
    codes = array("B", bytes(8))
    call(library.sparsify_statistical2, values, array("q", [7, 1]), 2, means, codes)
    assert list(means) == [0, -1, 0, 1, 0, 0, 9, 0]
    assert list(codes) == [1, 1, 2, 2, 2, 3, 3, 2]


def largest_indices(numbers: Sequence[float], members: Iterable[int], k: int) -> list[int]:
    """Return which k of these elements have the largest magnitudes, ascending."""
    return sorted(sorted(members, key=lambda i: -abs(numbers[i]))[:k])


def memory_table(space: array[float]) -> array[int]:
    """Return struct Memory of two pieces of a space that begins at 7."""
    first = TRIAL_NUMEL // 2 + 1
    return array("q", [address(space), 7, 7 + first, address(space) + 4 * first, 7 + first, 7 + TRIAL_NUMEL])


def allocate_selection(size: int) -> tuple[array[int], array[float]]:
    """Allocate so many indices and values."""
    return array("i", bytes(4 * size)), array("f", bytes(4 * size))


def call(function: Any, *arguments: Any) -> Any:
    """Call a function of the library, which gets the addresses of arrays."""
    return function(*[address(value) if isinstance(value, array) else value for value in arguments])


def address(numbers: array[Any]) -> int:
    """Return the address of an array."""
    return numbers.buffer_info()[0]


if __name__ == "__main__":
    check_library(load_shared_library(Path(sys.argv[1])))
