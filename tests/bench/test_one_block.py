"""The emulated top-k of torch 1.8.1."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment_for

ONE_BLOCK = """
import torch
from experiments.bench import _one_block
torch.manual_seed(0)
for numbers, k in (
    (torch.randn(2500).abs(), 7), (torch.randint(0, 3, (1500,)).float(), 900), (torch.zeros(1024), 1)
):
    chosen = _one_block.largest(numbers, k)
    assert len(set(chosen.tolist())) == k
    assert torch.equal(numbers[chosen].sort().values, numbers.topk(k).values.sort().values)
"""


def test_one_thread_block_alone_finds_the_same() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", ONE_BLOCK],
        cwd=ROOT,
        env=environment_for(ROOT / "results", TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
