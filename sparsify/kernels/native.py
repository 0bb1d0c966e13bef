"""The C++ pass of native.cpp: built once by the machine's own compiler, and called through ctypes.

Not through torch.utils.cpp_extension: without torch's headers it takes two seconds instead of half a minute,
needs no ninja, and one library serves every version of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsify import host
from sparsify.kernels.tally import Tally
from sparsify.parts import Sparse, check_k, without_nan

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
BUILD_S = 120.0
LEVELS = ("scalar", "avx2", "avx512")
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Kind
NOTHING = 0xFFFFFFFF  # a bound that nothing reaches


class Unavailable(RuntimeError):
    """The library can't be built, or can't be loaded."""


class Native:
    """One pass over memory, 12 bytes per element in float32, in as many threads as torch has.

    Args:
        like: (n,) float32, or bfloat16 or float16 whose sums are float32.
        level: the vector instructions to use at most; None: the best that this processor has.
        bound: for tests: the key to take for the bound, instead of a sampled one.

    Raises:
        Unavailable: there is no compiler, or what it makes does not run here.
    """

    def __init__(self, like: Tensor, level: str | None = None, bound: int | None = None) -> None:
        self.library = library()
        best = int(self.library.sparsify_level())
        self.level = best if level is None else min(best, LEVELS.index(level))
        self.name = f"native {LEVELS[self.level]}"
        self.forced = -1 if bound is None else bound
        self.slack = int(self.library.sparsify_slack())
        # Candidates of all parts, one part behind the other. Grown when k or the number of threads grows.
        self.indices = torch.empty(0, dtype=torch.int32)
        self.values = torch.empty(0, dtype=torch.float32)
        self.done = Tally()

    def top(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        """See `Kernel.top`; indices ascending."""
        check_k(k, acc.numel())
        if not acc.is_contiguous():
            return self._through_a_copy(acc, grad, lambda copy: self.top(copy, None, k))
        n, threads, parts = self._shape(acc, grad)
        capacity = int(self.library.sparsify_capacity(n, k, threads))
        capacity = max(capacity, k) if self.forced >= 0 else capacity
        self._make_room(parts * (capacity + self.slack))
        indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k, dtype=torch.float32)
        grad, kind = added(grad)
        found = self.library.sparsify_top(
            acc.data_ptr(), pointer(grad), kind, n, k, self.level, threads, self.indices.data_ptr(),
            self.values.data_ptr(), capacity, self.forced, indices.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        self.done += Tally(1, int(found == -1), max(0, found), k if found >= 0 else 0)
        return Sparse(indices, values)

    def beyond(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        """See `Kernel.beyond`."""
        if not acc.is_contiguous():
            return self._through_a_copy(acc, grad, lambda copy: self.beyond(copy, None, threshold, strict))
        host.waited()  # for how many there are
        n, threads, parts = self._shape(acc, grad)
        bound, counts = bound_key(float(threshold), strict), np.zeros(parts, dtype=np.int64)
        grad, kind = added(grad)
        self._make_room(parts * self.slack)
        while True:
            capacity = self.indices.numel() // parts - self.slack
            self.library.sparsify_beyond(
                acc.data_ptr(), pointer(grad), kind, n, bound, self.level, threads,
                self.indices.data_ptr(), self.values.data_ptr(), capacity, counts.ctypes.data,
            )  # fmt: skip
            if (most := int(counts.max())) <= capacity:
                break
            grad, kind = None, 0  # it has been added by now
            self._make_room(parts * (most + most // 4 + self.slack))
        starts = range(0, parts * (capacity + self.slack), capacity + self.slack)
        pieces = [slice(at, at + int(count)) for at, count in zip(starts, counts, strict=True)]
        indices, values = (torch.cat([one[at] for at in pieces]) for one in (self.indices, self.values))
        return without_nan(Sparse(indices, values))

    def tally(self) -> Tally:
        """See `Kernel.tally`."""
        return self.done

    def _shape(self, acc: Tensor, grad: Tensor | None) -> tuple[int, int, int]:
        """Elements, threads, and how many parts these work in. What the library would misread is refused."""
        fits = supports(acc) and acc.dtype == torch.float32 and acc.dim() == 1
        if grad is not None:
            fits &= supports(grad) and grad.shape == acc.shape
        if not fits:
            seen = [f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (acc, grad) if x is not None]
            raise ValueError(
                "this kernel takes acc in float32 and as many gradients in float32, bfloat16 or float16, on "
                f"the CPU; this is {' and '.join(seen)}"
            )
        n, threads = acc.numel(), torch.get_num_threads()
        return n, threads, int(self.library.sparsify_parts(n, threads))

    def _make_room(self, size: int) -> None:
        if self.indices.numel() < size:
            self.indices = torch.empty(size, dtype=torch.int32)
            self.values = torch.empty(size, dtype=torch.float32)

    def _through_a_copy(self, acc: Tensor, grad: Tensor | None, work: Callable[[Tensor], Sparse]) -> Sparse:
        """For a view with gaps, which buckets never are."""
        if grad is not None:
            acc.add_(grad)
        return work(acc.contiguous())


def supports(like: Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype in KINDS and like.numel() < 2**31


def added(grad: Tensor | None) -> tuple[Tensor | None, int]:
    """The gradient without gaps, and its kind."""
    return (None, 0) if grad is None else (grad.contiguous(), KINDS[grad.dtype])


def pointer(grad: Tensor | None) -> int | None:
    return None if grad is None else grad.data_ptr()


def bound_key(threshold: float, strict: bool) -> int:
    """The least key that a magnitude has which reaches the threshold (exceeds it, if strict)."""
    if np.isnan(threshold):
        return NOTHING
    if threshold < 0:
        return 0
    with np.errstate(over="ignore"):
        key = int(np.abs(np.float32(threshold)).view(np.uint32))
    return key + strict


def best_level() -> str:
    """The widest vector instructions of this processor that there is code for."""
    return LEVELS[library().sparsify_level()]


@cache
def library() -> ctypes.CDLL:
    """The library, from the cache or built now.

    Raises:
        Unavailable: see `Native`.
    """
    try:
        loaded = ctypes.CDLL(str(built()))
    except OSError as error:
        raise Unavailable(f"what was compiled does not load here: {error}") from error
    long, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.sparsify_level.restype = ctypes.c_int32
    for name, arguments in {
        "sparsify_parts": [long, long],
        "sparsify_slack": [],
        "sparsify_capacity": [long, long, long],
        "sparsify_top": [
            pointer, pointer, ctypes.c_int32, long, long, ctypes.c_int32, long, pointer, pointer, long, long,
            pointer, pointer,
        ],
    }.items():  # fmt: skip
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, long
    loaded.sparsify_beyond.argtypes = [
        pointer, pointer, ctypes.c_int32, long, ctypes.c_uint32, ctypes.c_int32, long, pointer, pointer, long,
        pointer,
    ]  # fmt: skip
    loaded.sparsify_beyond.restype = None
    return loaded


def built() -> Path:
    """The shared library, in a cache of the user's; written there whole, so that several processes may build
    it at once.
    """
    facts = repr((SOURCE.read_bytes(), FLAGS, platform.machine()))
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    try:
        path = Path.home() / ".cache" / "sparsify" / "kernels" / f"native-{digest}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            compile_to(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise Unavailable(str(error)) from error
    return path


def compile_to(path: Path) -> None:
    """native.cpp as a shared library.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no compiler: none of {', '.join(COMPILERS)} is installed")
    handle, half_made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    command = [compiler, *FLAGS, str(SOURCE), "-o", half_made]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
        if done.returncode:
            raise Unavailable(f"{compiler} {' '.join(FLAGS)} failed: {done.stderr.strip()[-500:]}")
        os.replace(half_made, path)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{compiler} took longer than {BUILD_S:g} s") from error
    finally:
        Path(half_made).unlink(missing_ok=True)
