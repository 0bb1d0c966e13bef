"""The smaller benchmarks at toy size: what they record and say. No test asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.bench import auto, local
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.prediction.known_times import KnownTimes
from tests.bench.conftest import Record, RunBench, last_of, lines_of
from tests.conftest import ROOT, environment_for, fine, process, python


def test_auto_records_every_case_and_says_where_fused_pays(bench: RunBench, tmp_path: Path) -> None:
    words = ("--n", "64", "20000", "--layers", "--density", "0.1", "--seconds", "0")
    bench("auto", *words, "--device", "cpu")
    _, *rows, layers = lines_of(tmp_path, "auto")
    assert [row["k"] for row in rows] == [6, 2000]
    for row in rows:
        assert (row["kernels"]["auto"] == "torch") == (row["n"] == 64 or row["why_not_fused"] is not None)
        assert row["torch_over_auto"]["n"] == len(row["samples_ms"]["auto"]) == auto.MIN_REPEATS
    assert (layers["n"], layers["buckets"]) == (14_728_266, 54)


def test_fused_pays_from_the_least_size_above_which_it_was_never_slower() -> None:
    def rows(*ratios: tuple[int, float], buckets: int = 1) -> list[Record]:
        return [{"n": n, "buckets": buckets, "torch_over_fused": {"median": median}} for n, median in ratios]

    measured = rows((64, 1.2), (1000, 0.8), (1000, 3.0), (5000, 1.1), (9000, 2.0))
    assert auto.find_least_n_where_fused_pays([*measured, *rows((10**6, 0.9), buckets=54)]) == 5000
    assert auto.find_least_n_where_fused_pays([*measured, *rows((9000, 0.9))]) is None


@pytest.mark.extended
def test_launch_says_what_the_host_takes_and_who_launched(tmp_path: Path) -> None:
    """As a process of its own, in which Triton's driver is another one."""
    around = environment_for(tmp_path)
    line = last_of(fine(python("-m", "experiments", "bench", "launch", "--repeats", "30", env=around)).stdout)
    assert {line[name]["n"] for name in ("host_us", "ordinary_host_us", "ordinary_over_kept")} == {30}
    _, record = lines_of(tmp_path, "launch")
    assert record["host_us"] == line["host_us"]


def test_overlap_says_the_gain_and_records_every_sample(bench: RunBench, tmp_path: Path) -> None:
    rows = ["dense-distribute", "topk-register"]
    words = ("--network", "small_cnn", "--bucket-mb", "0.02", "--repeats", "2", "--batch", "2")
    last = bench("overlap", *words, "--ratios", "1", "--rows", *rows)
    assert last["link"] == "simulated link: injected delay"
    _, *records = lines_of(tmp_path, "overlap")
    assert [record["row"] for record in records] == rows
    for record in records:
        ratios = [without / with_ for without, with_ in record["samples_ms"]]
        assert last["without_over_with"][record["row"]]["high"] == pytest.approx(max(ratios), 1e-4)
        assert record["communication_ms"] == pytest.approx(record["backward_ms"])


@pytest.mark.extended
def test_shard_compares_whole_steps_with_those_of_torch_alone(bench: RunBench, tmp_path: Path) -> None:
    words = ("--width", "8", "--layers", "1", "--batch", "1", "--length", "4", "--turns", "2")
    last = bench("shard", *words, "--launches", "1", "--ways", "dense", "topk_bucket")
    assert [*last["cpu_over_hsdp"]] == [*last["wall_over_hsdp"]] == ["dense", "topk_bucket"]
    _, *rows = lines_of(tmp_path, "shard")
    assert [len(row["samples_ms"][0]["wall"]) for row in rows] == [2, 2, 2]


def test_methods_are_timed_beside_topk_for_advise_to_read(
    bench: RunBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench("methods", "--n", "20000", "--methods", "dgc", "--repeats", "1", "--device", "cpu")
    _, row = lines_of(tmp_path, "methods")
    (store,) = (tmp_path / "bench").glob("methods-*.jsonl")
    store.write_text("\n".join(["{", "5", json.dumps(row | {"n": [5]}), store.read_text()]))
    parts_ms = [row[f"{part}_ms"] for part in ("select", "exchange", "retain", "scatter")]
    assert min(parts_ms) >= 0
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    config = compose.resolve(["cluster=local", "link=ethernet_1g", "workers=4"]).as_dict()
    benched = KnownTimes(config, ResultFolders()).read_benchmarked_select_times(
        40_000
    )  # stored runs, where there are any, come first
    assert benched["dgc"].middle_s == pytest.approx(2e-3 * sum(parts_ms))
    assert benched["dgc"].source == "make bench BENCH=methods, n = 20,000"


def test_kernels_are_compared_with_torch_and_each_row_is_recorded(bench: RunBench, tmp_path: Path) -> None:
    last = bench("kernels", "--n", "20000", "--repeats", "2", "--device", "cpu")
    assert last["checked"]
    _, *rows = lines_of(tmp_path, "kernels")
    assert next(row["row"] for row in rows if not row.get("why")) == "add"


def test_operators_is_run_by_its_path(tmp_path: Path) -> None:
    """As in an image of an old torch. Beside it lies a file named as a module that torch imports."""
    words = ["--n", "1000", "--density", "0.01", "--repeats", "1", "--device", "cpu", "--only", "topk"]
    file = str(ROOT / "experiments/bench/operators.py")
    assert json.loads(fine(process(sys.executable, file, *words, cwd=tmp_path)).stdout)["k"] == 10


ONE_BLOCK = """
import torch
from experiments.bench import _single_block_topk
torch.manual_seed(0)
for numbers, k in (
    (torch.randn(2500).abs(), 7), (torch.randint(0, 3, (1500,)).float(), 900), (torch.zeros(1024), 1)
):
    chosen = _single_block_topk.find_largest_indices(numbers, k)
    assert len(set(chosen.tolist())) == k
    assert torch.equal(numbers[chosen].sort().values, numbers.topk(k).values.sort().values)
"""


@pytest.mark.extended
def test_one_thread_block_alone_finds_the_same() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    fine(python("-c", ONE_BLOCK, env=environment_for(ROOT / "results", TRITON_INTERPRET="1")))


def test_local_steps_are_timed_beside_what_they_replace(bench: RunBench, tmp_path: Path) -> None:
    small = ("--layers", "1", "--width", "40", "--vocabulary", "50", "--launches", "1", "--turns", "3")
    last = bench("local", *small)
    _, *rows = lines_of(tmp_path, "local")
    assert [(row["row"], row["beside"]) for row in rows] == [*local.COMPARED_PAIRS]
    for row in rows:
        assert last[f"{row['row']} / {row['beside']}"] == row["ratio"]
        ((ours, theirs),) = row["samples_ms"]
        assert len(ours["cpu"]) == len(theirs["cpu"]) == 3 * local.TURNS_FACTOR[row["part"]]
