"""Links with distance: packets take as long as asked, at the rates asked, in their order; what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurm.emulated import relay, switch
from slurm.emulated.network import (
    UNSHARE_AS_ROOT,
    EmulatedLink,
    EmulatedNetwork,
    check_emulation_by_trial,
    has_netem,
    unshare_command,
)
from slurm.worker_process import open_lifeline_pipe
from tests.conftest import ROOT
from tests.launch.troubled import await_
from tests.slurm.emulated.links import await_gone, needs_namespaces, needs_tun, opened

WAY_S, UP, DOWN = 0.02, 2e6, 8e6  # seconds one way; bytes a second up and down
# Both ends in one process, which goes from node to node (setns), so that one clock tells all.
MEASURED = """
import json, os, socket, sys, time
from slurm.emulated import switch
from slurm.worker_process import kill_self_when_stdin_closes
kill_self_when_stdin_closes()
asked = json.loads(sys.argv[1])
def at(node):
    switch.enter_network_namespace(os.open(f"/proc/{asked['pid']}/fd/{asked['nodes'][node]}", os.O_RDONLY))
at(0); server = socket.create_server((switch.node_address(0), 5000))
at(1); out = socket.create_connection((switch.node_address(0), 5000))
back = server.accept()[0]
for end in (out, back):
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def sent(here, there, content):
    began = time.perf_counter()
    here.setblocking(False); there.setblocking(False)
    left, got = memoryview(content), b""
    while len(got) < len(content):
        for _ in range(64):
            try:
                left = left[here.send(left[:1 << 16]):] if left else left
                got += there.recv(1 << 20)
            except BlockingIOError:
                pass
        time.sleep(1e-4)
    assert got == content
    return time.perf_counter() - began
drawn = os.urandom(asked["bytes"])
ways = [sent(out, back, b"1") for _ in range(5)] + [sent(back, out, b"2") for _ in range(5)]
sent(out, back, drawn)  # TCP's window opens
print(json.dumps({"ways": ways, "many_s": sent(out, back, drawn)}))
"""


def far(**also: Any) -> EmulatedLink:
    """Return a long link that no other test has at this time."""
    return EmulatedLink("test", WAY_S + os.getpid() * 1e-9, 1 / UP, 1 / DOWN, **also)


class Taken(NamedTuple):
    """Seconds of a byte each way, ten times, and of many bytes up from node 1 to node 0."""

    ways: list[float]
    many_s: float


def measured(made: EmulatedNetwork, num_bytes: int) -> Taken:
    """Measure what sending takes."""
    asked = json.dumps({"pid": made.pid, "nodes": made.namespaces, "bytes": num_bytes})
    command = [*made.nsenter_command(0), sys.executable, "-c", MEASURED, asked]
    done = subprocess.run(
        command, stdin=open_lifeline_pipe(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return Taken(**json.loads(done.stdout))


@needs_tun
@needs_namespaces
def test_a_packet_takes_the_delay_and_many_take_the_slower_rate_as_well() -> None:
    """No less than asked; that it is not much more is measured before each run, on a quiet machine."""
    with opened(far(), 2, "relay") as made:
        found = measured(made, 1_000_000)
        assert min(found.ways) >= WAY_S
        assert found.many_s >= WAY_S + 0.99 * 1_000_000 / UP
        assert made.facts["by"] == "relay"
        assert made.facts["delay_s"] == pytest.approx(WAY_S, rel=0.01)
        assert made.facts["window_bytes"] >= 4 * 2 * WAY_S * DOWN


@needs_tun
@needs_namespaces
def test_a_relay_runs_where_it_is_told_to() -> None:
    (cpu, *_) = cpus = sorted(os.sched_getaffinity(0))
    for asked in ([cpu], []):
        with opened(far(), 2, "relay", asked) as made:
            assert sorted(os.sched_getaffinity(made.pid)) == (asked or cpus)
            assert made.facts.get("relay_cpus") == (asked or None)


@needs_tun
@needs_namespaces
def test_what_gets_lost_or_takes_longer_comes_whole_and_in_order_all_the_same() -> None:
    """This is TCP's work; the relay tells how many packets it lost."""
    with opened(far(jitter_s=0.005, loss=0.05), 2, "relay") as made:
        measured(made, 300_000)
        assert made.statistics is not None
        told = wait_for_packets(made.statistics)
        assert told["lost"] > 0
        assert told["bytes"] > 2 * 300_000


def wait_for_packets(statistics: Path) -> dict[str, float]:
    """Return what the relay has told, after the next time that it tells."""
    before = statistics.read_text()
    await_(lambda: statistics.read_text() != before, "what the relay tells", 30)
    told: dict[str, float] = json.loads(statistics.read_text())
    return told


@needs_tun
@needs_namespaces
def test_nothing_is_left_of_a_relay_and_who_waits_for_it_is_told() -> None:
    link = far()
    with opened(link, 3, "relay") as made:
        statistics = made.statistics
        assert not made.has_ended
        os.kill(made.pid, signal.SIGKILL)
        await_gone(link)
        assert made.holder.wait(10)
        assert made.has_ended
    assert statistics is not None
    assert not statistics.exists()


def test_a_machine_without_tun_devices_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(switch, "make_relayed_nodes", lambda nodes, asked: switch.open_tun_device("eth0"))
    monkeypatch.setattr(switch, "TUN", "/dev/null")  # no device of that kind
    assert switch.hold_network('{"nodes": 2, "alpha_s": 0.05, "beta_s_per_byte": 8e-8, "relay": "none"}') == 2
    why = json.loads(capsys.readouterr().out)["why"]
    assert why.startswith("a long link needs TUN devices, and /dev/null gives none: ")
    assert "load the module (modprobe tun)" in why


def test_a_user_who_may_not_have_tun_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        switch.NetworkSetupError, match=r"Permission denied; let all users have it.*chmod 666 /dev/net/tun"
    ):
        switch.open_tun_device("eth0")


def packet(node: int, size: int) -> bytes:
    """Return a packet that says nothing but for whom it is."""
    return (b"\x45" + bytes(15) + bytes((10, 0, 0, node + 1))).ljust(size, b"\0")


def test_an_acknowledgement_does_not_wait_for_the_data_of_its_own_pair() -> None:
    """Two nodes that send to each other would otherwise each wait for what the other sends."""
    (node, from_node), (other, to_other) = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)
    )
    sizes = [5000] * 20 + [40, 60]  # those at the end are the small ones
    for size in sizes:
        node.send(packet(1, size))
    shared = (os.memfd_create("statistics"), from_node.fileno(), to_other.fileno())
    words = ["0.01", "0", "0", "1e-6", "1e-6", "1", "0"]
    program = [str(relay.ensure_relay_compiled()), *words, *map(str, shared)]
    running = subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=shared)
    found = [len(other.recv(1 << 16)) for _ in sizes]
    running.communicate(timeout=30)
    assert sorted(found) == sorted(sizes)
    assert found.index(40) < found.index(60) < 10
    for each in (node, from_node, other, to_other):
        each.close()
    os.close(shared[0])


@needs_namespaces
def test_what_a_kernel_can_not_do_is_refused() -> None:
    if not has_netem():
        with pytest.raises(
            ValueError, match=r"cluster.by=netem: this kernel has none.*take cluster.by=relay"
        ):
            check_emulation_by_trial(far(), 2, by="netem")


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"no compiler for its relay: none of c\+\+, g\+\+, clang\+\+"):
        relay.ensure_relay_compiled()


@needs_namespaces
def test_a_relay_that_is_to_stay_outlives_its_starter() -> None:
    """As the development cluster starts it: by Python alone, from a link's file, without any input."""
    words = [sys.executable, "-m", "slurm.emulated.network", str(ROOT / "conf/link/wifi.yaml"), "2"]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    told = json.loads(asked)
    assert told["jitter_s"] == 0.005
    if not told.get("relay") or unshare_command() != UNSHARE_AS_ROOT:
        pytest.skip("this kernel delays by itself, or this user has no network namespaces of the machine's")
    command = ["unshare", "--net", sys.executable, switch.__file__, asked, "stay"]
    holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        made = json.loads(holder.stdout.readline())
        assert made["by"] == "relay"
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()
