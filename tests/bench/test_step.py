"""The benchmark of whole steps: its counts, records, picture and page.

No test asserts a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.bench import step
from experiments.bench._launches import compare_variants_with_base
from experiments.bench._operator_count import OperatorCounter
from experiments.bench._pages import FUSED_PAGE, SELECT_PAGE, STEP_PAGE
from tests.bench.conftest import Benched, call_bench, last_of
from tests.conftest import ROOT

LAYERS, TURNS, N = 6, 2, 10
CHOSEN = ["ddp", "ddp_powersgd", "register_dense_overlap", "register_topk_layer", "distribute_topk_global"]
SMALL = (
    "--networks", "linears", "--layers", str(LAYERS), "--launches", "1", "--turns", str(TURNS),
    "--count-workers", "2", "--ways", *CHOSEN[1:],
)  # fmt: skip


@pytest.fixture(scope="session")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Return what `make bench BENCH=step`, small, left and printed."""
    results = tmp_path_factory.mktemp("results")
    return Benched(results, call_bench(results, "step", *SMALL))


def test_the_last_line_has_the_ratios_and_the_collectives_that_laws_fix(stepped: Benched) -> None:
    line = last_of(stepped.printed)
    for clock in ("cpu", "wall"):
        ratios = line[f"{clock}_over_ddp"]["linears"]
        assert list(ratios) == CHOSEN[1:]  # nothing is divided by itself
        assert {one["n"] for one in ratios.values()} == {1}
    sent, buckets = line["collectives"]["linears"], line["ddp_buckets"]["linears"]
    assert sent["ddp"] == buckets == 1  # all 100 kB in one bucket
    # A look for what is not finite, and one message for each of DDP's buckets at least, each tensor at most.
    assert buckets <= sent["register_topk_layer"] <= 2 * LAYERS + 1


def test_every_row_is_recorded_with_all_samples(stepped: Benched) -> None:
    rows, (start,) = STEP_PAGE.read_rows_and_invocations(stepped.store)
    assert "host" not in start["provenance"]
    timed = [row for row in rows if row["part"] == "time"]
    assert [row["row"] for row in timed] == CHOSEN
    assert {len(row["samples_ms"][0]["wall"]) for row in timed} == {TURNS}
    around = {row["row"]: row["n"] for row in rows if row["part"] == "around"}
    assert around == dict.fromkeys(("add", "aggregate", "around"), LAYERS * (64 * 64 + 64))
    assert str(ROOT) not in stepped.store.read_text()


@pytest.mark.parametrize("name", ["fused", "select", "step"])
def test_shipped_records_are_drawn_as_they_were(name: str, tmp_path: Path) -> None:
    """Some are older than the fields that rows have today."""
    shipped = ROOT / "results" / "shipped"
    (store,) = (shipped / "bench").glob(f"{name}-*.jsonl")
    {"fused": FUSED_PAGE, "select": SELECT_PAGE, "step": STEP_PAGE}[name].draw_device(store, tmp_path)
    page = f"{store.stem}.md"
    assert (tmp_path / page).read_text() == (shipped / "figures" / page).read_text()


def test_ratios_are_taken_within_turns_and_reported_over_launches() -> None:
    base = [1.0, 10.0, 100.0]
    launches = [
        {
            "ddp": {"cpu": base, "wall": base},
            "own": {"cpu": [factor * ms for ms in base], "wall": [ms + 1 for ms in base]},
        }
        for factor in (2, 3, 5)
    ]
    _, own = compare_variants_with_base([{"samples_ms": samples} for samples in launches], "ddp")
    ratio = own["cpu_over_ddp"]
    assert (ratio["low"], ratio["median"], ratio["high"], ratio["n"]) == (2, 3, 5, 3)
    assert own["wall_over_ddp"]["median"] == pytest.approx(1.1)


def test_targets_are_judged_by_medians_and_buckets_set_one_of_them() -> None:
    ratio = {"median": 1.3, "low": 0.1, "high": 9.0, "n": 5}
    line = {
        "cpu_over_ddp": {"linears": {"register_topk_layer": ratio}}, "ddp_buckets": {"resnet50": 5},
        "collectives": {"resnet50": {"register_topk_layer": 162}}, "aggregate_over_add": None,
    }  # fmt: skip
    first, *others, last = [target.verdict_sentence(line) for target in step.list_targets(line)]
    sentence = "at most 1.3 wanted, 1.3 [0.1, 9.0], n = 5 measured: met"
    assert first == f"cpu_over_ddp linears register_topk_layer: {sentence}"
    assert {sentence.rpartition(", ")[2] for sentence in others} == {"not measured"}
    assert last == "collectives resnet50 register_topk_layer: at most 6 wanted, 162 measured: MISSED"


def test_operators_are_counted_with_the_bytes_that_they_move() -> None:
    a, b, *others = (torch.ones(N) for _ in range(4))
    with OperatorCounter() as count:
        a.view(2, -1).unbind()
        torch.empty(N)
    assert (count.num_operations_but_collectives, count.nbytes) == (0, 0)
    with OperatorCounter() as count:
        a.add_(b)  # two read, one written
        a.zero_()  # one written
        a.copy_(b)  # one read, one written
        torch._foreach_add_([a, b], others)  # four read, two written
    assert (count.num_operations_but_collectives, count.nbytes) == (4, 12 * 4 * N)
