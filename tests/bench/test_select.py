"""The benchmark of selections: what it is asked, what it records. No test asserts a time."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from experiments.bench._case import Case
from experiments.bench._follower import Ended, Follower
from experiments.bench.select import __main__ as select
from experiments.bench.select import cases as select_cases
from experiments.bench.select.records import read
from experiments.bench.select.results import RATIOS, verdicts
from tests.bench.conftest import ROWS, SMALL, Benched
from tests.conftest import ROOT

NAMES = [f"{above}_over_{below}" for above, below in RATIOS]


def test_the_last_line_is_one_object_with_the_ratios(benched: Benched) -> None:
    done = benched.done
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["bench"], line["n"], line["density"], line["distribution"]) == (
        "select", 20_000, 0.001, "normal",
    )  # fmt: skip
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


def test_a_second_run_appends_and_the_newest_row_counts(
    tmp_path: Path,
    benched: Benched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bench").mkdir()
    store = tmp_path / "bench" / benched.store.name
    store.write_text(benched.store.read_text())
    before = store.read_text().splitlines()
    older = {row["row"]: row for row in read(store)[0]}
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
    newer = {row["row"]: row for row in read(store)[0]}
    assert set(newer) == set(older)
    assert newer["eager"]["samples_ms"] != older["eager"]["samples_ms"]
    assert newer["numpy"] == older["numpy"]


def test_targets_are_judged_by_medians_and_of_the_standard_case_only() -> None:
    ratio = {"low": 0.1, "high": 99.0, "n": 11}
    line = {
        **select_cases.STANDARD._asdict(),
        "eager_over_fused": {"median": 29.9, **ratio},
        "eager_hugepages_over_fused": None,
        "fused_over_add": {"median": 1.2, **ratio},
    }
    speed, tuned, floor = verdicts(line, "cpu")
    assert speed == "eager_over_fused: at least 30 wanted, 29.9 [0.1, 99], n = 11 measured: MISSED"
    assert tuned.endswith("not measured")
    assert floor.endswith("met")
    assert verdicts({**line, "n": 20_000}, "cpu") == []


def test_a_process_that_cannot_follow_says_why() -> None:
    with pytest.raises(Ended, match=r"code 2: .*invalid int value: 'many'"):
        Follower(["many", "0.001", "normal", "1", "0", "."], "").step(0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "eagre"], "no row 'eagre' (did you mean 'eager'?); there are: add, copy, fused"),
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

    def bench(asked: argparse.Namespace) -> int:
        found.extend(select_cases.cases(asked))
        return 0

    monkeypatch.setattr(sys, "argv", ["select", *words])
    monkeypatch.setattr(select, "bench", bench)
    assert select.main() == 0
    return found


def test_the_default_plan_has_every_size_density_and_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = plan(monkeypatch)
    assert len(cases) == len(set(cases)) == 16
    assert [case.n for case in cases[:6]] == list(select_cases.SIZES)
    assert {case.density for case in cases if case.n == 25_600_000} == set(select_cases.DENSITIES)
    assert {case.distribution for case in cases} == set(select_cases.DISTRIBUTIONS)
    assert Case(14_728_266, 0.001, "vgg16") in cases
    assert select_cases.STANDARD in cases


def test_words_are_combined_and_real_gradients_keep_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = plan(monkeypatch, "--n", "100", "200", "--density", "0.1", "--distribution", "ties", "real")
    assert cases == [
        Case(100, 0.1, "ties"), Case(14_728_266, 0.1, "vgg16"), Case(11_173_962, 0.1, "resnet18"),
        Case(200, 0.1, "ties"),
    ]  # fmt: skip
