"""The benchmark of `select=auto`: what it records, and what it says last. No test asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.bench import auto
from sparsify import kernels


def test_every_case_is_recorded_and_the_last_line_is_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    words = (
        "--n",
        "64",
        "20000",
        "--layers",
        "--density",
        "0.01",
        "0.1",
        "--seconds",
        "0",
        "--device",
        "cpu",
    )
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    assert auto.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (store,) = (tmp_path / "bench").glob("auto-*.jsonl")
    start, *rows, layers, denser = map(json.loads, store.read_text().splitlines())
    assert start["provenance"]["versions"]["torch"] in torch.__version__
    assert [(row["n"], row["density"], row["k"]) for row in rows] == [
        (64, 0.01, 1), (64, 0.1, 6), (20_000, 0.01, 200), (20_000, 0.1, 2000),
    ]  # fmt: skip
    for row in rows:
        assert row["kernels"]["torch"] == "torch"
        assert (row["kernels"]["auto"] == "torch") == (row["n"] == 64 or row["why"] is not None)
        assert row["torch_over_auto"]["n"] == len(row["samples_ms"]["auto"]) == auto.LEAST
    assert (layers["n"], layers["buckets"], denser["buckets"]) == (14_728_266, 54, 54)
    assert (last["bench"], len(last["cases"]), last["fused_from"]) == ("auto", 6, kernels.NATIVE_FROM)


def row(n: int, torch_over_fused: float) -> dict[str, Any]:
    return {"n": n, "buckets": 1, "torch_over_fused": {"median": torch_over_fused}}


def test_fused_pays_from_the_least_size_above_which_it_was_never_slower() -> None:
    measured = [row(64, 1.2), row(1000, 0.8), row(1000, 3.0), row(5000, 1.1), row(9000, 2.0)]
    assert auto.crossing(measured) == 5000
    assert auto.crossing([*measured, {**row(10**6, 0.9), "buckets": 54}]) == 5000
    assert auto.crossing([*measured, row(9000, 0.9)]) is None
    assert auto.crossing([{"n": 64, "buckets": 1, "torch_over_fused": None}]) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--n", "0"], "--n 0: must be 1 or more"),
        (["--density", "2"], "--density 2.0: must lie in (0, 1]"),
        (["--threads", "0"], "--threads 0: must be 1 or more"),
    ],
)
def test_bad_words_end_with_a_sentence(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    assert auto.main() == 2
    assert sentence in capsys.readouterr().err
