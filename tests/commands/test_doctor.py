"""`doctor` finds what was planted, and nothing where all is well."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.commands import doctor as command
from experiments.commands._cluster_checks import ClusterObservations, judge_cluster
from experiments.config import compose
from experiments.launch import cluster_prober, probe
from experiments.launch.cluster_prober import GroupTestResult, NodeProbe
from experiments.launch.probe import TaskFacts
from slurm import images, partition
from slurm.partition import PartitionNode
from tests.conftest import Command, environment_for, fine, refused
from tests.slurm.devcluster import SCRIPTS, devcluster, lacking, say, speaking_to
from tests.slurm.programs import Programs, programs

__all__ = ["devcluster", "programs"]  # fixtures are found by their names in this module
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
    runtime = images.find_container_runtime() if IMAGE.exists() else None
    results = tmp_path / "results"
    results.mkdir()
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


def examined(*tasks: dict[str, object], words: str = "", **other: object) -> ClusterObservations:
    """Return what was found on a node where all is well, but for what each of its tasks found otherwise."""
    well = {
        "python_version": "3.11.7", "node": "n1",
        "hostname_addresses": ["10.0.0.1"], "addresses_by_interface": {"eth0": ["10.0.0.1"]},
        "closed_ports_warning": "",
        "model_by_bus_id": dict.fromkeys(["07", "0F"], "NVIDIA A100-SXM4-80GB"), "visible_gpus": None,
        "lock": probe.HELD, "container_error": "", "container_runtime": None, "epoch_s": 100.0,
    }  # fmt: skip
    facts = tuple(
        TaskFacts(**{**well, "rank": rank, "cores": [str(rank)], **changes})  # type: ignore[arg-type]  # of any field
        for rank, changes in enumerate(tasks)
    )
    usual = ["cluster=generic_slurm", "method=dense", "task=cnn_digits", "container=none"]
    node = NodeProbe("n1", len(facts), "1", facts, is_over=True, submitted_at=99.0, seen_at=101.0)
    nodes = [PartitionNode("n1", "idle", 24 * 60)]
    known = {"max_array_jobs": 1000, "nodes": nodes, **other}
    return ClusterObservations(compose.resolve([*usual, *words.split()]), [node], **known)  # type: ignore[arg-type]  # as above


CUDA = "device=cuda"
BOTH = ("n1", "n2")
JUDGED = {  # a verdict and a part of its sentence -> what was found
    "works what nodes write is seen here: n1": examined({}, {}),
    "note its clock is at least 49 s slow": examined({"epoch_s": 50.0}),
    "note its clock is at least 99 s fast": examined({"epoch_s": 200.0}),
    "note hold on one node only": examined({"lock": probe.NOT_HELD}),
    "note can't be locked; submit from one machine at a time": examined({"lock": probe.NO_LOCKS}),
    "FAULT can't be opened (Stale file handle)": examined({"lock": "Stale file handle"}),
    "FAULT n1: no apptainer": examined({"container_error": "no apptainer"}),
    "FAULT on this machine: no image": examined({}, container_fault="no image"),
    "note own name resolves to 127.0.1.1, so workers go by": examined({"hostname_addresses": ["127.0.1.1"]}),
    "note n1: gloo takes others": examined({"closed_ports_warning": "gloo takes others"}),
    "note own name resolves to nothing": examined({"hostname_addresses": []}),
    "note [--hint=nomultithread] gives each core to one": examined({"cores": ["0,8"]}, {"cores": ["0,8"]}),
    "note [--cpu-bind=cores]": examined({"cores": ["0", "1"]}, {"cores": ["0", "1"]}),
    "FAULT workers see no GPU": examined({"model_by_bus_id": {}}, words=CUDA),
    "FAULT cluster.gpu=h100": examined({}, words=f"{CUDA} cluster.gpu=h100"),
    "works each worker sees its own": examined({"visible_gpus": ["0"]}, {"visible_gpus": ["1"]}, words=CUDA),
    "works workers see all of their job": examined({}, words=CUDA),
    "FAULT 2 workers see 1 GPUs; cluster.gres": examined(
        {"visible_gpus": ["0"]}, {"visible_gpus": ["0"]}, words=CUDA
    ),
    "works n1: NVIDIA A100-SXM4-80GB; each worker": examined(
        {"visible_gpus": ["GPU-8932f937"]}, {"visible_gpus": ["MIG-2f0a"]}, words=CUDA
    ),
    "note SLURM's version is 27.05.1": examined({}, untested_version="SLURM's version is 27.05.1"),
    "FAULT say max_array: 500": examined({}, max_array_jobs=500),
    "works of up to 4000 jobs": examined({}, max_array_jobs=4000),
    "FAULT say time_min: 1440": examined({}, words="cluster.time_min=9999"),
    "note keeps no accounts": examined({}, accounting_storage="accounting_storage/none"),
    "works meet by ib0": examined({}, group_test=GroupTestResult(BOTH, ("ib0", "ib0"))),
    "works meet by ib0 and ib1": examined({}, group_test=GroupTestResult(BOTH, ("ib0", "ib1"))),
    "FAULT workers of n1 and n2: no way": examined({}, group_test=GroupTestResult(BOTH, (), "no way")),
}  # fmt: skip
FIELDS: dict[str, dict[str, object]] = {  # that follow from some
    "note [--hint=nomultithread] gives each core to one": {"sbatch": ["--hint=nomultithread"]},
    "FAULT say max_array: 500": {"max_array": 500},
    "works of up to 4000 jobs": {"max_array": 4000},
    "FAULT say time_min: 1440": {"time_min": 1440},
    "works meet by ib0": {"interface": "ib0"},
}


def test_each_finding_has_its_verdict_and_its_fields() -> None:
    for judged, found in JUDGED.items():
        verdict, _, words = judged.partition(" ")
        findings = judge_cluster(found)
        matching = [finding for finding in findings if words in finding.text]
        assert [finding.verdict for finding in matching] == [verdict], (judged, findings)
        fields = dict(field for finding in findings for field in finding.suggested_fields.items())
        assert FIELDS.get(judged, {}).items() <= fields.items(), judged
        assert any(finding.verdict == "FAULT" for finding in findings) == (verdict == "FAULT"), judged


def test_fields_stand_in_their_old_lines_and_new_ones_at_the_end() -> None:
    text = "# mine\nwhere: slurm\nmax_array: 1000 # tasks of one array\ninterface: null\npython: a"
    merged = command.merge_yaml_fields(
        text, {"max_array": 500, "interface": "ib0", "sbatch": ["--hint=nomultithread"]}
    )
    assert merged == (
        "# mine\nwhere: slurm\nmax_array: 500 # tasks of one array\ninterface: ib0\npython: a\n"
        "sbatch: [--hint=nomultithread]\n"
    )


def test_a_python_that_says_no_facts_is_named_with_its_last_words() -> None:
    for said, why in {
        "probe.sh: line 4: /x/python: No such file or directory": "no Python /x/python that starts",
        "probe.sh: line 4: /x/python: Permission denied": "no Python /x/python that starts",
        "Traceback\nModuleNotFoundError: No module named 'msgspec'": "lacks a package",
        "": "fails there: it printed nothing",
    }.items():
        assert why in cluster_prober.explain_python_failure(said, "/x/python")


def test_time_limits_are_read_as_slurm_writes_them() -> None:
    for limit, minutes in {"1-00:00:00": 1440, "30:00": 30, "2:00:00": 120}.items():
        assert partition.parse_time_limit_min(limit) == minutes
    assert partition.parse_time_limit_min("infinite") == partition.parse_time_limit_min("n/a") == float("inf")


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("22.05.8", ""),
        ("26.05.5", ""),
        ("21.08.8-2", "SLURM's version is 21.08.8-2, and tests run with 22.05 to 26.05: "),
        ("26.11.0", "SLURM's version is 26.11.0, and tests run with 22.05 to 26.05: "),
    ],
)
def test_an_untested_version_of_slurm_is_told_with_those_tested(
    programs: Programs, version: str, sentence: str
) -> None:
    programs.prints("scontrol", f"SLURM_CONF = /etc/slurm.conf\nSLURM_VERSION           = {version}")
    told = partition.describe_untested_version()
    assert told.startswith(sentence)
    assert bool(told) == bool(sentence)


def test_this_machine_is_examined_too(here: Command) -> None:
    done = fine(here("doctor", "cluster=local"))
    assert "works  results" in done.stdout
    assert "works  network" in done.stdout
    assert "max_array" not in done.stdout
    for words, sentence in {
        "cluster=nowhere": "no cluster 'nowhere'; there are: ",
        "cluster=devcluster --write": "devcluster.yaml comes with the repository; `new cluster NAME` makes",
        "cluster=local --nodes=0": "nodes=0 is out of range",
        "cluster=local --wait-min=0": "wait_min=0 is out of range",
    }.items():
        refused(here("doctor", *words.split()), sentence)


@pytest.mark.slurm
def test_a_healthy_cluster_is_told_so_and_its_file_is_filled_in(
    devcluster: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "conf" / "cluster" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "defaults: [devcluster, _self_]\ninterface: null # of all nodes\n"
        f"slurm_conf: {devcluster['SLURM_CONF']}\n"
    )
    conf = {"SPARSIFY_CONF": str(tmp_path / "conf")}
    surroundings = {**environment_for(tmp_path / "results"), **devcluster, **conf}
    own = ["cluster=mine", "container=none", "cluster.partition=nowhere"]
    call = [sys.executable, "-m", "experiments", "doctor"]
    assert "there is no partition nowhere" in say(surroundings, *call, *own, code=2)
    said = say(surroundings, *call, *own[:2], "--nodes=2", "--write")
    assert "FAULT" not in said
    assert "workers of n1 and n2 meet by " in said
    assert "# of all nodes" in file.read_text()
    assert "interface: null" not in file.read_text()
