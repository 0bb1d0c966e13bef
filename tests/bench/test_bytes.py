"""Words that `make bench BENCH=bytes` can't work with."""

from __future__ import annotations

import sys

import pytest

from experiments.bench import bytes as bench


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--n", "150"], "150 is no multiple of 100"),
        (["--n", "0"], "0 is no multiple of 100"),
        (["--n", "many"], "many is no multiple of 100"),
        (["--methods", "topk,topq"], "no method 'topq' (did you mean 'topk'?); there are: "),
    ],
)
def test_they_are_refused_in_a_sentence(
    words: list[str], answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bytes", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert answer in capsys.readouterr().err
