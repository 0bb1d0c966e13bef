"""What went wrong in a worker: a class of failure, and a sentence for people."""

from __future__ import annotations

import errno
import sys

from experiments.config import packages

# From causes to consequences: the sentence of a worker that only lost its peers comes last.
DISK_FULL = "the disk is full: free some space and run again; finished runs are kept"
KINDS = (
    "environment",
    "bad_input", "machine", "held", "disturbed", "non_finite", "disk", "memory", "error", "lost", "preempted",
)  # fmt: skip
# Messages of torch's allocators, which raise a plain RuntimeError.
NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")


def explain(error: BaseException) -> tuple[str, str]:
    """The class of a failure, one of KINDS, and a sentence for people."""
    if isinstance(error, ImportError) and (trouble := packages.trouble(error)):
        return trouble
    if isinstance(error, ValueError):
        return getattr(error, "kind", "bad_input"), str(error)
    if _is(error, "sparsify.aggregator", "NonFinite"):
        return "non_finite", f"{error}; lower task.lr, or look at the data"
    if _is(error, "sparsify.comm", "WorkerLost"):
        return "lost", str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "disk", DISK_FULL
    if is_out_of_memory(error):
        return "memory", f"out of memory: {error}; take a smaller task.batch_size or fewer workers"
    return "error", f"{type(error).__name__}: {error}"


def _is(error: BaseException, module: str, name: str) -> bool:
    """Is it of this class, whose module may not be loaded, for want of torch?"""
    return isinstance(error, getattr(sys.modules.get(module), name, ()))


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
