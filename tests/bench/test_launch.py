"""The benchmark of launches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, environment_for


def bench(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.launch", *words],
        cwd=ROOT, env=environment_for(results), capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_last_line_is_what_the_host_takes_and_says_who_launched(tmp_path: Path) -> None:
    done = bench(tmp_path, "--repeats", "30")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["launcher"] == "does nothing; no GPU" or "GPU" not in line["launcher"]
    assert line["host_us"]["n"] == line["ordinary_host_us"]["n"] == line["ordinary_over_kept"]["n"] == 30
    assert 0 < line["host_us"]["low"] <= line["host_us"]["median"] <= line["host_us"]["high"]
    (record,) = map(json.loads, (tmp_path / "bench/launch.jsonl").read_text().splitlines())
    assert line.items() <= record.items()
    assert {"at", "commit", "dirty"} <= record.keys()


def test_words_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    done = bench(tmp_path, "--repeats", "0")
    assert done.returncode == 2
    assert "0 is no whole number of 1 or more" in done.stderr
    assert "Traceback" not in done.stderr
