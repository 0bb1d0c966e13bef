"""What tests share: a command line in a folder of its own, and real data where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clusters import devcluster as devcluster

ROOT = Path(__file__).parent.parent
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def environment_for(results: Path, **extra: str) -> dict[str, str]:
    """The surroundings of a command under test: its results go to `results`, CIFAR-10 is out of reach."""
    clean = {k: v for k, v in os.environ.items() if k not in ("DATA_ROOT", "FORCE", "SPARSIFY_RESULTS")}
    return {**clean, "SPARSIFY_RESULTS": str(results), "PYTHONWARNINGS": "error::ResourceWarning", **extra}


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs `python -m experiments ...` and returns what it printed and its exit code."""

    def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "experiments", *words],
            cwd=ROOT,
            env=environment_for(tmp_path / "results", **extra),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def cifar10_root() -> Path:
    """The folder of a real CIFAR-10."""
    root = os.environ.get("DATA_ROOT")
    if not root or not (Path(root) / "cifar-10-batches-py").is_dir():
        pytest.skip("CIFAR-10 is not at hand: set DATA_ROOT")
    return Path(root)


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """One sentence that contains all `words`, the agreed exit code, no traceback."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr, (word, done.stderr)
