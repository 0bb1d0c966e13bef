"""Runs whose workers are on nodes of their own, joined by a slow link."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.records.files import read_json
from analysis.records.store import Store
from experiments.config import compose
from experiments.config.plan import PlannedRun
from experiments.launch import local
from slurm.emulated import network
from slurm.emulated.network import EmulatedLink
from tests.conftest import ROOT, Command, environment_for, fine, refused
from tests.slurm.emulated.links import await_gone, needs_namespaces
from tests.worker.runs import wait_for

RUN = (
    "cluster=netns", "task=cnn_digits", "profile=smoke", "workers=3", "cluster.workers_per_node=2",
    "launch.on_mismatch=label", "train.validate=never",
)  # fmt: skip


def alone(alpha_s: str) -> EmulatedLink:
    """A link that no other run of this machine has."""
    return EmulatedLink("", float(alpha_s), None)


@needs_namespaces
@pytest.mark.own_processes
def test_a_run_s_workers_meet_over_the_link_and_its_record_says_what_they_found(
    here: Command, tmp_path: Path
) -> None:
    fine(here("run", *RUN, "method=topk", "cluster.link.alpha_s=0.000123"))
    (attempt,) = Store(tmp_path / "results" / "runs").all_valid()
    machine = attempt.manifest["provenance"]["machine"]
    assert machine["checked"] == ["link"]
    assert machine["link"]["asked_gbit_s"] == 1.0
    assert machine["link"]["asked_latency_s"] == 0.000123
    assert machine["link"]["congestion"]
    assert len(machine["link"]["pairs_gbit_s"]) == 2
    # On the loopback interface it would be ten times as much, whatever else the machine does.
    assert max(machine["link"]["pairs_gbit_s"]) < 1.2
    await_gone(alone("0.000123"))


@needs_namespaces
def test_a_starter_that_is_killed_leaves_no_worker_and_no_network(tmp_path: Path) -> None:
    words = [*RUN, "method=dense", "train.steps=100000", "cluster.link.alpha_s=0.000124"]
    command = [sys.executable, "-m", "experiments", "run", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment_for(tmp_path / "results"), stderr=subprocess.DEVNULL
    ) as starter:
        wait_for(tmp_path, "results/launch/*/progress.json")
        starter.send_signal(signal.SIGKILL)
    await_gone(alone("0.000124"))
    notes = (tmp_path / "results" / "launch").glob("*/worker?.json")
    pids = [(read_json(note) or {})["pid"] for note in notes]
    assert len(pids) == 3
    for pid in pids:
        wait_until_ended(pid)


def wait_until_ended(pid: int) -> None:
    import psutil

    try:
        psutil.Process(pid).wait(20)
    except psutil.NoSuchProcess:
        return


def test_a_machine_that_can_not_says_so_before_anything_is_begun(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> bool:
        raise ValueError(
            "cluster=netns needs the programs ip, tc, unshare, nsenter, and tc is not on the PATH"
        )

    monkeypatch.setattr(network, "has_root", refuse)
    refused(here("run", *RUN, "method=dense"), "tc is not on the PATH")
    assert not (tmp_path / "results" / "runs").exists()


def test_a_timed_run_on_emulated_links_is_alone_on_the_machine() -> None:
    run = PlannedRun(compose.resolve([*RUN, "method=dense"]), None)
    assert run.config.num_processes == 3
    assert not local.fits(run, [run])
