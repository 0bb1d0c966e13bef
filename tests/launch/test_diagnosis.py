"""Why a run failed, from what its workers left."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.files import write_json
from experiments.launch.diagnosis import OVERRUN, crowded, diagnose

LOST = "worker 0 of 2 lost the others during all_gather"


CAUSES: list[tuple[dict[int, tuple[str, str]], dict[int, int], tuple[str, str]]] = [
    ({0: ("lost", LOST)}, {0: 1, 1: -9}, ("killed", "worker 1 was killed by SIGKILL")),
    # The end of the one that was left aborted as well: that is no cause.
    ({0: ("lost", LOST)}, {0: -6, 1: -9}, ("killed", "worker 1 was killed by SIGKILL")),
    ({0: ("lost", LOST), 1: ("memory", "out of memory")}, {0: 1, 1: -6}, ("memory", "out of memory")),
    ({0: ("lost", LOST)}, {0: 1}, ("killed", "the process of worker 1 ended without a word")),
    ({0: ("lost", LOST)}, {0: 1, 1: 1}, ("lost", LOST)),
    ({}, {0: 0, 1: 3}, ("error", "a worker ended with exit code 3 and no explanation")),
]


@pytest.mark.parametrize(("notes", "codes", "expected"), CAUSES)
def test_the_first_cause_is_told_and_not_its_consequences(
    notes: dict[int, tuple[str, str]], codes: dict[int, int], expected: tuple[str, str], tmp_path: Path
) -> None:
    for rank, (kind, why) in notes.items():
        write_json(tmp_path / f"failure{rank}.json", {"rank": rank, "kind": kind, "why": why})
    kind, why = diagnose(tmp_path, codes, 2)
    assert kind == expected[0]
    assert why.startswith(expected[1])


@pytest.mark.parametrize(("late", "is_told"), [(9, False), (11, True)])
def test_a_run_whose_relay_was_the_bottleneck_says_so(late: int, is_told: bool) -> None:
    relay = {"cpu_s": 1.0, "seconds": 60.0, "packets": 100, "late": late}
    assert crowded({"relay": relay}) == [OVERRUN] * is_told
