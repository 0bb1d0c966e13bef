"""The benchmark of selections: what it is asked, what it records, the picture and the page of it. No test
asserts a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.bench import _gradients, _steps, select
from experiments.bench._runner import shipped, text_of
from experiments.bench._select_page import LOOKS, draw_one, read, redraw
from experiments.bench._side_by_side import SelectCase
from experiments.bench._steps import Follower, NotRun
from experiments.config.folders import Folders
from tests.bench.conftest import ROWS, SMALL, Benched, last_of
from tests.conftest import ROOT, Command

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
    assert {case.distribution for case in cases} == set(_gradients.DISTRIBUTIONS)
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
    draw_one(store, tmp_path)
    page = (tmp_path / f"{store.stem}.md").read_text()
    assert "as a multiple of a copy that moves 12n bytes" in page
    assert "| eager |" in page


def test_the_figure_needs_no_torch(tmp_path: Path, benched: Benched) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom experiments.bench import _select_page\n"
        f"print(_select_page.draw_one(Path({str(benched.store)!r}), Path({str(tmp_path)!r})))\n"
        "assert 'torch' not in sys.modules"
    )
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert Path(said.strip()).exists()


def test_shipped_records_are_drawn_as_they_were(tmp_path: Path) -> None:
    """They are older than the fields that rows have today."""
    (store,) = (ROOT / "results/shipped/bench").glob("select-*.jsonl")
    draw_one(store, tmp_path)
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
    assert redraw(folders) == [tmp_path / "figures" / f"{store.stem}.png"]
    page = f"{store.stem}.md"
    assert (folders.figures / page).read_text() == (benched.results / "figures" / page).read_text()
