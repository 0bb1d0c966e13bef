"""`make bench BENCH=replay`, at toy size, and words that it can't work with."""

from __future__ import annotations

import sys

import pytest

from experiments.bench import replay as bench

TOY = ["--n", "20000", "--density", "0.01", "--workers", "2,8"]


def printed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[tuple[str, str], list[str]]:
    """The rows of its table, by method and workers."""
    monkeypatch.setattr(sys, "argv", ["replay", *TOY, *words])
    assert bench.main() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {(row[0], row[1]): row for row in rows[1:]}


def test_gathers_send_the_published_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = printed(["--methods", "dense,topk,gtopk,oktopk"], monkeypatch, capsys)
    assert len(rows) == 8
    for method in ("dense", "topk", "gtopk"):
        assert rows[method, "8"][3] == rows[method, "8"][4]  # words, published
    assert rows["topk", "8"][5] == "1.000"


def test_selections_may_be_those_of_a_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--methods", "oktopk", "--task", "cnn_digits", "--record", "2", "--steps", "2"]
    assert set(printed(words, monkeypatch, capsys)) == {("oktopk", "2"), ("oktopk", "8")}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--methods", "topq"], "no method 'topq'"),
        (["--methods", "powersgd"], "exchanges no selections"),
        (["--workers", "0"], "whole numbers of 1 or more"),
        (["--link", "loopback"], "need a link with alpha and beta"),
        (["--link", "string"], "link"),
        (["--skew", "100"], "skew=100.0 is out of range"),
        (["--density", "0"], "density=0.0 is out of range"),
        (["--task", "nothing"], "no task 'nothing'"),
    ],
)
def test_they_are_refused_in_a_sentence(
    words: list[str], answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", *TOY, *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert answer in capsys.readouterr().err
