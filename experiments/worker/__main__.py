"""The process of one worker: python -m experiments.worker ORDERS_FILE START_FOLDER.

Not for people; `run` and the jobs of a cluster start it.

It says how it ended by its exit code (0, 1 a failure, 2 bad input, 75 stopped as told) and, in
START_FOLDER/failure<rank>.json, by a sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from analysis.records.files import FolderReplacementDetector
from analysis.records.store import Attempt
from experiments.training.stop_signal import Preempted, StopSignal
from experiments.versions import check_packages
from experiments.worker.errors import print_and_write_failure
from experiments.worker.orders import RunOrders
from slurm import environment, worker_process


def run_worker_process(
    orders_file: Path,
    start_folder: Path,
    end_with_starter: Callable[[], None] = worker_process.kill_self_when_stdin_closes,
) -> int:
    """Carry out a run's orders as this process's worker, and return the exit code.

    Args:
        end_with_starter: called first, so that this process does not outlive the one that started it.
    """
    end_with_starter()
    stop = StopSignal().install_handlers()  # before torch is loaded, which takes seconds
    place = environment.worker_place()
    folder = FolderReplacementDetector(start_folder)
    orders = RunOrders.read(orders_file)
    if Attempt(Path(orders.attempt_folder)).is_valid():
        return 0  # SLURM has started its job again, for another run or because the node died late
    try:
        check_packages()
        with worker_process.exclude_loaded_objects_from_gc():
            from experiments.training.task import patch_optimizers_to_skip_compiler  # torch comes with it
            from experiments.worker.run import execute_run

        patch_optimizers_to_skip_compiler()
        execute_run(orders, place, start_folder, stop)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        return worker_process.STOPPED
    except BaseException as error:
        failure = print_and_write_failure(error, place.rank, folder)
        return 2 if failure.kind == "bad_input" else 1
    return 0


if __name__ == "__main__":
    sys.exit(run_worker_process(Path(sys.argv[1]), Path(sys.argv[2])))
