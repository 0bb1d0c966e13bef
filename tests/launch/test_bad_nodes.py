"""The ledger of nodes that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.launch import job_hooks

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
    assert job_hooks.unreliable(tmp_path / "ledger") == []
    (tmp_path / "ledger").touch()
    for number, (node, at) in enumerate(failures):
        job_hooks.note_failure(tmp_path / "ledger", node, str(number), at)
    assert job_hooks.unreliable(tmp_path / "ledger") == expected
    with (tmp_path / "ledger").open("a") as ledger:
        ledger.write('{"node": "n3", "jo')  # its writer was killed
    assert job_hooks.unreliable(tmp_path / "ledger") == expected


def test_what_is_no_ledger_tells_of_no_node(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for number, at in enumerate(("2026-01-01T10:00:00", "2026-01-01T12:00:00Z")):
        job_hooks.note_failure(ledger, "n1", str(number), at)
    with ledger.open("ab") as file:
        file.write(
            b'5\nnull\n[]\n{"node": 5, "at": "2026-01-01T12:00:00"}\n{"node": "n1", "at": "now"}\n\xff\n'
        )
    assert job_hooks.unreliable(ledger) == ["n1"]
    ledger.unlink()
    ledger.mkdir()
    assert job_hooks.unreliable(ledger) == []
