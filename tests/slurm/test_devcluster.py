"""Laws of the development cluster: what the other tests on SLURM stand on."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import psutil
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
    """Return the command lines of processes whose environment names the cluster: daemons, users, jobs."""
    processes = psutil.process_iter(["environ", "cmdline"])  # of what has ended meanwhile, nothing
    users = (process.info for process in processes if str(state) in str(process.info["environ"]))
    return [" ".join(info["cmdline"] or ()) for info in users]


def test_wrong_words_are_refused_with_a_sentence() -> None:
    wrong = {
        "SPARSIFY_SLURM=oldest up": "is system or newer, not 'oldest'",
        "up maybe": "ACCOUNTING is yes or no, not 'maybe'",
        "up yes wet_string": "LINK=wet_string is no file of conf/link; there are: ethernet ",
        "up yes loopback": "LINK=loopback has no beta_s_per_byte, so there is no bandwidth",
        "down now": "down knows only --purge, not 'now'",
        "node n9 kill": "NAME one of n1 n2 n3 n4",
    }
    for line, sentence in wrong.items():
        assert sentence in say(
            {**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}, "env", *line.split(), code=2
        )
