"""The ledger of nodes that failed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from analysis.records.files import write_json
from experiments.launch import bad_nodes
from tests.conftest import there
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module

DAY = "2026-01-01T"


def noted(ledger: Path, failures: str) -> Path:
    """Note that nodes failed at these times of a day, each under a job of its own."""
    for number, failure in enumerate(failures.splitlines()):
        node, at = failure.split()
        bad_nodes.append_node_failure(ledger, node, str(number), DAY + at)
    return ledger


def test_a_node_that_takes_many_jobs_along_failed_once(tmp_path: Path) -> None:
    rows: dict[str, list[str]] = {
        "": [],
        "n1 10:00:00": [],
        "n1 10:00:00\nn1 12:00:00": ["n1"],
        "n1 10:00:00\nn1 10:01:00": [],
        "n1 10:00:00\nn1 10:01:01": ["n1"],
        "n1 10:00:00\nn2 12:00:00Z": [],
        "n1 10:00:01\nn1 10:00:00\nn1 10:00:59": [],  # one failure, three jobs
    }
    assert bad_nodes.unreliable_nodes(tmp_path / "none", "python") == []
    for number, (failures, expected) in enumerate(rows.items()):
        ledger = tmp_path / f"ledger{number}"
        ledger.touch()
        assert bad_nodes.unreliable_nodes(noted(ledger, failures), "python") == expected
        with ledger.open("a") as file:
            file.write('{"node": "n3", "jo')  # its writer was killed
        assert bad_nodes.unreliable_nodes(ledger, "python") == expected


def test_what_is_no_ledger_tells_of_no_node(tmp_path: Path) -> None:
    ledger = noted(tmp_path / "ledger", "n1 10:00:00\nn1 12:00:00Z")
    with ledger.open("ab") as file:
        file.write(
            b'5\nnull\n[]\n{"node": 5, "at": "2026-01-01T12:00:00"}\n{"node": "n1", "at": "now"}\n\xff\n'
        )
    assert bad_nodes.unreliable_nodes(ledger, "python") == ["n1"]
    ledger.unlink()
    ledger.mkdir()
    assert bad_nodes.unreliable_nodes(ledger, "python") == []


def test_a_node_without_a_python_is_avoided_by_those_who_need_it(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for job, node in (("7_1", "n1"), ("7_1", "n2"), ("7_2", "n1")):
        bad_nodes.append_node_failure(ledger, node, job, "2026-01-01T10:00:00Z", "/a/python")
    assert bad_nodes.unreliable_nodes(ledger, "/a/python") == ["n1", "n2"]
    assert bad_nodes.unreliable_nodes(ledger, "/b/python") == []
    assert "/a/python can't be started on n1, n2" in there(bad_nodes.explain_missing_python(ledger, "7_1"))
    assert bad_nodes.explain_missing_python(ledger, "7") is None


@pytest.mark.parametrize(
    ("ends", "daemon", "state", "blamed"),
    [
        ("NODE_FAIL", -60, "idle", True),
        ("REQUEUED", 60, "idle", True),  # SLURM 26.05, once the node is back
        ("REQUEUED", -60, "down*", True),
        ("REQUEUED", -60, "idle", False),  # by a person
        ("PREEMPTED", 60, "idle", False),
    ],
)
def test_a_node_is_blamed_for_what_it_took_along(
    ends: str, daemon: int, state: str, blamed: bool, tmp_path: Path, programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By when its daemon was started, in seconds from now, and what SLURM says of it."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + daemon))
    programs.prints("sacct", f"7|{ends}|2026-01-01T10:00:00|n[1-2]|a\n7|RUNNING|Unknown|n3|a")
    programs.prints("sinfo", f"n1|{state}")
    node = f"NodeName=n1 Arch=x86_64 SlurmdStartTime={at} State=IDLE"
    programs.prints("scontrol", f'$([ "$2" = hostnames ] && echo n1 n2 || echo {node})')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_json(tmp_path / "worker0.json", {"rank": 0, "pid": 1, "node": "n1"})
    assert [*bad_nodes.find_failure_time_by_node("7", tmp_path)] == ["n1"] * blamed
