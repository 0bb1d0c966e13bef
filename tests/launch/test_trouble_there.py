"""All kinds of trouble on a real SLURM, at the same time: nothing is lost, nothing done twice."""

from __future__ import annotations

import json

import pytest

from analysis.records.store import Attempt
from tests.launch import trouble_there
from tests.launch.trouble_there import Bench
from tests.launch.troubled import faults_in

SLURM = "newer"
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def troubled(devcluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what is wrong with runs that all kinds of trouble happened to, all at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        return whats_wrong(Bench.reached(tmp_path_factory.mktemp("trouble"), devcluster, patch))


def whats_wrong(bench: Bench) -> dict[str, list[str]]:
    found: dict[str, Attempt] = {}
    for first_seed in (0, 10, 20):  # a run that was quicker than its trouble shows nothing: another one
        left = [name for name in trouble_there.TROUBLES if name not in found]
        made = trouble_there.make_trouble(
            bench, {name: [first_seed + at] for at, name in enumerate(left)} if left else {}
        )
        found |= {name: attempt for name, (attempt,) in made.items() if bench.was_interrupted(attempt)}
    assert {*found} == {*trouble_there.TROUBLES}, "the others' runs were quicker than their trouble"
    failures = bench.folders.scratch / "node-failures.jsonl"
    blamed = [json.loads(line)["node"] for line in failures.read_text().splitlines()]
    faults = {name: faults_in(attempt) for name, attempt in found.items()}
    return {**faults, "blamed": blamed}


@pytest.mark.parametrize("name", [*trouble_there.TROUBLES])
def test_nothing_is_lost_and_nothing_done_twice(name: str, troubled: dict[str, list[str]]) -> None:
    assert troubled[name] == []


def test_a_node_that_died_is_remembered_and_no_other(troubled: dict[str, list[str]]) -> None:
    assert troubled["blamed"] == [trouble_there.DYING]
