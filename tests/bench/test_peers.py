"""The benchmark of peers: what it records of real processes, and what it says where a peer is missing.

No test asserts a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench import _peer_packages, peers
from experiments.bench._compared_rows import DDP, PEER_ROWS
from experiments.bench._peer_pages import PEERS_PAGE, summarise_losses
from experiments.bench._peer_variants import STARTERS
from tests.bench.conftest import Record, call_bench, last_of, lines_of

WORKERS, EVERY, STEPS = 2, 2, 4
SMALL = (
    "--tasks", "cnn_digits", "--workers", str(WORKERS), "--launches", "1", "--turns", "1",
    "--every", str(EVERY), "--steps", str(STEPS), "--seeds", "1",
)  # fmt: skip
OUTER_TOLERANCE = 1e-3  # of losses: the same algorithm, in another order of sums


def bench_peers(results: Path, *variants: str) -> tuple[dict[tuple[str, str], Record], Record]:
    """Return the rows of a small run by part and variant, and its result."""
    printed = call_bench(results, "peers", *SMALL, "--variants", *variants)
    rows = [row for row in lines_of(results, "peers") if row["kind"] == "row"]
    assert not any(row["wrong"] for row in rows)  # parameters are equal on all workers after a round
    return {(row["part"], row["row"]): row for row in rows}, last_of(printed)


def test_every_part_of_every_variant_has_a_number_or_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No package index is asked, so that torchft is missing."""
    requirements = tmp_path / "peers.txt"
    requirements.write_text("torchft==0.2.0\n")
    monkeypatch.setattr(_peer_packages, "REQUIREMENTS", requirements)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    rows, result = bench_peers(tmp_path, *STARTERS)
    assert {name for _, name in rows} == {*PEER_ROWS} == {*STARTERS}
    for (part, name), row in rows.items():
        if name == "torchft_diloco":
            assert row["why"].startswith("could not run: pip could not install it (")
            assert row["package"] == "torchft (not installed)"
        elif part == "bytes" and row.get("why"):
            assert "network namespace" in row["why"]
        elif part == "bytes":
            assert row["sent_bytes"] > 0
            assert row["reported_bytes"] is None or 0 < row["reported_bytes"] < row["sent_bytes"]
            assert name in (DDP, "torchft_diloco") or row["sent_bytes"] < rows[part, DDP]["sent_bytes"]
        elif part == "loss":
            assert row["loss_minus_ddp"] == pytest.approx(row["loss"] - rows[part, DDP]["loss"])
        else:
            assert len(row["samples_ms"][0]["wall"]) == 1
    place = f"cnn_digits, {WORKERS} workers"
    assert {*result["cpu_over_ddp"][place]} == {*STARTERS} - {DDP, "torchft_diloco"}
    (page,) = (tmp_path / "figures").glob("peers-*.md")
    assert "torchft_diloco not run: could not run: pip" in page.read_text()


@pytest.mark.extended
def test_both_dilocos_are_one_algorithm(tmp_path: Path) -> None:
    if not _peer_packages.peer_packages_folder().is_dir():
        pytest.skip("needs torchft, which `make bench BENCH=peers` installs")
    rows, _ = bench_peers(tmp_path, "torchft_diloco", "distribute_diloco")
    ours, theirs = (rows["loss", name]["loss"] for name in ("distribute_diloco", "torchft_diloco"))
    assert ours == pytest.approx(theirs, rel=OUTER_TOLERANCE)


def test_losses_are_compared_within_seeds_and_missing_ones_are_left_out() -> None:
    def row(name: str, seed: int, loss: float | None, base: float) -> Record:
        number = {"why": "diverged"} if loss is None else {"loss": loss, "loss_minus_ddp": loss - base}
        return {"row": name, "seed": seed, "package": "p", **number}

    rows = [row(DDP, seed, base, base) for seed, base in enumerate((1.0, 2.0, 4.0))]
    rows += [row("ddp_fp16", seed, base and base + 0.5, base or 0) for seed, base in enumerate((1.0, 2.0))]
    rows += [row("ddp_fp16", 2, None, 4.0)]
    base, fp16 = summarise_losses(rows)
    assert (base["seeds"], base["loss - ddp"], fp16["seeds"]) == (3, None, 2)
    assert fp16["loss - ddp"].value == pytest.approx(0.5)


def test_trainings_end_after_whole_rounds() -> None:
    peers.check_whole_rounds(40, 10)
    with pytest.raises(ValueError, match="such as 50"):
        peers.check_whole_rounds(41, 10)


def test_the_page_knows_every_variant() -> None:
    assert [*STARTERS] == [*PEER_ROWS] == [*PEERS_PAGE.row_names]
