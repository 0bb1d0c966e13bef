"""The benchmark of selections: what it measures is whole, kept, and drawn. No test asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench import gradients, select, sidebyside, steps
from experiments.bench.sidebyside import Case, Timed
from experiments.figures import select as picture
from experiments.networks import small_cnn
from sparsify.parts import Sparse
from tests.conftest import ROOT, environment_for

CPU = torch.device("cpu")
ROWS = [name for name in steps.ROWS if name != "compile"]  # which takes half a minute
SMALL = ("--n", "20000", "--flush", "1", "--device", "cpu", "--threads", "1", "--repeats", "2")
RATIOS = [f"{above}_over_{below}" for above, below in select.RATIOS]


def bench(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make bench BENCH=select`, small, with results of its own."""
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.select", *SMALL, *words],
        cwd=ROOT, env=environment_for(results), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    results = tmp_path_factory.mktemp("results")
    return results, bench(results, "--rows", *ROWS)


def stored(results: Path) -> Path:
    (store,) = (results / "bench").glob("select-cpu-*-1-threads.jsonl")
    return store


def test_the_last_line_is_one_object_with_the_ratios(benched: tuple) -> None:
    done = benched[1]
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["bench"], line["n"], line["density"], line["distribution"]) == (
        "select", 20_000, 0.001, "normal",
    )  # fmt: skip
    for name in RATIOS:
        if line[name] is None:  # where nothing can be compiled
            assert "not run" in line["why"][name]
        else:
            assert line[name]["low"] <= line[name]["median"] <= line[name]["high"]
            assert line[name]["n"] == 2
    assert line["eager_over_numpy"] is not None


def test_every_row_is_recorded_with_what_a_reader_needs(benched: tuple) -> None:
    rows, starts = picture.read(stored(benched[0]))
    assert {row["row"] for row in rows} == set(ROWS)
    assert len(starts) == 1
    assert starts[0]["provenance"]["versions"]["torch"] in torch.__version__
    assert "host" not in starts[0]["provenance"]
    of = {row["row"]: row for row in rows}
    assert of["paper_kernel"]["why"] == "needs a GPU"
    for name in ("copy", "eager", "numpy", "dgc", "gaussiank", "sort", "threshold"):
        assert len(of[name]["samples_ms"]) == of[name]["repeats"] == 2
        assert of[name]["k"] == 20
        assert of[name]["over_copy"]["n"] == 2
    for name in ("eager", "numpy", "sort", "threshold"):  # no ties here, so the k-th magnitude has k
        assert of[name]["selected_over_k"] == 1
    assert of["copy"]["bytes_per_element"] == 12
    assert of["eager"]["host_syncs"] == 0
    assert of["threshold"]["host_syncs"] == 1
    assert of["gaussiank"]["host_syncs"] >= 1
    assert 0 <= of["numpy"]["fallback_rate"] <= 1
    assert str(ROOT) not in stored(benched[0]).read_text()


def test_picture_and_page_are_drawn(benched: tuple) -> None:
    store = stored(benched[0])
    assert (benched[0] / "figures" / f"{store.stem}.png").read_bytes().startswith(b"\x89PNG")
    page = (benched[0] / "figures" / f"{store.stem}.md").read_text()
    assert "## n = 20,000, density 0.001, normal" in page
    assert "| eager |" in page
    assert "- `paper_kernel` not run: needs a GPU" in page


def test_a_second_run_appends_and_the_newest_row_counts(
    tmp_path: Path,
    benched: tuple,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bench").mkdir()
    store = tmp_path / "bench" / stored(benched[0]).name
    store.write_text(stored(benched[0]).read_text())
    before = store.read_text().splitlines()
    older = {row["row"]: row for row in picture.read(store)[0]}
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["select", *SMALL, "--rows", "copy", "eager"])
    threads = torch.get_num_threads()
    assert select.main() == 0
    torch.set_num_threads(threads)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["eager_over_fused"] is None
    assert line["why"]["eager_over_fused"] == "fused was not asked for"
    after = store.read_text().splitlines()
    assert after[: len(before)] == before
    assert len(after) == len(before) + 3
    newer = {row["row"]: row for row in picture.read(store)[0]}
    assert set(newer) == set(older)
    assert newer["eager"]["samples_ms"] != older["eager"]["samples_ms"]
    assert newer["numpy"] == older["numpy"]


def test_the_figure_needs_no_torch(tmp_path: Path, benched: tuple) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom experiments.figures import select\n"
        f"print(select.draw_one(Path({str(stored(benched[0]))!r}), Path({str(tmp_path)!r})))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def test_shipped_are_the_newest_rows_and_figures_are_drawn_from_them(tmp_path: Path, benched: tuple) -> None:
    class Elsewhere:
        shipped, results, figures = tmp_path / "shipped", tmp_path, tmp_path / "figures"

    store, elsewhere = stored(benched[0]), Elsewhere()
    for path in select.ship(store, elsewhere):
        assert path.exists()
    assert picture.read(tmp_path / "shipped" / "bench" / store.name) == picture.read(store)
    assert picture.redraw(elsewhere) == [tmp_path / "figures" / f"{store.stem}.png"]
    page = f"{store.stem}.md"
    assert (elsewhere.figures / page).read_text() == (benched[0] / "figures" / page).read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "eagre"], "no row 'eagre' (did you mean 'eager'?); there are: copy, fused"),
        (["--distribution", "gauss"], "no distribution 'gauss'; there are: normal, laplace"),
        (["--density", "0"], "--density 0.0: must lie in (0, 1]"),
        (["--n", "0"], "--n 0: must be 1 or more"),
        (["--repeats", "0"], "--repeats 0: must be 1 or more"),
        (["--threads", "0"], "--threads 0: must be 1 or more"),
        (["--flush", "-1"], "--flush -1: must be 0 or more"),
    ],
)
def test_bad_words_end_with_a_sentence(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["select", *words])
    assert select.main() == 2
    assert sentence in capsys.readouterr().err


def test_words_that_are_no_numbers_end_with_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["select", "--n", "many"])
    with pytest.raises(SystemExit, match="2"):
        select.main()


def plan(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Case]:
    found: list[Case] = []
    monkeypatch.setattr(sys, "argv", ["select", *words])
    monkeypatch.setattr(select, "bench", lambda asked: found.extend(select.cases(asked)) or 0)
    assert select.main() == 0
    return found


def test_the_default_plan_has_every_size_density_and_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = plan(monkeypatch)
    assert len(cases) == len(set(cases)) == 15
    assert [case.n for case in cases[:6]] == list(select.SIZES)
    assert {case.density for case in cases if case.n == 25_600_000} == set(select.DENSITIES)
    assert {case.distribution for case in cases} == set(select.DISTRIBUTIONS)
    assert Case(14_728_266, 0.001, "vgg16") in cases
    assert Case(*select.STANDARD) in cases


def test_words_are_combined_and_real_gradients_keep_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = plan(monkeypatch, "--n", "100", "200", "--density", "0.1", "--distribution", "ties", "real")
    assert cases == [
        Case(100, 0.1, "ties"), Case(14_728_266, 0.1, "vgg16"), Case(11_173_962, 0.1, "resnet18"),
        Case(200, 0.1, "ties"),
    ]  # fmt: skip


@pytest.mark.parametrize("distribution", list(gradients.SYNTHETIC))
def test_exact_rows_agree_on_every_distribution(distribution: str) -> None:
    lines = {name: Timed(steps.ROWS[name]) for name in ("fused", "numpy", "eager", "sort")}
    case = Case(30_011, 0.01, distribution)
    _, differ = sidebyside.measure(case, lines, set(), 3, 60.0, 2**12, Path(), CPU)
    assert differ == []
    for one in lines.values():
        assert one.why or one.selected == [300] * 3


def test_a_row_that_selects_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(setup: steps.Setup) -> steps.Made:
        chosen = torch.arange(setup.k)
        return steps.Made(lambda acc, grad: Sparse(chosen, acc.add_(grad)[chosen]))

    lines = {"eager": Timed(steps.ROWS["eager"]), "numpy": Timed(replace(steps.ROWS["numpy"], make=first))}
    _, differ = sidebyside.measure(Case(30_011, 0.01, "normal"), lines, set(), 1, 60.0, 2**12, Path(), CPU)
    assert [name for name, _ in differ] == ["numpy"]


def test_a_slow_row_has_fewer_repetitions_and_ratios_are_of_those_it_shares() -> None:
    lines = {name: Timed(steps.ROWS[name]) for name in ("copy", "sort")}
    seconds = 0.0  # so any row is slow
    sidebyside.measure(Case(1000, 0.01, "normal"), lines, set(), 9, seconds, 2**12, Path(), CPU)
    assert {len(one.samples) for one in lines.values()} == {sidebyside.LEAST}
    fast, slow = Timed(steps.ROWS["copy"]), Timed(steps.ROWS["sort"])
    fast.samples, slow.samples = {1: 1.0, 2: 2.0, 3: 4.0}, {2: 8.0, 3: 8.0}
    assert sidebyside.ratio(slow, fast) == {
        "median": 3.0, "low": 2.0, "high": 4.0, "n": 2, "spread": "min to max"
    }  # fmt: skip


def test_the_spread_is_of_percentiles_where_there_are_enough_samples() -> None:
    found = sidebyside.spread([float(i) for i in range(101)])
    assert (found["median"], found["low"], found["high"], found["spread"]) == (50, 5, 95, "5 to 95 %")


def test_what_does_not_fit_into_memory_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(10_000_000, 0.001, "normal")
    lines = {name: Timed(row) for name, row in steps.ROWS.items()}
    monkeypatch.setattr(sidebyside, "free_bytes", lambda device: 0.5 * 2**30)
    assert sidebyside.leave_out(case, lines, CPU, 0)
    left = {name for name, one in lines.items() if one.why}
    assert {"sort", "eager"} <= left
    assert "fused" not in left
    assert "GiB" in str(lines["sort"].why)
    monkeypatch.setattr(sidebyside, "free_bytes", lambda device: 0.1 * 2**30)
    assert not sidebyside.leave_out(case, lines, CPU, 0)
    assert all(one.why for one in lines.values())


def test_real_gradients_come_from_training_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in small_cnn(3, 32, 10).parameters())
    monkeypatch.setitem(gradients.NETWORKS, "small", (small_cnn, size))
    monkeypatch.setitem(gradients.STEPS, "cpu", 6)
    monkeypatch.delenv("DATA_ROOT", raising=False)
    monkeypatch.setattr(gradients, "ROOT", tmp_path)  # no CIFAR-10 there
    made = gradients.real("small", tmp_path, CPU)
    assert made.gradients.shape == (gradients.KEPT, size)
    assert made.residual.count_nonzero() > 0.5 * size
    assert (made.residual == 0).sum() >= int(gradients.DENSITY * size)  # what was sent in the step before
    assert not torch.equal(made.gradients[0], made.gradients[1])
    assert made.source.startswith("small on digits 32 x 32, steps 2 to 6")
    monkeypatch.setattr(gradients, "trained", None)
    again = gradients.real("small", tmp_path, CPU)
    assert torch.equal(again.gradients, made.gradients)
    assert again.source == made.source


def test_resnet18_has_the_size_that_it_is_listed_with() -> None:
    for network, size in gradients.NETWORKS.values():
        assert sum(p.numel() for p in network(3, 32, 10).parameters()) == size


ONE_BLOCK = """
import torch
from experiments.bench import one_block
torch.manual_seed(0)
for numbers, k in (
    (torch.randn(2500).abs(), 7), (torch.randint(0, 3, (1500,)).float(), 900), (torch.zeros(1024), 1)
):
    chosen = one_block.largest(numbers, k)
    assert len(set(chosen.tolist())) == k
    assert torch.equal(numbers[chosen].sort().values, numbers.topk(k).values.sort().values)
"""


def test_one_thread_block_alone_finds_the_same() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", ONE_BLOCK],
        cwd=ROOT,
        env=environment_for(ROOT / "results", TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
