"""The process of one worker: python -m experiments.worker ORDERS_FILE START_FOLDER. Not for people; `run` and
the jobs of a cluster start it.

It says how it ended by its exit code (0, 1 a failure, 2 bad input, 75 stopped as told) and, in
START_FOLDER/failure<rank>.json, by a sentence.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback
from pathlib import Path

from analysis.records import Attempt, read_json, write_json
from experiments.signals import EXIT_CODE, Preempted, Stop
from slurm import environment

# From the first cause to its consequences: what a worker that merely lost its peers has to say comes last.
DISK_FULL = "the disk is full: free some space and run again; finished runs are kept"
KINDS = (
    "bad_input", "machine", "non_finite", "disk", "memory", "error", "lost", "interrupted", "preempted",
)  # fmt: skip
# What torch's allocators say in a RuntimeError of no class of its own.
NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")


def main(orders_file: Path, start_folder: Path) -> int:
    stop = Stop().listen()  # before torch is loaded, which takes seconds
    place = environment.place()
    orders = read_json(orders_file)
    assert orders is not None, orders_file
    attempt = Attempt(Path(orders["attempt"]))
    try:
        from experiments.run import execute  # torch comes with it

        execute(orders, attempt, place, start_folder, stop)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        return EXIT_CODE
    except BaseException as error:
        kind, why = explain(error)
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        write_json(start_folder / f"failure{place.rank}.json", {"rank": place.rank, "kind": kind, "why": why})
        return 2 if kind == "bad_input" else 1
    return 0


def explain(error: BaseException) -> tuple[str, str]:
    """A word of KINDS and a sentence for what went wrong."""
    from sparsify.aggregator import NonFinite
    from sparsify.comm import WorkerLost

    if isinstance(error, ValueError):
        return getattr(error, "kind", "bad_input"), str(error)
    if isinstance(error, NonFinite):
        return "non_finite", f"{error}; lower task.lr, or look at the data"
    if isinstance(error, WorkerLost):
        return "lost", str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "disk", DISK_FULL
    if is_out_of_memory(error):
        return "memory", f"out of memory: {error}; take a smaller task.batch_size or fewer workers"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    return "error", f"{type(error).__name__}: {error}"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except json.JSONDecodeError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
