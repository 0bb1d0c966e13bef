"""A worker that only meets the others and sums a number with them, for `doctor`.

    python -m experiments.worker.group_check ORDERS_FILE START_FOLDER

It starts and fails as the workers of runs do (`experiments.worker`), and leaves met<rank>.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from analysis.records.files import FolderReplacementDetector, write_json
from experiments.config.config import Config
from experiments.worker.errors import print_and_write_failure
from experiments.worker.orders import RunOrders
from slurm import environment, worker_process


def join_group_and_write_note(orders_file: Path, start_folder: Path) -> int:
    """Join the group as this process's worker, write met<rank>.json, and return the exit code."""
    worker_process.kill_self_when_stdin_closes()
    place = environment.worker_place()
    try:
        import torch

        from experiments.worker.build import prepare_device
        from experiments.worker.connect import join_group_via_folder

        orders = RunOrders.read(orders_file)
        config = Config.from_record(orders.config)
        device = prepare_device(config, place)
        comm = join_group_via_folder(config, place, start_folder, orders.same_host, orders.interface, device)
        num_workers = int(comm.all_reduce(torch.ones(1, device=device)))
        comm.close()
    except BaseException as error:
        print_and_write_failure(error, place.rank, FolderReplacementDetector(start_folder))
        return 1
    interface = environment.gloo_interface()
    note = {
        "node": environment.node_name(),
        "met": num_workers,
        "interface": interface,
        "torch": str(torch.__version__),
    }
    write_json(start_folder / f"met{place.rank}.json", note)
    return 0


if __name__ == "__main__":
    sys.exit(join_group_and_write_note(Path(sys.argv[1]), Path(sys.argv[2])))
