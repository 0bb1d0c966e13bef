"""Runs whose workers are on nodes of their own, joined by a slow link."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from analysis.pictures import captions
from analysis.records.attempts import load_attempt
from analysis.records.store import Store
from experiments.config import compose
from experiments.config.plan import PlannedRun
from experiments.launch import local
from slurm.emulated import counters
from slurm.emulated.network import EmulatedLink
from tests.conftest import Command, fine, refused
from tests.slurm.emulated.links import await_gone, needs_namespaces, needs_tun, processes
from tests.worker.runs import start_command, wait_for

RUN = (
    "cluster=netns", "task=cnn_digits", "profile=smoke", "workers=3", "cluster.workers_per_node=2",
    "launch.on_mismatch=label", "train.validate=never",
)  # fmt: skip


LONG = ("cluster.by=relay", "cluster.link.beta_s_per_byte=8e-8")


def alone(alpha_s: str) -> EmulatedLink:
    """Return a link that no other run of this machine has."""
    return EmulatedLink("", float(alpha_s), None)


def recorded(here: Command, results: Path, alpha_s: str, *words: str) -> dict[str, Any]:
    """Return the record of a run over such a link, of which nothing is left."""
    fine(here("run", *words, "method=topk", f"cluster.link.alpha_s={alpha_s}"))
    (attempt,) = Store(results / "runs").list_newest_valid_attempts()
    await_gone(alone(alpha_s))
    return attempt.manifest


@needs_namespaces
@pytest.mark.own_processes
def test_a_run_s_workers_meet_over_the_link_and_its_record_says_what_they_found(
    here: Command, tmp_path: Path
) -> None:
    """The bytes of the interfaces, too, as workers have a node each: what was counted, and headers."""
    words = [word for word in RUN if not word.startswith("cluster.workers_per_node")]
    manifest = recorded(here, tmp_path / "results", "0.000123", *words)
    machine = manifest["provenance"]["machine"]
    assert machine["checked"] == ["link"]
    link = machine["link"]
    assert (link["asked_gbit_s"], link["asked_latency_s"]) == (1.0, 0.000123)
    assert link["congestion"]
    assert len(link["pairs_gbit_s"]) == 3
    # On the loopback interface it would be ten times as much, whatever else the machine does.
    assert max(link["pairs_gbit_s"]) < 1.2
    found = manifest["interface"]
    assert 0 < found["counted_bytes"] <= found["sent_bytes"]
    assert counters.explain_uncounted_bytes(found, 3) == ""


@pytest.mark.extended
@needs_tun
@needs_namespaces
@pytest.mark.own_processes
def test_a_run_over_a_long_link_says_what_its_relay_did(here: Command, tmp_path: Path) -> None:
    """Its workers sent nothing but what it handed over."""
    manifest = recorded(here, tmp_path / "results", "0.002125", *RUN, *LONG)
    link = manifest["provenance"]["machine"]["link"]
    assert (link["by"], link["delay_s"]) == ("relay", 0.002125)
    assert link["latency_s"] > 0.002125
    assert len(link["pairs_gbit_s"]) == 2  # of two nodes
    assert max(link["pairs_gbit_s"]) < 0.12
    assert manifest["relay"]["bytes"] > 2 * 0.8e7  # a transfer of the probe, to each node
    (attempt,) = Store(tmp_path / "results" / "runs").list_newest_valid_attempts()
    assert "over 1 ms late" in captions.emulated_link_measurements_remark(load_attempt(attempt)[0])


@pytest.mark.extended
@needs_tun
@needs_namespaces
def test_a_relay_that_is_killed_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    own = ("method=dense", "train.steps=100000", "cluster.link.alpha_s=0.002126")
    starter = start_command(tmp_path / "results", "run", *RUN, *LONG, *own, TMPDIR=str(tmp_path))
    wait_for(tmp_path, "results/launch/*/worker2.json")
    (relay,) = [pid for pid in processes(alone("0.002126")) if psutil.Process(pid).exe().count("/relay-")]
    os.kill(relay, signal.SIGKILL)
    _, said = starter.communicate(timeout=60)
    assert starter.returncode == 1
    assert "failed: the emulated network ended" in said
    store = Store(tmp_path / "results" / "runs")
    (attempt,) = store.list_attempts(*store.list_run_ids())
    assert (attempt.state, attempt.manifest["failure"]) == ("failed", "killed")
    await_gone(alone("0.002126"))


@needs_namespaces
def test_two_at_once_are_refused_before_anything_is_begun(here: Command, tmp_path: Path) -> None:
    """The next one may begin when one has ended."""
    with local.acquire_emulation_lock_or_raise():
        refused(
            here("run", *RUN, "method=dense"), "has a run with cluster=netns under way", "cluster=virtual"
        )
    assert not (tmp_path / "results" / "runs").exists()
    with local.acquire_emulation_lock_or_raise():
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


def test_a_timed_run_on_emulated_links_is_alone_on_the_machine() -> None:
    run = PlannedRun(compose.resolve([*RUN, "method=dense"]), None)
    assert run.config.num_processes == 3
    assert not local.has_room_for(run, [run])
