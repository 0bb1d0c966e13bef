"""The benchmark of links: the fit, what it is asked, what it writes. No test asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.bench import link
from experiments.bench._link_fit import fit, together
from sparsify.cost import Cost, Link
from tests.conftest import ROOT, environment_for

TRUE = Link(1e-4, 8e-9)
COSTS = [Cost(messages, size) for messages in (2, 6) for size in (2**10, 2**16, 2**22)]


def noisy(spread: float) -> list[list[float]]:
    draws = np.random.default_rng(1)
    return [list(TRUE.seconds(cost) * draws.lognormal(0, spread, 21)) for cost in COSTS]


def test_a_fit_finds_the_link_behind_exact_times() -> None:
    found = fit(COSTS, noisy(0.0))
    assert found.alpha_s == pytest.approx((TRUE.alpha_s,) * 3)
    assert found.beta_s_per_byte == pytest.approx((TRUE.beta_s_per_byte,) * 3)
    assert found.residuals == pytest.approx([0.0] * len(COSTS), abs=1e-9)


def test_intervals_hold_the_link_behind_noisy_times() -> None:
    found = fit(COSTS, noisy(0.1))
    assert found.alpha_s.low < TRUE.alpha_s < found.alpha_s.high
    assert found.beta_s_per_byte.low < TRUE.beta_s_per_byte < found.beta_s_per_byte.high
    assert max(map(abs, found.residuals)) < 0.1


def test_small_messages_count_as_much_as_large_ones() -> None:
    """In a fit of absolute errors, 4 MiB would decide alone."""
    slow = [[2 * seconds for seconds in each] if cost.sent_bytes < 2**12 else each
            for cost, each in zip(COSTS, noisy(0.0), strict=True)]  # fmt: skip
    assert fit(COSTS, slow).alpha_s.value > 1.3 * TRUE.alpha_s


def test_no_number_of_a_link_is_negative() -> None:
    falling = [[1.0 / (1 + at)] for at, _ in enumerate(COSTS)]
    found = together({"ping-pong": (COSTS, falling)})
    assert found.alpha_s.value >= 0
    assert found.beta_s_per_byte.value >= 0


def bench(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench.link", *words],
        cwd=ROOT, env=environment_for(results), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_loopback_is_measured_and_every_sample_recorded(tmp_path: Path) -> None:
    done = bench(tmp_path, "--largest", "4096", "--repeats", "3")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["cluster"], last["link"], last["workers"]) == ("local", "loopback", 2)
    kinds = ["ping-pong", "all_reduce", "all_gather", "all_to_all"]
    assert list(last["fits"]) == [*kinds, "all together"]
    (record,) = (json.loads(line) for line in (tmp_path / "bench" / "link.jsonl").read_text().splitlines())
    assert [(row["kind"], row["size"]) for row in record["samples"]] == [
        (kind, size) for kind in kinds for size in (1024, 4096)
    ]
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in record["samples"])
    assert "host" not in record["provenance"]


def test_a_link_file_is_one_that_simulations_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "LOCAL", tmp_path / "link")
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    found: list[dict[str, Any]] = [
        {"kind": "all_reduce", "size": cost.sent_bytes, **cost._asdict(), "seconds": each}
        for cost, each in zip(COSTS, noisy(0.0), strict=True)
    ]
    link.report(link.configured([]), found, "office")
    text = (tmp_path / "link" / "office.yaml").read_text()
    assert text.startswith("# @package cluster.link\n")
    assert yaml.safe_load(text) == {
        "alpha_s": pytest.approx(TRUE.alpha_s), "beta_s_per_byte": pytest.approx(TRUE.beta_s_per_byte)
    }  # fmt: skip
    assert "say link=office" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=virtual", "link=ethernet"], "no link that could be measured"),
        (["workers=1"], "a link joins at least 2"),
        (["link=ethernet_7g"], "ethernet_7g"),
        (["--name", "Office"], "take small letters"),
        (["--name", "ethernet_1g"], "conf/link has a link of that name"),
        (["--repeats", "0"], "whole number"),
    ],
)
def test_what_it_can_not_be_asked_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["link", *words])
    with pytest.raises(SystemExit) as ended:
        link.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_sizes_end_where_they_are_told_to() -> None:
    assert link.sizes(2**14) == [2**10, 2**12, 2**14]
    assert link.sizes(2**26)[-1] == 2**26
    assert link.sizes(5) == [2**10]
