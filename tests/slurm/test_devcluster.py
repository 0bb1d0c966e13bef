"""Laws of the development cluster: what the other tests on SLURM stand on."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.slurm.devcluster import SCRIPTS, lacking, say, speaking_to

pytestmark = pytest.mark.slurm

# A life of a cluster that is nobody else's: in a network of its own, the ports are free. SLURM resolves no
# address on a machine that has only loopback ones, so it gets a documentation address (RFC 5737).
LIFE = """
set -e
ip link set lo up && ip address add 192.0.2.1/32 dev lo
"$0/up" no
sbatch --parsable --nodes=4 --output=/dev/null --wrap 'srun sleep 600'
until [ "$(squeue --noheader --steps --format=%i | grep -c '\\.0$')" = 1 ]; do sleep 0.1; done
echo "slurmds: $(pgrep -xc slurmd --nslist net --ns $$)"
"$0/node" n2 kill
echo "slurmds: $(pgrep -xc slurmd --nslist net --ns $$)"
"$0/up" no
echo "slurmds: $(pgrep -xc slurmd --nslist net --ns $$)"
"$0/up" no
"$0/up" no ethernet_1g
srun --nodes=2 bash "$0/enter" ip -o -4 address show dev eth0
"$0/down"
"""


def test_no_outgoing_connection_takes_the_port_of_a_daemon_that_is_down() -> None:
    """Its end would still hold the port for a minute, and the daemon could not start again."""
    taken, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    conf = [path.read_text() for pattern in ("*.conf", "*.cnf") for path in SCRIPTS.glob(pattern)]
    starts = re.findall(r"PORTS=(\d+)", (SCRIPTS / "common.sh").read_text())
    ends = [end for text in conf for end in re.findall(r"(?i)port=@PORTS@(\d\d)", text)]
    assert (len(starts), len(ends)) == (2, 9)
    assert max(int(start + end) for start in starts for end in ends) < taken


def test_down_leaves_no_process_not_even_of_a_running_job() -> None:
    if reason := lacking():
        pytest.skip(reason)
    if subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("a network of its own needs iproute2 and the right to have one")
    with tempfile.TemporaryDirectory() as short:  # the names of its sockets have a limit, pytest's have none
        state = Path(short) / "s"
        said = say(speaking_to(state), "unshare", "--net", "bash", "-c", LIFE, SCRIPTS)
        assert processes_of(state) == []
    assert re.findall(r"slurmds: (\d)", said) == ["4", "3", "4"]
    assert "started: n2." in said
    assert "already up" in said
    assert "started: switch." in said
    assert sorted(re.findall(r"inet 10\.77\.0\.(\d)/16", said)) == ["1", "2"]
    assert "SLURM is down" in said


def processes_of(state: Path) -> list[str]:
    """The command lines of those whose environment names the cluster: its daemons, its users, its jobs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(state).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or is the container's own
    return found


@pytest.mark.parametrize(
    ("slurm", "sentence"),
    [
        ("oldest", "SPARSIFY_SLURM (of make: SLURM) is system or newer, not 'oldest'"),
        ("newer", "there is no newer SLURM here; say: sudo slurm/devcluster/install --newer"),
    ],
)
def test_a_slurm_that_is_not_there_is_named(tmp_path: Path, slurm: str, sentence: str) -> None:
    if reason := lacking("system"):
        pytest.skip(reason)
    own = {"SPARSIFY_SLURM": slurm, "XDG_CACHE_HOME": str(tmp_path)}
    with tempfile.TemporaryDirectory() as short:  # sockets have short names
        state = Path(short) / "state"
        assert sentence in say({**speaking_to(state), **own}, SCRIPTS / "up", code=2)
        assert not state.exists()


def test_wrong_words_are_refused_with_a_sentence() -> None:
    wrong = {
        "up maybe": "ACCOUNTING is yes or no, not 'maybe'",
        "up yes wet_string": "LINK=wet_string is no file of conf/link; there are: ethernet ",
        "up yes loopback": "LINK=loopback has no beta_s_per_byte, so there is no bandwidth",
        "down now": "down knows only --purge, not 'now'",
        "node n9 kill": "NAME one of n1 n2 n3 n4",
    }
    for line, sentence in wrong.items():
        script, *words = line.split()
        done = subprocess.run([SCRIPTS / script, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert sentence in done.stderr
