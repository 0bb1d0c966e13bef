"""Runs whose workers are on nodes of their own, joined by a slow link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.pictures import captions
from analysis.records.attempts import of_attempt
from analysis.records.files import read_json
from analysis.records.store import Store
from experiments.config import compose
from experiments.config.plan import PlannedRun
from experiments.launch import diagnosis, local
from slurm.emulated import counters, network
from slurm.emulated.network import EmulatedLink
from tests.conftest import ROOT, Command, environment_for, fine, refused
from tests.slurm.emulated.links import await_gone, needs_namespaces, needs_tun, processes
from tests.worker.runs import wait_for

RUN = (
    "cluster=netns", "task=cnn_digits", "profile=smoke", "workers=3", "cluster.workers_per_node=2",
    "launch.on_mismatch=label", "train.validate=never",
)  # fmt: skip


LONG = ("cluster.by=relay", "cluster.link.beta_s_per_byte=8e-8")


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
@pytest.mark.own_processes
def test_a_run_s_record_has_the_bytes_of_the_interfaces(here: Command, tmp_path: Path) -> None:
    """Of workers with a node each: what was counted, and headers."""
    words = [word for word in RUN if not word.startswith("cluster.workers_per_node")]
    fine(here("run", *words, "method=topk", "cluster.link.alpha_s=0.000127"))
    (attempt,) = Store(tmp_path / "results" / "runs").all_valid()
    found = attempt.manifest["interface"]
    assert 0 < found["counted_bytes"] <= found["sent_bytes"]
    assert counters.uncounted(found, 3) == ""
    await_gone(alone("0.000127"))


@needs_tun
@needs_namespaces
@pytest.mark.own_processes
def test_a_run_over_a_long_link_says_what_its_relay_did(here: Command, tmp_path: Path) -> None:
    """Its workers sent nothing but what it handed over."""
    fine(here("run", *RUN, *LONG, "method=topk", "cluster.link.alpha_s=0.002125"))
    (attempt,) = Store(tmp_path / "results" / "runs").all_valid()
    found, relay = attempt.manifest["provenance"]["machine"]["link"], attempt.manifest["relay"]
    assert (found["by"], found["delay_s"]) == ("relay", 0.002125)
    assert found["latency_s"] > 0.002125
    assert max(found["pairs_gbit_s"]) < 0.12
    assert relay["bytes"] > 2 * 0.8e7  # a transfer of the probe, to each node
    assert "over 1 ms late" in captions.emulated(of_attempt(attempt)[0])
    await_gone(alone("0.002125"))


@needs_tun
@needs_namespaces
def test_a_relay_that_is_killed_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    words = [*RUN, *LONG, "method=dense", "train.steps=100000", "cluster.link.alpha_s=0.002126"]
    command = [sys.executable, "-m", "experiments", "run", *words]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment_for(tmp_path / "results", TMPDIR=str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    ) as starter:
        wait_for(tmp_path, "results/launch/*/worker2.json")
        (relay,) = [pid for pid in processes(alone("0.002126")) if program_of(pid).startswith("relay-")]
        os.kill(relay, signal.SIGKILL)
        _, said = starter.communicate(timeout=60)
    assert starter.returncode == 1
    assert "failed: the emulated network ended" in said
    store = Store(tmp_path / "results" / "runs")
    (attempt,) = store.attempts(*store.runs())
    assert (attempt.state, attempt.manifest["failure"]) == ("failed", "killed")
    await_gone(alone("0.002126"))


def program_of(pid: int) -> str:
    return (Path("/proc") / str(pid) / "exe").resolve().name


@needs_namespaces
def test_a_starter_that_is_killed_leaves_no_worker_and_no_network(tmp_path: Path) -> None:
    words = [*RUN, "method=dense", "train.steps=100000", "cluster.link.alpha_s=0.000124"]
    command = [sys.executable, "-m", "experiments", "run", *words]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment_for(tmp_path / "results", TMPDIR=str(tmp_path)),
        stderr=subprocess.DEVNULL,
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


@needs_namespaces
def test_two_at_once_are_refused_before_anything_is_begun(here: Command, tmp_path: Path) -> None:
    """One that ends lets the next one begin."""
    with local.only_emulation():
        refused(
            here("run", *RUN, "method=dense"), "has a run with cluster=netns under way", "cluster=virtual"
        )
    assert not (tmp_path / "results" / "runs").exists()
    with local.only_emulation():
        pass


def test_bad_numbers_of_a_link_are_refused_before_anything_is_begun(here: Command, tmp_path: Path) -> None:
    for number, why in {
        "alpha_s=-0.05": "0 or more",
        "loss=1": "must be a number in [0, 1)",
        "loss=0.9": "no run would end over it",
        "jitter_s=0.06": "no packet comes before it was sent",
        "beta_s_per_byte=1e-10": "a relay carries 10 at most",
    }.items():
        words = ("link=internet_100m_50ms", "cluster.by=relay", f"cluster.link.{number}", "method=dense")
        refused(here("run", *RUN, *words), why)
    assert not (tmp_path / "results" / "runs").exists()


@pytest.mark.parametrize(("late", "is_told"), [(9, False), (11, True)])
def test_a_run_whose_relay_was_the_bottleneck_says_so(late: int, is_told: bool) -> None:
    relay = {"cpu_s": 1.0, "seconds": 60.0, "packets": 100, "late": late}
    assert diagnosis.crowded({"relay": relay}) == [diagnosis.OVERRUN] * is_told


def test_a_timed_run_on_emulated_links_is_alone_on_the_machine() -> None:
    run = PlannedRun(compose.resolve([*RUN, "method=dense"]), None)
    assert run.config.num_processes == 3
    assert not local.fits(run, [run])
