"""The process of one worker: python -m experiments.worker LAUNCH_FOLDER. Not for people; `run` starts it.

It says how it ended by its exit code (0, 1 a failure, 2 bad input) and, in failure<rank>.json, by a sentence.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback
from pathlib import Path

from analysis.records import Attempt, read_json, write_json
from slurm import environment

# From the first cause to its consequences: what a worker that merely lost its peers has to say comes last.
DISK_FULL = "the disk is full: free some space and run again; finished runs are kept"
KINDS = ("bad_input", "non_finite", "disk", "memory", "error", "lost", "interrupted")


def main(launch: Path) -> int:
    place = environment.place()
    orders = read_json(launch / "launch.json")
    assert orders is not None, launch
    attempt = Attempt(Path(orders["attempt"]))
    root = Path(orders["data_root"]) if orders["data_root"] else None
    try:
        from experiments.run import execute  # torch comes with it

        execute(orders["config"], attempt, place, launch, root)
    except BaseException as error:
        kind, why = explain(error)
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        write_json(launch / f"failure{place.rank}.json", {"rank": place.rank, "kind": kind, "why": why})
        return 2 if kind == "bad_input" else 1
    return 0


def explain(error: BaseException) -> tuple[str, str]:
    """A word of KINDS and a sentence for what went wrong."""
    from sparsify.aggregator import NonFinite
    from sparsify.comm import WorkerLost

    if isinstance(error, ValueError):
        return "bad_input", str(error)
    if isinstance(error, NonFinite):
        return "non_finite", f"{error}; lower task.lr, or look at the data"
    if isinstance(error, WorkerLost):
        return "lost", str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "disk", DISK_FULL
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory", f"out of memory: {error}; take a smaller task.batch_size or fewer workers"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    return "error", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except json.JSONDecodeError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
