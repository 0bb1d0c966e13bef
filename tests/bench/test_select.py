"""The benchmark of selections: what it is asked, what it records, the picture and the page of it; the steps,
side by side, and the gradients that they are taken on. No test asserts a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench import _gradients as gradients
from experiments.bench import _side_by_side as side_by_side
from experiments.bench import _steps, _timing, select
from experiments.bench._runner import shipped, text_of
from experiments.bench._select_page import LOOKS, PAGE, read
from experiments.bench._side_by_side import SelectCase, SideBySide, StepTimes, leave_out
from experiments.bench._steps import Follower, Made, NotRun, Setup
from experiments.config.folders import Folders
from experiments.training.networks import small_cnn
from sparsify.types import Sparse
from tests.bench.conftest import ROWS, SMALL, Benched, last_of
from tests.conftest import ROOT, Command

CPU = torch.device("cpu")
NAMES = [f"{above}_over_{below}" for above, below in select.RATIOS]


def test_the_last_line_is_one_object_with_the_ratios(benched: Benched) -> None:
    line = last_of(benched.done)
    standard = {"bench": "select", "n": 20_000, "density": 0.001, "distribution": "normal"}
    assert line.items() >= standard.items()
    for name in NAMES:
        if line[name] is None:  # where nothing can be compiled
            assert "not run" in line["why"][name]
        else:
            assert line[name]["low"] <= line[name]["median"] <= line[name]["high"]
            assert line[name]["n"] == 2
    assert line["eager_over_numpy"] is not None


def test_every_row_is_recorded_with_what_a_reader_needs(benched: Benched) -> None:
    rows, starts = read(benched.store)
    assert {row["row"] for row in rows} == set(ROWS)
    assert set(LOOKS) == set(_steps.ROWS)
    assert len(starts) == 1
    assert starts[0]["provenance"]["versions"]["torch"] in torch.__version__
    assert "host" not in starts[0]["provenance"]
    of = {row["row"]: row for row in rows}
    assert of["paper_kernel"]["why"] == "needs a GPU"
    for name in ("add", "copy", "eager", "numpy", "dgc", "gaussiank", "sort", "threshold"):
        assert len(of[name]["samples_ms"]) == of[name]["repeats"] == 2
        assert of[name]["k"] == 20
        assert of[name]["over_add"]["n"] == of[name]["over_copy"]["n"] == of[name]["cpu_ms"]["n"] == 2
    followed = of["eager_hugepages"]  # in a process of its own, where the system has huge pages
    assert followed["selected_over_k"] == 1 if "median_ms" in followed else "needs" in followed["why"]
    for name in ("eager", "numpy", "sort", "threshold"):  # no ties here, so the k-th magnitude has k
        assert of[name]["selected_over_k"] == 1
    assert of["copy"]["bytes_per_element"] == 12
    assert of["eager"]["host_syncs"] == 0
    assert of["threshold"]["host_syncs"] == 1
    assert of["gaussiank"]["host_syncs"] >= 1
    assert 0 <= of["numpy"]["fallback_rate"] <= 1
    assert str(ROOT) not in benched.store.read_text()


def test_other_rows_are_measured_again_and_the_newest_count(
    tmp_path: Path, benched: Benched, here: Command
) -> None:
    (tmp_path / "results/bench").mkdir(parents=True)
    store = tmp_path / "results/bench" / benched.store.name
    store.write_text(benched.store.read_text())
    before = store.read_text().splitlines()
    older = {row["row"]: row for row in read(store)[0]}
    threads = torch.get_num_threads()
    line = last_of(here("bench", "select", *SMALL, "--rows", "copy", "eager"))
    torch.set_num_threads(threads)
    assert line["eager_over_fused"] is None
    assert line["why"]["eager_over_fused"] == "fused was not asked for"
    after = store.read_text().splitlines()
    assert after[: len(before)] == before
    assert len(after) == len(before) + 3
    newer = {row["row"]: row for row in read(store)[0]}
    assert set(newer) == set(older)
    assert newer["eager"]["samples_ms"] != older["eager"]["samples_ms"]
    assert newer["numpy"] == older["numpy"]


def test_targets_are_judged_by_medians_and_of_the_standard_case_only() -> None:
    ratio = {"low": 0.1, "high": 99.0, "n": 11}
    line = select.STANDARD._asdict() | {
        "eager_over_fused": {"median": 29.9, **ratio},
        "eager_hugepages_over_fused": None,
        "fused_over_add": {"median": 1.2, **ratio},
    }
    speed, tuned, floor = select.verdicts(line, "cpu")
    assert speed == "eager_over_fused: at least 30 wanted, 29.9 [0.1, 99], n = 11 measured: MISSED"
    assert tuned.endswith("not measured")
    assert floor.endswith("met")
    assert select.verdicts({**line, "n": 20_000}, "cpu") == []


def test_a_process_that_cannot_follow_says_why() -> None:
    with pytest.raises(NotRun, match=r"code 1: \w+: "):
        Follower(['["many", 0.001, "normal", 1, 0, "."]'], "").step(0)


def test_the_default_plan_has_every_size_density_and_distribution() -> None:
    cases = select.cases((), (), ())
    assert len(cases) == len(set(cases)) == 16
    assert [case.n for case in cases[:6]] == list(select.SIZES)
    assert {case.density for case in cases if case.n == 25_600_000} == set(select.DENSITIES)
    assert {case.distribution for case in cases} == set(gradients.DISTRIBUTIONS)
    assert {SelectCase(14_728_266, 0.001, "vgg16"), select.STANDARD} <= {*cases}


def test_words_are_combined_and_real_gradients_keep_their_size() -> None:
    assert select.cases((100, 200), (0.1,), ("ties", "real")) == [
        SelectCase(100, 0.1, "ties"), SelectCase(14_728_266, 0.1, "vgg16"),
        SelectCase(11_173_962, 0.1, "resnet18"), SelectCase(200, 0.1, "ties"),
    ]  # fmt: skip


def test_picture_and_page_are_drawn(benched: Benched) -> None:
    store = benched.store
    assert (benched.results / "figures" / f"{store.stem}.png").read_bytes().startswith(b"\x89PNG")
    page = (benched.results / "figures" / f"{store.stem}.md").read_text()
    assert "## n = 20,000, density 0.001, normal" in page
    assert "| eager |" in page
    assert "paper_kernel not run: needs a GPU" in page


def test_records_from_before_there_was_an_add_are_drawn_against_the_copy(
    tmp_path: Path, benched: Benched
) -> None:
    newer = ("cpu_ms", "over_add", "eager_hugepages_over", "cpu_over_add", "cpu_eager_over")
    records = [json.loads(line) for line in benched.store.read_text().splitlines()]
    for record in records:
        for name in newer:
            record.pop(name, None)
    store = tmp_path / benched.store.name
    store.write_text(text_of([record for record in records if record.get("row") != "add"]))
    PAGE.draw_one(store, tmp_path)
    page = (tmp_path / f"{store.stem}.md").read_text()
    assert "as a multiple of a copy that moves 12n bytes" in page
    assert "| eager |" in page


def test_the_figure_needs_no_torch(tmp_path: Path, benched: Benched) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom experiments.bench import _select_page\n"
        f"print(_select_page.PAGE.draw_one(Path({str(benched.store)!r}), Path({str(tmp_path)!r})))\n"
        "assert 'torch' not in sys.modules"
    )
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert Path(said.strip()).exists()


def test_shipped_records_are_drawn_as_they_were(tmp_path: Path) -> None:
    """They are older than the fields that rows have today."""
    (store,) = (ROOT / "results/shipped/bench").glob("select-*.jsonl")
    PAGE.draw_one(store, tmp_path)
    page = f"{store.stem}.md"
    assert (tmp_path / page).read_text() == (ROOT / "results/shipped/figures" / page).read_text()


def test_shipped_are_the_newest_rows_and_figures_are_drawn_from_them(
    tmp_path: Path, benched: Benched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folders, "shipped", tmp_path / "shipped")
    monkeypatch.setenv("SPARSIFY_RESULTS", str(benched.results))
    store, threads = benched.store, torch.get_num_threads()
    made = select.select(n=(20_000,), device="cpu", threads=1)
    torch.set_num_threads(threads)
    for path in shipped("select", made, Folders()):
        assert path.exists()
    assert read(tmp_path / "shipped/bench" / store.name) == read(store)
    folders = Folders(tmp_path)
    assert PAGE.redraw(folders) == [tmp_path / "figures" / f"{store.stem}.png"]
    page = f"{store.stem}.md"
    assert (folders.figures / page).read_text() == (benched.results / "figures" / page).read_text()


# The steps.


def beside(
    n: int, distribution: str, rows: tuple[str, ...], repeats: int, seconds: float = 60.0
) -> tuple[dict[str, StepTimes], dict[str, str]]:
    """What rows took, and a sentence for each that chose others."""
    lines = {name: StepTimes() for name in rows}
    case = SelectCase(n, 0.01, distribution)
    return lines, SideBySide(case, lines, set(), 2**12, Path(), CPU).measured(repeats, seconds)[1]


@pytest.mark.parametrize("distribution", [*gradients.SYNTHETIC, gradients.FIRST_TIED])
def test_exact_rows_agree_on_every_distribution(distribution: str) -> None:
    lines, differ = beside(30_011, distribution, ("fused", "fallback", "numpy", "eager", "sort"), 3)
    assert differ == {}
    for timed in lines.values():
        assert timed.why or timed.selected == [300] * 3


def test_a_row_that_selects_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(setup: Setup) -> Made:
        chosen = torch.arange(setup.k)
        return Made(lambda acc, grad: Sparse(chosen, acc.add_(grad)[chosen]))

    monkeypatch.setitem(_steps.ROWS, "numpy", replace(_steps.ROWS["numpy"], make=first))
    _, differ = beside(30_011, "normal", ("eager", "numpy"), 1)
    assert set(differ) == {"numpy"}


def test_a_slow_row_has_fewer_repetitions() -> None:
    lines, _ = beside(1000, "normal", ("copy", "sort"), 9, seconds=0.0)  # so any row is slow
    assert {len(timed.samples) for timed in lines.values()} == {side_by_side.LEAST}


def test_what_does_not_fit_into_memory_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SelectCase(10_000_000, 0.001, "normal")
    lines = {name: StepTimes() for name in _steps.ROWS}
    monkeypatch.setattr(_timing, "free_bytes", lambda device: 0.5 * 2**30)
    assert leave_out(case, lines, CPU, 0)
    left = {name for name, timed in lines.items() if timed.why}
    assert {"sort", "eager"} <= left
    assert "fused" not in left
    assert "GiB" in str(lines["sort"].why)
    monkeypatch.setattr(_timing, "free_bytes", lambda device: 0.1 * 2**30)
    assert not leave_out(case, lines, CPU, 0)
    assert all(timed.why for timed in lines.values())


# The gradients.


def test_real_gradients_come_from_training_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in small_cnn(3, 32, 10).parameters())
    monkeypatch.setitem(gradients.NETWORKS, "small", (small_cnn, size))
    monkeypatch.setitem(gradients.STEPS, "cpu", 6)
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))  # no CIFAR-10 there
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
