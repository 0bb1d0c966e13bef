"""Workers of several nodes become a group whatever the nodes' names resolve to, and interfaces are called."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from slurm.emulated.network import EmulatedNetwork
from tests.conftest import ROOT, environment_for
from tests.launch.troubled import await_
from tests.slurm.emulated.links import a_link, needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.extended]
NODES = ("node-a", "node-b")
HOSTS = {
    "as Debian writes them": "127.0.0.1 localhost\n127.0.1.1 {own}\n",
    "names that nobody knows": "127.0.0.1 localhost\n",
    "an address of another machine": "127.0.0.1 localhost\n192.0.2.77 {own}\n",
}
# On its node, whose name is known to its own hosts file only; the second node calls its interface otherwise.
ENTER = """
hostname {own} && mount --bind {hosts} /etc/hosts
if [ {rank} = 1 ]; then ip link set eth0 down && ip link set eth0 name ens7 && ip link set ens7 up; fi
exec {python} -c {program} {rank} {folder}
"""
WORKER = """
import sys, torch
from datetime import timedelta
from pathlib import Path
from experiments.config import compose
from experiments.worker import connect
from slurm import environment
from slurm.environment import WorkerPlace
connect.PATIENCE = timedelta(seconds=30)
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
config = compose.resolve(["method=dense", "task=cnn_digits", "workers=2"])
try:
    place = WorkerPlace(rank, 2, 0)
    comm = connect.join_group_via_folder(config, place, folder, False, None, torch.device("cpu"))
except ConnectionError as error:
    print(error)
    sys.exit(1)
print(int(comm.all_reduce(torch.ones(1))), environment.gloo_interface())
comm.close()
"""


@pytest.fixture
def nodes() -> Iterator[EmulatedNetwork]:
    network = EmulatedNetwork(a_link(1e9), len(NODES))
    try:
        yield network
    finally:
        network.close()


Worker = subprocess.Popen[str]


@contextlib.contextmanager
def started(
    nodes: EmulatedNetwork, folder: Path, hosts: str, own: Mapping[str, str] = {}
) -> Iterator[list[Worker]]:
    """Start a worker on each node; end those that have not ended by themselves."""
    (meeting := folder / "meeting").mkdir()
    workers = list[Worker]()
    for rank, name in enumerate(NODES):
        (file := folder / f"hosts-{name}").write_text(hosts.format(own=name))
        quoted = {"hosts": file, "python": sys.executable, "program": WORKER, "folder": meeting}
        script = ENTER.format(own=name, rank=rank, **{key: shlex.quote(str(quoted[key])) for key in quoted})
        command = [*nodes.nsenter_command(rank), "unshare", "--uts", "--mount", "bash", "-ec", script]
        environment = {**environment_for(folder / "results"), **own}
        workers.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def said(worker: Worker) -> str:
    """Return what a worker printed until it ended."""
    return worker.communicate(timeout=120)[0].strip()


@pytest.mark.parametrize("hosts", HOSTS)
def test_gloo_takes_the_network_by_which_workers_found_each_other(
    nodes: EmulatedNetwork, tmp_path: Path, hosts: str
) -> None:
    with started(nodes, tmp_path, HOSTS[hosts]) as workers:
        assert [said(worker) for worker in workers] == ["2 eth0", "2 ens7"]


def test_a_network_that_does_not_join_the_nodes_is_told_with_the_setting(
    nodes: EmulatedNetwork, tmp_path: Path
) -> None:
    wrong = {"GLOO_SOCKET_IFNAME": "lo"}
    with started(nodes, tmp_path, HOSTS["as Debian writes them"], wrong) as workers:
        # One of them calls the other, which gloo lets wait for minutes: the starter ends it, as this does.
        await_(lambda: any(worker.poll() is not None for worker in workers), "a worker's refusal")
        told = said(next(worker for worker in workers if worker.poll() is not None))
    assert "can't connect to them by its network interface lo" in told
    assert "set cluster.interface to the network that joins the nodes" in told
