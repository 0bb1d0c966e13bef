"""The ledger of nodes that failed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from analysis.records.files import write_json
from experiments.launch import bad_nodes
from tests.conftest import there

FAILURES = [
    ([], []),
    ([("n1", "2026-01-01T10:00:00")], []),
    ([("n1", "2026-01-01T10:00:00"), ("n1", "2026-01-01T12:00:00")], ["n1"]),
    ([("n1", "2026-01-01T10:00:00"), ("n2", "2026-01-01T12:00:00Z")], []),
    ([("n1", f"2026-01-01T10:00:{second:02}") for second in (1, 0, 59)], []),  # one failure, three jobs
]


@pytest.mark.parametrize(("failures", "expected"), FAILURES)
def test_a_node_that_takes_many_jobs_along_failed_once(
    failures: list[tuple[str, str]], expected: list[str], tmp_path: Path
) -> None:
    assert bad_nodes.unreliable(tmp_path / "ledger", "python") == []
    (tmp_path / "ledger").touch()
    for number, (node, at) in enumerate(failures):
        bad_nodes.note_failure(tmp_path / "ledger", node, str(number), at)
    assert bad_nodes.unreliable(tmp_path / "ledger", "python") == expected
    with (tmp_path / "ledger").open("a") as ledger:
        ledger.write('{"node": "n3", "jo')  # its writer was killed
    assert bad_nodes.unreliable(tmp_path / "ledger", "python") == expected


def test_what_is_no_ledger_tells_of_no_node(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for number, at in enumerate(("2026-01-01T10:00:00", "2026-01-01T12:00:00Z")):
        bad_nodes.note_failure(ledger, "n1", str(number), at)
    with ledger.open("ab") as file:
        file.write(
            b'5\nnull\n[]\n{"node": 5, "at": "2026-01-01T12:00:00"}\n{"node": "n1", "at": "now"}\n\xff\n'
        )
    assert bad_nodes.unreliable(ledger, "python") == ["n1"]
    ledger.unlink()
    ledger.mkdir()
    assert bad_nodes.unreliable(ledger, "python") == []


def test_a_node_without_a_python_is_avoided_by_those_who_need_it(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for job, node in (("7_1", "n1"), ("7_1", "n2"), ("7_2", "n1")):
        bad_nodes.note_failure(ledger, node, job, "2026-01-01T10:00:00Z", "/a/python")
    assert bad_nodes.unreliable(ledger, "/a/python") == ["n1", "n2"]
    assert bad_nodes.unreliable(ledger, "/b/python") == []
    assert "/a/python can't be started on n1, n2" in there(bad_nodes.lacking(ledger, "7_1"))
    assert bad_nodes.lacking(ledger, "7") is None


@pytest.mark.parametrize(
    ("ends", "daemon", "blamed"),
    [
        ("NODE_FAIL", "before", True),
        ("REQUEUED", "after", True),  # SLURM 26.05, once the node is back
        ("REQUEUED", "down", True),
        ("REQUEUED", "before", False),  # by a person
        ("PREEMPTED", "after", False),
    ],
)
def test_a_node_is_blamed_for_what_it_took_along(
    ends: str, daemon: str, blamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.time() + {"before": -60, "after": 60, "down": -60}[daemon]
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started))
    says = {
        "sacct": f"7|{ends}|2026-01-01T10:00:00|n[1-2]|a\n7|RUNNING|Unknown|n3|a\n",
        "sinfo": f"n1|{'down*' if daemon == 'down' else 'idle'}\n",
        "scontrol": f"NodeName=n1 Arch=x86_64 SlurmdStartTime={at} State=IDLE\n",
    }
    for name, text in says.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        hostnames = '[ "$2" = hostnames ] && { echo n1 n2; exit; }'
        program.write_text(f"#!/bin/sh\n{hostnames}\nprintf '{text}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (start := tmp_path / "start-7-0").mkdir()
    write_json(start / "worker0.json", {"rank": 0, "pid": 1, "node": "n1"})
    assert [*bad_nodes.failed_nodes("7", start)] == ["n1"] * blamed
