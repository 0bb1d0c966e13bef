"""Networks of nodes on this machine: slow as asked, apart from the machine's own, and gone at the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slurm.emulated import network, switch
from slurm.emulated.network import EmulatedLink, EmulatedNetwork, check, has_root
from tests.conftest import ROOT, there
from tests.slurm.emulated.links import a_link, await_gone, devices, needs_namespaces, processes

SLOW, FAST = 4e6, 1e9  # bytes per second
SET_UPS, KILLED = 6, 2  # the same with 50 and 10 by `python tests/slurm/emulated/test_network.py`
KILLED_WITHIN_S = 0.5
# Receives from so many senders, and tells when all has come; sends so many bytes to a node.
RECEIVE = """
import socket, sys, threading
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
def drain(connection):
    while connection.recv(1 << 16):
        pass
threads = [threading.Thread(target=drain, args=[server.accept()[0]]) for _ in range(int(sys.argv[1]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))
"""
STARTER = """
import json, subprocess, sys
from slurm.emulated.network import EmulatedLink, EmulatedNetwork
from slurm.worker_process import lifeline
made = EmulatedNetwork(EmulatedLink(**json.loads(sys.argv[1])), 3)
wait = [*made.enter(1), sys.executable, "-c", "input()", sys.argv[1]]
subprocess.run(wait, stdin=lifeline())
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    """What this machine allows is asked once in a process's life; a test wants its own."""
    has_root.cache_clear()
    yield
    has_root.cache_clear()


def python(made: EmulatedNetwork, node: int, code: str, *words: str) -> subprocess.Popen[str]:
    command = [*made.enter(node), sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def seconds_to_send(made: EmulatedNetwork, senders: list[int], num_bytes: int) -> float:
    """From these nodes to node 0, all at once."""
    with python(made, 0, RECEIVE, str(len(senders))) as receiver:
        assert there(receiver.stdout).readline() == "ready\n"
        began = time.perf_counter()
        ends = [python(made, node, SEND, switch.address(0), str(num_bytes)) for node in senders]
        for end in ends:
            with end:
                assert end.wait(30) == 0
        assert receiver.wait(30) == 0
        return time.perf_counter() - began


@needs_namespaces
def test_what_two_nodes_send_to_a_third_takes_its_port_as_long_as_both() -> None:
    """So a switch's port is limited, too: incast is no faster than the receiver's link."""
    made = EmulatedNetwork(a_link(SLOW), 3)
    try:
        assert seconds_to_send(made, [1, 2], 1_000_000) > 0.9 * 2_000_000 / SLOW
    finally:
        made.close()


@needs_namespaces
def test_nodes_see_each_other_and_nothing_else_and_the_machine_sees_none_of_them() -> None:
    before, link = devices(), a_link(FAST)
    made = EmulatedNetwork(link, 2)
    try:
        listed = subprocess.run(
            [*made.enter(0), "ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True
        )
        assert [line.split()[1] for line in listed.stdout.splitlines()] == ["lo", "eth0"]
        routes = subprocess.run([*made.enter(0), "ip", "route"], capture_output=True, text=True, check=True)
        assert routes.stdout.split()[:3] == ["10.77.0.0/16", "dev", "eth0"]
        assert devices() == before
        assert processes(link)
    finally:
        made.close()
    await_gone(link)
    made.close()  # harmless


def set_up_and_tear_down(times: int, killed: int, seed: int) -> None:
    """Networks with a process on a node, one after the other, some killed at any moment, also during the
    set-up. No process is left, and without one there is no namespace that has no name.
    """
    drawn, before = random.Random(seed), devices()
    fatal = set(drawn.sample(range(times), killed))
    for at in range(times):
        link = a_link(FAST)
        if at in fatal:
            command = [sys.executable, "-c", STARTER, json.dumps(link._asdict())]
            with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as starter:
                time.sleep(drawn.uniform(0, KILLED_WITHIN_S))
                starter.kill()
        else:
            made = EmulatedNetwork(link, 3)
            subprocess.run([*made.enter(2), "true"], check=True)
            made.close()
        await_gone(link)
    assert devices() == before


@needs_namespaces
def test_nothing_is_left_of_networks_that_were_ended_or_killed_half_way() -> None:
    set_up_and_tear_down(SET_UPS, KILLED, seed=0)


@needs_namespaces
def test_a_holder_that_is_killed_takes_its_network_with_it() -> None:
    link = a_link(FAST)
    made = EmulatedNetwork(link, 2)
    os.kill(made.made.pid, signal.SIGKILL)
    await_gone(link)
    made.close()


@needs_namespaces
def test_ctrl_c_is_for_the_starter_alone() -> None:
    """Its workers save before the network may go."""
    made = EmulatedNetwork(a_link(FAST), 1)
    try:
        assert os.getpgid(made.made.pid) != os.getpgid(0)
    finally:
        made.close()


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="link=loopback has beta_s_per_byte=None, so there is no bandwidth"):
        check(EmulatedLink("loopback", None, None), 2)
    with pytest.raises(ValueError, match=r"link=mine has beta_s_per_byte=0.*above 0"):
        check(EmulatedLink("mine", 0, 0), 2)
    with pytest.raises(
        ValueError, match=r"1000 nodes at most, and this one would have 1001; take fewer workers"
    ):
        check(EmulatedLink("mine", 0, 1e-9), 1001)


def test_a_machine_without_the_programs_is_told_which(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with pytest.raises(ValueError, match=r"tc is not on the PATH; install iproute2, or take cluster=virtual"):
        has_root()


def test_other_systems_are_told_what_to_do(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        ValueError, match=r"Linux's network namespaces, and this is darwin; take cluster=virtual"
    ):
        has_root()


@pytest.mark.parametrize("allowed", [("unshare", "--net"), ("unshare", "--map-root-user", "--net"), None])
def test_root_comes_first_then_a_user_namespace_then_the_reasons(
    fresh: None, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...] | None
) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        fine = tuple(command[:-1]) == allowed
        return SimpleNamespace(
            returncode=not fine, stderr="" if fine else f"{len(command)} words: not permitted\n"
        )

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    if allowed:
        assert has_root() == (len(allowed) == 2)
    else:
        with pytest.raises(
            ValueError, match=r"\(3 words: not permitted\).*\(4 words: not permitted\); run it as root"
        ):
            has_root()


@needs_namespaces
def test_what_the_kernel_lacks_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Here: a tc that knows no token bucket."""
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\ncat >/dev/null\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 1\n")
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        ValueError, match=r"\(tc: Error: Specified qdisc kind is unknown.\); take cluster=virtual"
    ):
        check(a_link(FAST), 2)


def test_in_a_user_namespace_both_are_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EmulatedNetwork.__new__(EmulatedNetwork)
    made.made, made.in_user_namespace = network.MadeNetwork(12, [4, 5], "buckets", 0.0, "reno", 2**18), True
    user = ["--user=/proc/12/ns/user", "--preserve-credentials"]
    assert made.enter(1) == ["nsenter", *user, "--net=/proc/12/fd/5", "--"]
    made.in_user_namespace = False
    assert made.enter(0) == ["nsenter", "--net=/proc/12/fd/4", "--"]


if __name__ == "__main__":
    began = time.perf_counter()
    set_up_and_tear_down(50, 10, seed=1)
    print(f"50 networks, 10 of them killed: nothing is left; {time.perf_counter() - began:.1f} s")
