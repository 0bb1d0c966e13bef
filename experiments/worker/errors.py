"""Failures of a worker, or for want of a package: a class of failure, and a sentence for people."""

from __future__ import annotations

import contextlib
import errno
import platform
import re
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from analysis.records.files import FolderReplacementDetector, write_json

# From causes to consequences: the sentence of a worker that only lost its peers comes last.
DISK_FULL = "the disk is full: free some space and give the same command again; what was finished is kept"
FILE_LIMIT = (
    "a file may not become so large here, by `ulimit -f` or by its file system: raise the limit and give the "
    "same command again; what was finished is kept"
)
NO_SPACE = {errno.ENOSPC: DISK_FULL, errno.EDQUOT: DISK_FULL, errno.EFBIG: FILE_LIMIT}
KINDS = (
    "environment",
    "bad_input", "machine", "held", "disturbed", "non_finite", "disk", "memory", "error", "lost", "preempted",
)  # fmt: skip
# Messages of torch's allocators, which raise a plain RuntimeError.
NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")
# What gloo and torch's store say where the kernel has no port left to listen at, or to connect from.
NO_PORT = re.compile(
    "bind: Address already in use|connect: Cannot assign requested address|port: 0,.* address already in use"
)
# The Python packages that commands need.
OWN_PACKAGES = ("analysis", "experiments", "slurm", "sparsify", "tests")
# As they are imported; requirements/ has their names on package indices.
LIBRARY = ("numpy", "torch")
FIGURES = (
    "argcomplete", "griffe", "hydra", "jinja2", "markdown_it", "markupsafe", "matplotlib", "msgspec",
    "numpy", "omegaconf", "pandas", "pyarrow", "pynvml", "rich", "scipy",
)  # fmt: skip
TRAIN = ("greenlet", "psutil", "sklearn", "submitit", "torchvision", *LIBRARY)
MAX_CHARACTERS = 300  # characters of a reason; some packages write a page
# What the loader of libraries says where an address space (ulimit -v) or a machine is too small.
TOO_LARGE = ("failed to map segment", "cannot allocate memory")


class Failure(NamedTuple):
    """The class of a failure, one of KINDS, and a sentence for people."""

    kind: str
    why: str


def explain_failure(error: BaseException) -> Failure:
    """Return the class of a failure and a sentence for people."""
    if isinstance(error, ImportError):
        failure = explain_import_error(error)
        if failure:
            return failure
    if isinstance(error, ValueError):
        return Failure(getattr(error, "kind", "bad_input"), str(error))
    if _is_instance(error, "sparsify.wrappers.engine", "NonFiniteGradientError"):
        return Failure("non_finite", f"{error}; lower task.lr, or look at the data")
    if isinstance(error, RuntimeError | OSError) and NO_PORT.search(str(error)):
        return Failure("error", _explain_missing_ports())
    if _is_instance(error, "sparsify.comm", "WorkerLost"):
        return Failure("lost", str(error))
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return Failure("disk", NO_SPACE[error.errno])
    if is_out_of_memory(error):
        return Failure("memory", f"out of memory: {error}; take a smaller task.batch_size or fewer workers")
    return Failure("error", f"{type(error).__name__}: {error}")


def _explain_missing_ports() -> str:
    """Return the sentence for a machine that has no TCP port left."""
    from experiments.worker.addresses import ephemeral_ports

    ports = ephemeral_ports()
    port_range = f", {ports.start}-{ports.stop - 1}" if ports else ""
    return (
        f"{platform.node()} has too few free TCP ports: programs have taken those that the kernel gives "
        f"(net.ipv4.ip_local_port_range{port_range}); end some of them, widen that range, or take fewer "
        "workers"
    )


def print_and_write_failure(error: BaseException, rank: int, folder: FolderReplacementDetector) -> Failure:
    """Print an error's traceback, write failure<rank>.json into the folder of this start, and return it."""
    failure = explain_failure(error)
    traceback.print_exception(error)
    if folder.is_still_there():  # else the starter says that it is not
        with contextlib.suppress(OSError):  # a full disk may refuse it
            write_json(folder.path / f"failure{rank}.json", {"rank": rank, **failure._asdict()})
    return failure


def _is_instance(error: BaseException, module: str, name: str) -> bool:
    """Tell whether an error is of a class whose module may not be loaded, for want of torch."""
    return isinstance(error, getattr(sys.modules.get(module), name, ()))


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, of the machine or of a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def explain_import_error(error: ImportError) -> Failure | None:
    """Return the class of a failed import and a sentence for people; None where the error is in our code."""
    package = (error.name or "").partition(".")[0]
    if package in OWN_PACKAGES or "partially initialized module" in str(error):
        return None
    if isinstance(error, ModuleNotFoundError):
        return Failure(
            "environment",
            f"the Python package {package} is not installed in {sys.prefix}: {_suggest_install(package)}",
        )
    reason = " ".join(str(error).split())[:MAX_CHARACTERS]
    if any(words in reason.lower() for words in TOO_LARGE):
        return Failure(
            "memory",
            f"a Python package does not fit into memory ({reason}); see `ulimit -v`, or cluster.mem_gb",
        )
    return Failure(
        "environment",
        f"a Python package can't be loaded ({reason}); `make clean`, then `make .venv/.train`, installs all",
    )


def _suggest_install(package: str) -> str:
    """Return the command that installs a package."""
    if package in FIGURES:
        return "`make .venv/.figures` installs what figures need, `make .venv/.train` what runs need"
    if package in TRAIN:
        return "`make .venv/.train` installs what runs need"
    return f"`{Path(sys.executable).name} -m pip install {package}` may install it"
