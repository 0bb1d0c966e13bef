"""The benchmark of the fused selection over torch.topk at toy size. No test asserts a time."""

from __future__ import annotations

from pathlib import Path

from tests.bench.conftest import RunBench, lines_of


def test_fused_is_compared_with_topk_in_pages_of_one_size(bench: RunBench, tmp_path: Path) -> None:
    # Small pages first: the server that forks the workers then has no tuned malloc that they would inherit.
    words = (
        "--n", "1100000", "--density", "0.01", "--pages", "small", "huge", "--turns", "2", "--flush", "1",
    )  # fmt: skip
    last = bench("fused", *words)  # exits with 0, so both selected the same magnitudes in every launch
    _, *rows = lines_of(tmp_path, "fused")
    assert [row["pages"] for row in rows] == ["small", "huge"]
    assert [*last["torch_over_fused"].values()] == [row.get("ratio") for row in rows]
    for row in rows:
        if row.get("why"):  # no compiler, or no huge pages
            continue
        assert (row["k"], row["wrong"], row["turns"]) == (11_000, None, [2] * 5)
        assert row["ratio"]["n"] == row["residual_huge_share"]["n"] == 5
        has_huge_pages = row["residual_huge_share"]["high"] > 0
        assert has_huge_pages == (row["pages"] == "huge")
        assert row["pages"] == "huge" or row["malloc_huge_share"]["high"] == 0
