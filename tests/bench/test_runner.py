"""Benchmarks in common: cases measured once, recorded, resumed, shown; words that are refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.bench import REGISTRY
from experiments.bench._runner import (
    WRONG,
    Benchmark,
    Record,
    summarise_median_and_range,
    summarise_turn_ratios,
)
from experiments.bench._timing import CallTimer, time_calls_in_turns
from experiments.config import code_version
from experiments.config.folders import ResultFolders
from tests.bench.conftest import lines_of
from tests.conftest import Command, fine, refused

ABOUT = {"at": "2000-01-01T00:00:00Z", "device": "cpu", "name": "A Processor", "torch": "2", "provenance": {}}


class Toy:
    """A benchmark of made-up numbers, which notes what it measures."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.measured = list[int]()
        self.fails_at: int | None = None
        self.rows: list[Record] = [
            {"row": row, "ms": summarise_median_and_range([1.0, 2.0])} for row in ("a", "b")
        ]

    def measure(self, case: Record) -> Iterator[Record]:
        self.measured.append(case["n"])
        if case["n"] == self.fails_at:
            os.kill(os.getpid(), signal.SIGTERM)
        yield from self.rows

    def __call__(self, *n: int, at: str = "1", setting: int = 0, **how: Any) -> int:
        """Call it once, for these cases."""
        benchmark = Benchmark(
            machine=ABOUT | {"at": at}, cases=[{"n": size} for size in n], measure=self.measure,
            settings={"repeats": setting}, header="n | row | ms", row_format="{n:,} | {row} | {ms}",
            summarise=lambda rows: {"rows": len(rows)},
        )  # fmt: skip
        return benchmark.run("toy", **how)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    return Toy(tmp_path)


def test_a_second_call_measures_only_what_is_missing(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert toy(1, 1000) == 0
    first = capsys.readouterr().out
    assert toy(1, 1000, 3, at="2") == 0
    again = capsys.readouterr().out
    assert toy.measured == [1, 1000, 3]
    kinds = [line["kind"] for line in lines_of(toy.results, "toy")]
    assert " ".join(kinds) == "invocation row row row row invocation row row"
    for printed in (first, again):
        assert "| 1,000 | a | 1.5 [1.0, 2.0] |" in printed
    assert "2 of 3 were measured before; --force or FORCE=1 measures again" in again
    assert json.loads(again.splitlines()[-1]) == {"bench": "toy", "device": "A Processor", "rows": 6}


def test_another_setting_other_code_and_force_measure_again_and_the_newest_rows_are_shipped(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultFolders, "shipped", tmp_path / "shipped")
    toy(1)
    toy(1, force=True, ship=True, at="2")
    assert [line["at"] for line in lines_of(tmp_path / "shipped", "toy")] == ["2", "2", "2"]
    toy(1, setting=1)
    monkeypatch.setattr(code_version, "code_digest", lambda: "another")
    toy(1, at="3")
    toy(1, at="4")
    assert toy.measured == [1] * 4


def test_what_is_finished_is_kept_when_a_call_is_ended(toy: Toy) -> None:
    toy.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        toy(1, 2, 3)
    toy.fails_at = None
    toy(1, 2, 3)
    assert toy.measured == [1, 2, 2, 3]


def test_a_row_that_must_not_be_fails_the_benchmark(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.rows = [{"row": "a", WRONG: "it chose others"}]
    assert toy(1) == 1
    assert "WRONG: it chose others\n" in capsys.readouterr().out


def test_a_spread_is_of_percentiles_where_there_are_enough_samples_and_a_ratio_of_shared_ones() -> None:
    found = summarise_median_and_range([float(i) for i in range(101)])
    assert (found["median"], found["low"], found["high"], found["spread"]) == (50, 5, 95, "5 to 95 %")
    slow, fast = {2: 8.0, 3: 8.0}, {1: 1.0, 2: 2.0, 3: 4.0}
    assert summarise_turn_ratios(slow, fast) == {
        "median": 3.0,
        "low": 2.0,
        "high": 4.0,
        "n": 2,
        "spread": "min to max",
    }
    assert summarise_turn_ratios(None, fast) is None


def test_calls_take_turns_and_stop_when_their_seconds_are_over() -> None:
    made = list[str]()
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    clock = CallTimer(torch.device("cpu"), "wall")
    times = time_calls_in_turns(
        calls, clock, 9, prepare=lambda name: made.append("-"), warm_up=2, min_turns=3, max_seconds=0
    )
    assert [len(by_turn) for by_turn in times.wall_ms_by_call.values()] == [3, 3, 3]
    assert [len(by_turn) for by_turn in times.cpu_ms_by_call.values()] == [3, 3, 3]
    rounds = "".join(made)
    turns = [rounds[at : at + 6].replace("-", "") for at in range(0, len(rounds), 6)]
    assert {*map("".join, map(sorted, turns))} == {"abc"}
    assert len(set(turns)) > 1


def test_every_benchmark_explains_itself(here: Command) -> None:
    listed = here("bench", "--help").stdout
    for name in REGISTRY.names():
        said = fine(here("bench", name, "--help")).stdout.lower()
        assert name in listed
        for parameter in REGISTRY.parameters(name):
            assert parameter.replace("_", "-") in said, name


# Words of a call, and what is said.
REFUSED = """
selec: no benchmark 'selec' (did you mean 'select'?)
auto --n 0: n=0 is out of range: it must be a whole number, 1 or more
auto --density 2: density=2 is out of range
auto --threads 0: threads=0 is out of range
bytes --n 150: 150 is no multiple of 100
bytes --n many: n='many' is out of range
bytes --methods topk,topq: no method 'topq' (did you mean 'topk'?); there are:
fused --gradient gauss: no gradient 'gauss'; there are: normal, laplace
launch --repeats 0: repeats=0 is out of range
overlap --ratios 0: ratios=0 is out of range
overlap --rows topk: 'topk'
overlap --bucket-mb nan: bucket_mb=nan is out of range
select --rows eagre: no row 'eagre' (did you mean 'eager'?); there are: add, copy, fused
select --distribution gauss: no distribution 'gauss'; there are: normal, laplace
select --density 0: density=0 is out of range
select --n many: n='many' is out of range
select --flush -1: flush
step --ways register_topk_layers: 'register_topk_layers' (did you mean 'register_topk_layer'
step --networks resnet5: resnet5
step --parts tim: tim
step --launches 0: launches
kernels --rows sort: no row 'sort'
operators --only sorts: there are: topk
link cluster=virtual link=ethernet: no link that could be measured
link workers=1: a link joins at least 2
link link=ethernet_7g: ethernet_7g
link --name Office: take small letters
link --name ethernet_1g: conf/link has a link of that name
gpu_first --parts roofs,kernel: no part 'kernel' (did you mean 'kernels'?); there are: roofs
gpu_first --minutes 0: minutes=0 is out of range
gpu_first device=gpu: no device=gpu
gpu_first device=cpu --ship: a rehearsal on a CPU is no GPU's result
"""


def test_words_that_make_no_sense_are_refused_in_a_sentence(here: Command) -> None:
    for line in REFUSED.strip().splitlines():
        words, _, sentence = line.partition(": ")
        refused(here("bench", *words.split()), sentence.strip())
