"""All kinds of trouble on a real SLURM, at the same time: nothing is lost, nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.records.store import Attempt
from tests.launch import trouble_there
from tests.launch.trouble_there import Bench
from tests.launch.troubled import faults_in

SLURM = "newer"
pytestmark = pytest.mark.slurm


def test_nothing_is_lost_or_done_twice_and_the_node_that_died_is_remembered(
    devcluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench.reached(tmp_path, devcluster, monkeypatch)
    found: dict[str, Attempt] = {}
    for first_seed in (0, 10, 20):  # a run that was quicker than its trouble shows nothing: another one
        left = [name for name in trouble_there.TROUBLES if name not in found]
        seeds = {name: [first_seed + at] for at, name in enumerate(left)}
        made = trouble_there.make_trouble(bench, seeds)
        found |= {name: attempt for name, (attempt,) in made.items() if bench.was_interrupted(attempt)}
    assert {*found} == {*trouble_there.TROUBLES}, "the others' runs were quicker than their trouble"
    assert {name: faults_in(attempt) for name, attempt in found.items()} == {name: [] for name in found}
    ledger = (bench.folders.scratch / "node-failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["node"] for line in ledger] == [trouble_there.DYING]
