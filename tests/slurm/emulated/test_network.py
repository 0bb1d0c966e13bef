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

from slurm.emulated import switch
from slurm.emulated.network import (
    UNSHARE_AS_ROOT,
    EmulatedLink,
    EmulatedNetwork,
    check_emulation_by_trial,
    unshare_command,
)
from tests.conftest import ROOT, there
from tests.slurm.emulated.links import a_link, await_gone, devices, needs_namespaces, opened, processes

SLOW, FAST = 4e6, 1e9  # bytes per second
SET_UPS, KILLED = 6, 2
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
wait = [*made.nsenter_command(1), sys.executable, "-c", "input()", sys.argv[1]]
subprocess.run(wait, stdin=lifeline())
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    """Ask anew what this machine allows, which is asked once in a process's life."""
    unshare_command.cache_clear()
    yield
    unshare_command.cache_clear()


def python(made: EmulatedNetwork, node: int, code: str, *words: str) -> subprocess.Popen[str]:
    command = [*made.nsenter_command(node), sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def seconds_to_send(made: EmulatedNetwork, senders: list[int], num_bytes: int) -> float:
    """From these nodes to node 0, all at once."""
    with python(made, 0, RECEIVE, str(len(senders))) as receiver:
        assert there(receiver.stdout).readline() == "ready\n"
        began = time.perf_counter()
        ends = [python(made, node, SEND, switch.node_address(0), str(num_bytes)) for node in senders]
        for end in ends:
            with end:
                assert end.wait(30) == 0
        assert receiver.wait(30) == 0
        return time.perf_counter() - began


@needs_namespaces
def test_what_two_nodes_send_to_a_third_takes_its_port_as_long_as_both() -> None:
    """So a switch's port is limited, too: incast is no faster than the receiver's link."""
    with opened(a_link(SLOW), 3) as made:
        assert seconds_to_send(made, [1, 2], 1_000_000) > 0.9 * 2_000_000 / SLOW


@needs_namespaces
def test_nodes_see_each_other_and_nothing_else_and_the_machine_sees_none_of_them() -> None:
    before = devices()
    link = a_link(FAST)
    with opened(link, 2) as made:
        assert [line.split()[1] for line in printed(made, "-o", "-4", "addr").splitlines()] == ["lo", "eth0"]
        assert printed(made, "route").split()[:3] == ["10.77.0.0/16", "dev", "eth0"]
        assert devices() == before
        assert processes(link)
        # Ctrl-C is for the starter alone: its workers save before the network may go.
        assert os.getpgid(made.pid) != os.getpgid(0)
    await_gone(link)
    made.close()  # harmless


def printed(made: EmulatedNetwork, *words: str) -> str:
    """Return what ip prints on node 0."""
    return subprocess.run(
        [*made.nsenter_command(0), "ip", *words], capture_output=True, text=True, check=True
    ).stdout


@needs_namespaces
def test_nothing_is_left_of_networks_that_were_ended_or_killed_half_way() -> None:
    """Networks come one after the other, with a process on a node.

    Some are killed at any moment, also during the set-up. No process is left, and without one there is no
    namespace that has no name.
    """
    drawn = random.Random(0)
    before = devices()
    fatal = drawn.sample(range(SET_UPS), KILLED)
    for at in range(SET_UPS):
        link = a_link(FAST)
        if at in fatal:
            command = [sys.executable, "-c", STARTER, json.dumps(link._asdict())]
            with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as starter:
                time.sleep(drawn.uniform(0, KILLED_WITHIN_S))
                starter.kill()
        else:
            with opened(link, 3) as made:
                subprocess.run([*made.nsenter_command(2), "true"], check=True)
        await_gone(link)
    assert devices() == before


@needs_namespaces
def test_a_holder_that_is_killed_takes_its_network_with_it() -> None:
    link = a_link(FAST)
    with opened(link, 2) as made:
        os.kill(made.pid, signal.SIGKILL)
        await_gone(link)


@pytest.mark.parametrize(
    ("link", "nodes", "sentence"),
    [
        (("loopback", None, None), 2, "has beta_s_per_byte=None, so there is no bandwidth"),
        (("mine", 0, 0), 2, "has beta_s_per_byte=0.*above 0"),
        (("mine", 0, 1e-9), 1001, "1000 nodes at most, and this one would have 1001; take fewer workers"),
        (("test", 11.0, 1e-6), 2, "has alpha_s=11, and no run would end over it; take 10 at most"),
        (("test", 0.02, 1e-6, 1.0), 2, "has down_s_per_byte=1, and"),
    ],
)
def test_links_over_which_no_run_would_end_are_refused(
    link: tuple[Any, ...], nodes: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_emulation_by_trial(EmulatedLink(*link), nodes)


@pytest.mark.parametrize(
    ("platform", "sentence"),
    [
        ("linux", r"tc is not on the PATH; install iproute2, or take cluster=virtual"),
        ("darwin", r"Linux's network namespaces, and this is darwin; take cluster=virtual"),
    ],
)
def test_a_machine_that_can_have_no_networks_is_told_why(
    platform: str, sentence: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with pytest.raises(ValueError, match=sentence):
        unshare_command()


@pytest.mark.parametrize("allowed", [("unshare", "--net"), ("unshare", "--map-root-user", "--net"), None])
def test_root_comes_first_then_a_user_namespace_then_the_reasons(
    fresh: None, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...] | None
) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        is_refused = tuple(command[:-1]) != allowed
        return SimpleNamespace(returncode=is_refused, stderr=f"{len(command)} words: not permitted\n")

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    if allowed:
        assert (unshare_command() == UNSHARE_AS_ROOT) == (len(allowed) == 2)
    else:
        with pytest.raises(
            ValueError, match=r"\(3 words: not permitted\).*\(4 words: not permitted\); run it as root"
        ):
            unshare_command()


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
        check_emulation_by_trial(a_link(FAST), 2)


def test_nodes_have_different_addresses_of_one_network() -> None:
    addresses = {switch.node_address(node) for node in range(switch.MOST_NODES)}
    assert len(addresses) == switch.MOST_NODES
    assert switch.node_address(255) == "10.77.1.0"
