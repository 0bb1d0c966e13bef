"""The process of one worker: python -m experiments.worker ORDERS_FILE START_FOLDER. Not for people; `run` and
the jobs of a cluster start it.

It says how it ended by its exit code (0, 1 a failure, 2 bad input, 75 stopped as told) and, in
START_FOLDER/failure<rank>.json, by a sentence.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from pathlib import Path

from analysis.files import Watched, read_json, write_json
from analysis.records import Attempt
from experiments.training.stop import EXIT_CODE, Preempted, Stop
from experiments.worker import lifeline
from experiments.worker.errors import explain
from slurm import environment


def main(orders_file: Path, start_folder: Path) -> int:
    lifeline.end_with_stdin()
    stop = Stop().listen()  # before torch is loaded, which takes seconds
    place, folder = environment.place(), Watched(start_folder)
    orders = read_json(orders_file)
    assert orders is not None, orders_file
    attempt = Attempt(Path(orders["attempt"]))
    if attempt.is_valid():  # SLURM has started its job again, for another run or because the node died late
        return 0
    try:
        from experiments.worker.run import execute  # torch comes with it

        execute(orders, attempt, place, start_folder, stop)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        return EXIT_CODE
    except BaseException as error:
        kind, why = explain(error)
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        note = {"rank": place.rank, "kind": kind, "why": why}
        if folder.is_there():  # else the starter says that it is not
            with contextlib.suppress(OSError):  # a full disk may refuse it
                write_json(start_folder / f"failure{place.rank}.json", note)
        return 2 if kind == "bad_input" else 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except json.JSONDecodeError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
