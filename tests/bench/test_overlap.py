"""The benchmark of overlapping: what it is asked, what it records. No test asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench import overlap
from experiments.bench.overlap import LINK, link_of
from sparsify.cost import Cost
from tests.conftest import ROOT, environment_for

SMALL = ("--network", "small_cnn", "--bucket-mb", "0.02", "--repeats", "2", "--batch", "2", "--ratios", "1")


def bench(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.overlap", *words],
        cwd=ROOT, env=environment_for(results), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_last_line_is_the_gain_and_every_sample_is_recorded(tmp_path: Path) -> None:
    rows = ["dense-distribute", "topk-register"]
    done = bench(tmp_path, *SMALL, "--rows", *rows)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["bench"], last["link"]) == ("overlap", LINK)
    assert "simulated" in LINK
    assert list(last["without_over_with"]) == rows
    records = [json.loads(line) for line in (tmp_path / "bench" / "overlap.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == rows
    for record in records:
        ratios = sorted(without / with_ for without, with_ in record["samples_ms"])
        gain = last["without_over_with"][record["row"]]
        assert (gain["low"], gain["high"], gain["n"]) == (
            pytest.approx(ratios[0], 1e-4), pytest.approx(ratios[-1], 1e-4), 2,
        )  # fmt: skip
        assert record["communication_ms"] == pytest.approx(record["backward_ms"])
        assert "host" not in record["provenance"]


@pytest.mark.parametrize(
    "words", [["--ratios", "0"], ["--density", "2"], ["--rows", "topk"], ["--bucket-mb", "nan"]], ids=" ".join
)
def test_what_it_can_not_be_asked_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap", *words])
    with pytest.raises(SystemExit) as ended:
        overlap.main()
    assert ended.value.code == 2


def test_a_link_takes_as_long_as_it_was_asked_to() -> None:
    sent = Cost(100, 10**6)
    for seconds in (0.001, 1.0):
        assert link_of(seconds, sent, 0.0001).seconds(sent) == pytest.approx(seconds)
