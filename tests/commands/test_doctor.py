"""`doctor` finds what was planted, and nothing where all is well."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.commands import doctor as command
from experiments.commands._health import Examined, Health
from experiments.config import compose
from experiments.launch import examination, probe
from experiments.launch.examination import Met, Probed
from experiments.launch.probe import Facts
from slurm import images, partition
from slurm.partition import PartitionNode
from tests.conftest import Command, environment_for, fine, refused
from tests.slurm.devcluster import SCRIPTS, devcluster, lacking, say, speaking_to

__all__ = ["devcluster"]  # a fixture is found by its name in this module
IMAGE = Path.home() / ".cache" / "sparsify" / "images" / "thin.sif"

# A cluster of its own (see test_devcluster), a fault on each node but n1: n2 has no Python, n3 does not
# see the results, n4 has no program for containers. Only the mounts of their own slurmd differ.
PLANTED = """
set -e
ip link set lo up && ip address add 192.0.2.1/32 dev lo
"$SCRIPTS/up" no
. "$SCRIPTS/common.sh"
for name in n2 n3 n4; do
    "$SCRIPTS/node" $name kill
    case $name in
    n2) fault="mount -t tmpfs none $(dirname "$PYTHON")" ;;
    n3) fault="mount -t tmpfs none $SPARSIFY_RESULTS" ;;
    n4) fault="mount --bind /dev/null $RUNTIME" ;;
    esac
    start $name unshare --mount bash -c "$fault && exec slurmd -N $name -f $SLURM_CONF"
    await $name "did not become ready" ready $name
done
"$PYTHON" -m experiments doctor cluster=devcluster cluster.slurm_conf="$SLURM_CONF" container="$CONTAINER" \
    cluster.interface=null cluster.max_array=5000 || echo "exit code $?"
"$SCRIPTS/down"
"""


@pytest.mark.slurm
def test_planted_faults_are_found_each_with_what_to_do(tmp_path: Path) -> None:
    if reason := lacking():
        pytest.skip(reason)
    if subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("a network of its own needs iproute2 and the right to have one")
    if sys.prefix == sys.base_prefix:
        pytest.skip("hiding this Python would hide the system's programs")
    runtime = images.runtime() if IMAGE.exists() else None
    (results := tmp_path / "results").mkdir()
    own = {
        "SCRIPTS": str(SCRIPTS), "PYTHON": sys.executable, "RUNTIME": runtime or "/dev/zero",
        "CONTAINER": "thin" if runtime else "none", "SPARSIFY_IMAGES": str(IMAGE.parent),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as short:  # sockets have short names
        surroundings = environment_for(results, **{**speaking_to(Path(short) / "s"), **own})
        said = say(surroundings, "unshare", "--net", "bash", "-c", PLANTED)
    faults = dict(line.split(maxsplit=2)[1:] for line in said.splitlines() if line.startswith("FAULT"))
    assert "exit code 1" in said
    assert f"there is no Python {sys.executable} that starts" in faults["n2"]
    assert "cluster.python" in faults["n2"]
    assert "does not see the results folder; let SPARSIFY_RESULTS be on a file system" in faults["n3"]
    assert "say max_array: 1000" in faults["arrays"]
    assert "\nmax_array: 1000\n" in said
    if runtime:
        assert faults["container"].startswith("n4: container=thin was asked for, but ")
    assert "works  results" in said
    assert len(faults) == (4 if runtime else 3), said
    assert "workers of n1 " in said


def facts(rank: int = 0, node: str = "n1", **other: object) -> Facts:
    """Those of a node where all is well."""
    well = {
        "python": "3.11.7", "name": ["10.0.0.1"], "interfaces": {"eth0": ["10.0.0.1"]}, "closed": "",
        "cores": [str(rank)],
        "gpus": dict.fromkeys(["07", "0F"], "NVIDIA A100-SXM4-80GB"), "visible_gpus": None,
        "lock": probe.HELD, "container": "",
        "runtime": None, "at": 100.0,
    }  # fmt: skip
    return Facts(node=node, rank=rank, **{**well, **other})  # type: ignore[arg-type]  # as they are written


def examined(*found: Facts, words: str = "", **other: object) -> Examined:
    """A node with these tasks."""
    config = compose.resolve(
        ["cluster=generic_slurm", "method=dense", "task=cnn_digits", "container=none", *words.split()]
    )
    one = Probed("n1", len(found), "1", found, is_over=True, submitted_at=99.0, seen_at=101.0)
    nodes = [PartitionNode("n1", "idle", 8, 1, 64000, "gpu:2", 24 * 60)]
    known = {"most_tasks": 1000, "nodes": nodes, **other}
    return Examined(config, [one], **known)  # type: ignore[arg-type]  # as above


# What was found -> the verdict, a part of its sentence, and the fields that follow.
JUDGED: list[tuple[Examined, str, str, dict[str, object]]] = [
    (examined(facts(), facts(1)), "works", "what nodes write is seen here: n1", {}),
    (examined(facts(at=50.0)), "note", "its clock is at least 49 s slow", {}),
    (examined(facts(at=200.0)), "note", "its clock is at least 99 s fast", {}),
    (examined(facts(lock=probe.NOT_HELD)), "note", "hold on one node only", {}),
    (examined(facts(lock=probe.NO_LOCKS)), "note", "can't be locked; submit from one machine at a time", {}),
    (examined(facts(lock="Stale file handle")), "FAULT", "can't be opened (Stale file handle)", {}),
    (examined(facts(container="no apptainer")), "FAULT", "n1: no apptainer", {}),
    (examined(facts(), no_container="no image"), "FAULT", "on this machine: no image", {}),
    (examined(facts(name=["127.0.1.1"])), "note", "own name resolves to 127.0.1.1, so workers go by", {}),
    (examined(facts(closed="gloo takes others")), "note", "n1: gloo takes others", {}),
    (examined(facts(name=[])), "note", "own name resolves to nothing", {}),
    (
        examined(facts(cores=["0,8"]), facts(1, cores=["0,8"])),
        "note", "[--hint=nomultithread] gives each core to one", {"sbatch": ["--hint=nomultithread"]},
    ),
    (examined(facts(cores=["0", "1"]), facts(1, cores=["0", "1"])), "note", "[--cpu-bind=cores]", {}),
    (examined(facts(gpus={}), words="device=cuda"), "FAULT", "workers see no GPU", {}),
    (examined(facts(), words="device=cuda cluster.gpu=h100"), "FAULT", "cluster.gpu=h100", {}),
    (
        examined(facts(visible_gpus=["0"]), facts(1, visible_gpus=["1"]), words="device=cuda"),
        "works", "each worker sees its own", {},
    ),
    (examined(facts(), words="device=cuda"), "works", "workers see all of their job", {}),
    (
        examined(facts(visible_gpus=["0"]), facts(1, visible_gpus=["0"]), words="device=cuda"),
        "FAULT", "2 workers see 1 GPUs; cluster.gres", {},
    ),
    (examined(facts(), most_tasks=500), "FAULT", "say max_array: 500", {"max_array": 500}),
    (examined(facts(), most_tasks=4000), "works", "of up to 4000 jobs", {"max_array": 4000}),
    (examined(facts(), words="cluster.time_min=9999"), "FAULT", "say time_min: 1440", {"time_min": 1440}),
    (examined(facts(), accounting="accounting_storage/none"), "note", "keeps no accounts", {}),
    (examined(facts(), met=Met(("n1", "n2"), ("ib0", "ib0"))), "works", "meet by ib0", {"interface": "ib0"}),
    (examined(facts(), met=Met(("n1", "n2"), ("ib0", "ib1"))), "works", "meet by ib0 and ib1", {}),
    (examined(facts(), met=Met(("n1", "n2"), (), "no way")), "FAULT", "workers of n1 and n2: no way", {}),
]  # fmt: skip


@pytest.mark.parametrize(("found", "verdict", "words", "fields"), JUDGED, ids=[case[2] for case in JUDGED])
def test_each_finding_has_its_verdict_and_its_fields(
    found: Examined, verdict: str, words: str, fields: dict[str, object]
) -> None:
    health = Health.of(found)
    matching = [finding for finding in health.findings if words in finding.text]
    assert [finding.verdict for finding in matching] == [verdict], health.findings
    assert fields.items() <= health.fields.items()
    assert health.is_well == (verdict != "FAULT")


def test_fields_stand_in_their_old_lines_and_new_ones_at_the_end() -> None:
    text = "# mine\nwhere: slurm\nmax_array: 1000 # tasks of one array\ninterface: null\npython: a"
    merged = command._merged(text, {"max_array": 500, "interface": "ib0", "sbatch": ["--hint=nomultithread"]})
    assert merged == (
        "# mine\nwhere: slurm\nmax_array: 500 # tasks of one array\ninterface: ib0\npython: a\n"
        "sbatch: [--hint=nomultithread]\n"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("probe.sh: line 4: /x/python: No such file or directory", "no Python /x/python that starts"),
        ("probe.sh: line 4: /x/python: Permission denied", "no Python /x/python that starts"),
        ("Traceback\nModuleNotFoundError: No module named 'msgspec'", "lacks a package"),
        ("", "fails there: it printed nothing"),
    ],
)
def test_a_python_that_says_no_facts_is_named_with_its_last_words(said: str, why: str) -> None:
    assert why in examination.of_python(said, "/x/python")


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [
        ("1-00:00:00", 1440),
        ("30:00", 30),
        ("2:00:00", 120),
        ("infinite", float("inf")),
        ("n/a", float("inf")),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(limit: str, minutes: float) -> None:
    assert partition.minutes(limit) == minutes


def test_this_machine_is_examined_too(here: Command) -> None:
    done = fine(here("doctor", "cluster=local"))
    assert "works  results" in done.stdout
    assert "works  network" in done.stdout
    assert "max_array" not in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cluster=nowhere"], "no cluster 'nowhere'; there are: "),
        (
            ["cluster=devcluster", "--write"],
            "devcluster.yaml comes with the repository; `new cluster NAME` makes",
        ),
        (["cluster=local", "--nodes=0"], "nodes=0 is out of range"),
        (["cluster=local", "--wait-min=0"], "wait_min=0 is out of range"),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(here: Command, words: list[str], sentence: str) -> None:
    refused(here("doctor", *words), sentence)


@pytest.mark.slurm
def test_a_healthy_cluster_is_told_so_and_its_file_is_filled_in(
    devcluster: dict[str, str], tmp_path: Path
) -> None:
    (conf := tmp_path / "conf" / "cluster").mkdir(parents=True)
    (file := conf / "mine.yaml").write_text(
        "defaults: [devcluster, _self_]\ninterface: null # of all nodes\n"
        f"slurm_conf: {devcluster['SLURM_CONF']}\n"
    )
    surroundings = {**environment_for(tmp_path / "results"), **devcluster, "SPARSIFY_CONF": str(conf.parent)}
    own = ["cluster=mine", "container=none", "cluster.partition=nowhere"]
    call = [sys.executable, "-m", "experiments", "doctor"]
    assert "there is no partition nowhere" in say(surroundings, *call, *own, code=2)
    said = say(surroundings, *call, *own[:2], "--nodes=2", "--write")
    assert "FAULT" not in said
    assert "workers of n1 and n2 meet by " in said
    assert "# of all nodes" in file.read_text()
    assert "interface: null" not in file.read_text()
