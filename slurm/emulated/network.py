"""An emulated network of one machine, for whoever starts processes on its nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slurm.emulated import switch
from slurm.emulated.relay import ensure_relay_compiled

PACKAGE_BY_PROGRAM = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
UNSHARE_AS_ROOT = ("unshare", "--net")
UNSHARE_AS_USER = ("unshare", "--map-root-user", "--net")
RELAY_ADVICE = "take cluster.by=relay, which needs none"
MOST_RELAYED_BIT_S = 10e9  # of one bit per second, a relay takes a tenth of a core
# Beyond these the probe, which sends some MB and waits for a hundred ways, takes hours or never ends: TCP
# waits twice as long after each answer that does not come.
LARGEST_VALUE_BY_FIELD = {"alpha_s": 10.0, "loss": 0.3, "beta_s_per_byte": 8e-6, "down_s_per_byte": 8e-6}
VIRTUAL_ADVICE = "take cluster=virtual, which simulates the link, or another machine"
DelayMethod = Literal["auto", "netem", "relay"]
LONG_DELAY_S = 1e-3  # from there on, a delay is longer than starting a message takes anyway
HOLDER_GRACE_S = 10.0  # that the holder gets to end by itself


class EmulatedLink(NamedTuple):
    """The link of a node to the others."""

    name: str  # a choice of conf/link
    alpha_s: float | None
    beta_s_per_byte: float | None
    down_s_per_byte: float | None = None  # None: as much as the other way
    jitter_s: float = 0.0
    loss: float = 0.0
    windows: str = "raised"  # TCP's; or the system's

    @property
    def needs_delay_emulation(self) -> bool:
        """True if the link is long, or loses packets, or its two directions differ."""
        return (self.alpha_s or 0) >= LONG_DELAY_S or bool(self.jitter_s or self.loss or self.down_s_per_byte)


class EmulatedNetwork:
    """Nodes joined by links of one kind, until `close`, or until this process ends, however it does.

    Args:
        nodes: number of nodes.
        by: what delays packets that travel far: netem, a relay, or auto: netem where the kernel has it.
        relay_cpus: CPUs on which a relay runs, if there is one; empty: on any.

    Raises:
        ValueError: this machine can't have one, or the link can't be emulated.
    """

    def __init__(
        self, link: EmulatedLink, nodes: int, by: DelayMethod = "auto", relay_cpus: Sequence[int] = ()
    ) -> None:
        from slurm.worker_process import (
            die_with_parent_and_block_signals,  # needs packages, which `print_holder_request` does without
        )

        request = holder_request(link, nodes, by, relay_cpus)
        self.holder = subprocess.Popen(
            [*unshare_command(), sys.executable, switch.__file__, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the starter, which lets workers save before this ends
            preexec_fn=partial(die_with_parent_and_block_signals, os.getpid(), ()),
        )
        try:
            description = self._read_description()
        except BaseException:
            self.close()
            raise
        # Facts for the record: what makes links slow, the delay, TCP's settings; see `switch.hold_network`.
        self.facts = description
        self.pid: int = description.pop("pid")  # of the holder
        self.namespaces: list[int] = description.pop("nodes")  # the holder's descriptors of them
        # The file with the relay's statistics, for as long as it is there; None without a relay.
        statistics = description.pop("statistics", None)
        self.statistics = None if statistics is None else Path(f"/proc/{self.pid}/fd/{statistics}")

    def _read_description(self) -> dict[str, Any]:
        """Return the holder's description of the network that it has made.

        Raises:
            ValueError: it could not make one.
        """
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        answer: dict[str, Any] = json.loads(self.holder.stdout.readline() or b"{}")
        if "pid" in answer:
            return answer
        why = answer.get("why") or self.holder.stderr.read().decode(errors="replace").strip()
        raise ValueError(f"cluster=netns can't have its network here ({why}); {VIRTUAL_ADVICE}")

    def nsenter_command(self, node: int) -> list[str]:
        """Return the words before a command that let it run on a node, counted from 0."""
        holder = Path("/proc", str(self.pid))
        words = ["nsenter", f"--net={holder / 'fd' / str(self.namespaces[node])}", "--"]
        if unshare_command() == UNSHARE_AS_USER:
            words[1:1] = [f"--user={holder / 'ns/user'}", "--preserve-credentials"]
        return words

    @property
    def has_ended(self) -> bool:
        """True if the holder has ended, or the relay that it goes on as: nothing joins the nodes any more."""
        return self.holder.poll() is not None

    def close(self) -> None:
        """End the network; it is gone once the processes on its nodes are."""
        for stream in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.holder.wait(HOLDER_GRACE_S)
        self.holder.kill()
        self.holder.wait()


def holder_request(
    link: EmulatedLink, nodes: int, by: DelayMethod = "auto", relay_cpus: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the request for the holder of a network, see `slurm.emulated.switch`.

    Raises:
        ValueError: as `EmulatedNetwork`.
    """
    check_link(link, nodes)
    request: dict[str, Any] = {"nodes": nodes}
    request |= {name: value for name, value in link._asdict().items() if value is not None}
    if by == "netem" and not has_netem():
        raise ValueError(
            f"cluster.by=netem: this kernel has none (tc qdisc add ... netem fails); {RELAY_ADVICE}"
        )
    if by == "relay" or (link.needs_delay_emulation and not has_netem()):
        check_relay_rate(link)
        request |= {"relay": str(ensure_relay_compiled()), "relay_cpus": [*relay_cpus]}
    return request


def read_link_file(path: Path) -> EmulatedLink:
    """Return the link that a file of conf/link describes: its numbers, a line each."""
    pairs = re.findall(r"^(\w+): *([-+.\de]+)", path.read_text(), re.MULTILINE)
    numbers: dict[str, Any] = {name: float(number) for name, number in pairs if name in EmulatedLink._fields}
    return EmulatedLink(path.stem, None, None)._replace(**numbers)


def check_link(link: EmulatedLink, nodes: int) -> None:
    """Check that a link can be emulated at all.

    Raises:
        ValueError: no bandwidth follows from this link, or nothing can have so many nodes.
    """
    if not link.beta_s_per_byte:
        raise ValueError(
            f"link={link.name} has beta_s_per_byte={link.beta_s_per_byte}, so there is no bandwidth to "
            "emulate; choose a link with a number above 0, such as link=ethernet_1g"
        )
    for name, largest in LARGEST_VALUE_BY_FIELD.items():
        value = getattr(link, name) or 0
        if value > largest:
            raise ValueError(
                f"link={link.name} has {name}={value:g}, and no run would end over it; take {largest:g} at "
                "most"
            )
    if link.jitter_s > (link.alpha_s or 0):
        raise ValueError(
            f"link={link.name} has jitter_s={link.jitter_s:g} and alpha_s={link.alpha_s or 0:g}, and no "
            "packet comes before it was sent; take a jitter that is no longer than the delay"
        )
    if nodes > switch.MOST_NODES:
        raise ValueError(
            f"an emulated network has {switch.MOST_NODES} nodes at most, and this one would have {nodes}; "
            "take fewer workers, or a larger cluster.workers_per_node, or cluster=virtual"
        )


def check_relay_rate(link: EmulatedLink) -> None:
    """Check that a relay can carry what a node of this link sends and receives.

    Raises:
        ValueError: it can't.
    """
    assert link.beta_s_per_byte is not None
    rate = switch.bandwidth_bit_s(min(link.beta_s_per_byte, link.down_s_per_byte or link.beta_s_per_byte))
    if rate > MOST_RELAYED_BIT_S:
        raise ValueError(
            f"link={link.name} has {rate / 1e9:g} Gbit/s, and a relay carries {MOST_RELAYED_BIT_S / 1e9:g} "
            "at most; take a slower link, or alpha_s below 1 ms without jitter and loss, which needs no relay"
        )


@cache
def unshare_command() -> tuple[str, ...]:
    """Return the words before a command that let it run in a network namespace of its own.

    Raises:
        ValueError: this process may make none; the message says why.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"cluster=netns needs Linux's network namespaces, and this is {sys.platform}; {VIRTUAL_ADVICE}"
        )
    missing = [program for program in PACKAGE_BY_PROGRAM if shutil.which(program) is None]
    if missing:
        packages = " and ".join(dict.fromkeys(PACKAGE_BY_PROGRAM[program] for program in missing))
        raise ValueError(
            f"cluster=netns needs the programs {', '.join(PACKAGE_BY_PROGRAM)}, and {', '.join(missing)} is "
            f"not on the PATH; install {packages}, or {VIRTUAL_ADVICE}"
        )
    errors = []
    for command in (UNSHARE_AS_ROOT, UNSHARE_AS_USER):
        process = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        if process.returncode == 0:
            return command
        errors.append(process.stderr.strip())
    raise ValueError(
        f"cluster=netns needs network namespaces, and this machine allows none, neither as this user "
        f"({errors[0]}) nor in a user namespace ({errors[1]}); run it as root, in a container with "
        "--cap-add=SYS_ADMIN, or allow user namespaces (sysctl user.max_user_namespaces), or "
        f"{VIRTUAL_ADVICE}"
    )


@cache
def has_netem() -> bool:
    """Tell whether this kernel can delay packets."""
    add_delay = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run([*unshare_command(), *add_delay], capture_output=True, check=False).returncode == 0


def check_emulation_by_trial(link: EmulatedLink, nodes: int, by: DelayMethod = "auto") -> None:
    """Check that this machine can emulate a link, by making a network.

    Raises:
        ValueError: it can't.
    """
    check_link(link, nodes)
    EmulatedNetwork(link, 1, by).close()


def print_holder_request(link_file: str, nodes: str) -> int:
    """Print the request for the holder of the development cluster's network; return the exit code.

    Args:
        link_file: file of conf/link.
        nodes: number of nodes.
    """
    try:
        unshare_command()
        print(json.dumps(holder_request(read_link_file(Path(link_file)), int(nodes))))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(print_holder_request(*sys.argv[1:]))
