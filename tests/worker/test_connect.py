"""The workers of several machines meet; a worker that does not come is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from analysis.records import locks
from analysis.records.files import try_read_json_object, write_json
from analysis.records.store import Store
from experiments.config import compose
from experiments.training import stop_signal as stop_rules
from experiments.training.stop_signal import Preempted, StopSignal
from experiments.worker import addresses, connect, run
from slurm.environment import WorkerPlace
from sparsify.comm import WorkerLost
from sparsify.comm.torch import TorchComm, wait_for_workers
from tests.config.refusals import check_parts
from tests.conftest import there
from tests.worker.runs import orders

CPU = torch.device("cpu")
SOON = timedelta(seconds=5)


def open_store(
    folder: Path,
    rank: int,
    is_one_node: bool = False,
    interface: str | None = None,
    patience: timedelta = SOON,
    **ports: Any,
) -> connect.RendezvousStore:
    return connect.open_rendezvous_store(
        folder, WorkerPlace(rank, 2, 0), is_one_node, interface, patience, **ports
    )


def test_where_only_some_ports_are_open_rank_0_listens_at_a_free_one_of_them(tmp_path: Path) -> None:
    with addresses.open_listening_socket(range(20_000, 30_000)) as listener:
        taken = listener.getsockname()[1]
        ports = range(taken, taken + 100)
        first, second = (open_store(tmp_path, rank, ports=ports).store for rank in (0, 1))
        assert taken < there(try_read_json_object(tmp_path / connect.ADDRESS_FILE))["port"] < taken + 100
        first.set("word", "heard")
        assert second.get("word") == b"heard"
        with pytest.raises(ValueError, match=rf"cluster.ports={taken}-{taken}: none of them is free"):
            addresses.open_listening_socket(range(taken, taken + 1))


def test_whoever_waits_in_vain_says_for_what(tmp_path: Path) -> None:
    at_once = timedelta(seconds=0.2)
    with pytest.raises(WorkerLost, match=r"found no meet.json of rank 0 in .*all nodes see them"):
        open_store(tmp_path, 1, patience=at_once)
    write_json(tmp_path / connect.ADDRESS_FILE, {"addresses": ["127.0.0.1"], "port": 1, "host": "elsewhere"})
    with pytest.raises(
        WorkerLost, match=r"can't reach rank 0 on elsewhere at 127.0.0.1, port 1; set cluster"
    ):
        open_store(tmp_path, 1, patience=at_once)
    with pytest.raises(ValueError, match=r"cluster.interface=wlan9 has no IPv4 address on .*there are: .*lo"):
        open_store(tmp_path, 0, interface="wlan9")
    store = open_store(tmp_path, 1, is_one_node=True, patience=at_once).store
    with pytest.raises(WorkerLost, match=r"worker 1 of 2 waits in vain.*did not come: 0; their logs"):
        TorchComm.join_at_store(store, 1, 2, CPU, at_once)


def test_whoever_is_told_while_waiting_alone_ends_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_rules, "MAX_WAIT_ALONE_S", 0.0)
    told, attempt = orders(Store(tmp_path / "runs"), "cluster=local", "workers=2", "method=dense")
    with pytest.raises(Preempted):
        run.execute_run(told, WorkerPlace(0, 2, 0), tmp_path, StopSignal(received_at_s=0.0))
    assert (attempt.state, attempt.manifest["step"]) == ("preempted", 0)
    # Who comes later finds that out, told or not.
    with pytest.raises(Preempted):
        run.execute_run(told, WorkerPlace(1, 2, 0), tmp_path, StopSignal())


def test_whoever_waits_tells_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "REPORT_AFTER_S", 0.0)
    config = compose.resolve(["cluster=local", "workers=3", "method=dense"])
    said = list[str]()
    for rank, whom in ((1, "worker 0"), (0, "workers 1, 2")):
        said.clear()
        place = WorkerPlace(rank, 3, 0)
        with pytest.raises(WorkerLost):
            connect.join_group_via_folder(
                config, place, tmp_path, False, None, CPU, lambda: bool(said), said.append
            )
        assert said == [f"waiting for {whom} to come; Ctrl-C ends the wait"]


def test_no_two_workers_share_a_gpu() -> None:
    def refusals(*gpus: str) -> list[str]:
        """Return what two workers with these GPUs are told."""
        store = HashStore()

        def ask(rank: int) -> str:
            try:
                connect.check_gpus_differ(store, rank, 2, gpus[rank])
            except ValueError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor() as pool:
            return [*pool.map(ask, (0, 1))]

    assert refusals("07 on n1", "07 on n2") == refusals("07 on n1", "0f on n1") == ["", ""]
    for told in refusals("07 on n1", "07 on n1"):
        check_parts(told, "workers 0 and 1 have the same GPU, 07 on n1: ... --gpus-per-task=1")


def test_a_store_that_ends_while_workers_wait_is_a_lost_worker() -> None:
    served = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    store = TCPStore("localhost", served[0].port, is_master=False, timeout=timedelta(seconds=5))

    def end_it() -> bool:
        served.clear()
        return False

    with pytest.raises(WorkerLost, match="worker 1 of 2 lost rank 0"):
        wait_for_workers(store, 1, 2, timedelta(seconds=60), end_it)
