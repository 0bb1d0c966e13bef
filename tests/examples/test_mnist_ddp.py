"""The example of DistributedDataParallel, as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import mnist_ddp
from tests.conftest import ROOT

STEPS = ("--steps", "40", "--batch-size", "32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set in MNIST's format: the brightest tenth of an image is its digit."""
    root = tmp_path_factory.mktemp("data")
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 640), ("t10k", 100)):
        labels = torch.arange(count) % 10
        images = torch.randint(0, 100, (count, 28, 28), generator=torch.Generator().manual_seed(count))
        for image, label in zip(images, labels.tolist(), strict=True):
            image.view(-1)[78 * label : 78 * (label + 1)] += 150
        write(raw / f"{name}-images-idx3-ubyte", images.to(torch.uint8))
        write(raw / f"{name}-labels-idx1-ubyte", labels.to(torch.uint8))
    return root


def write(path: Path, tensor: torch.Tensor) -> None:
    header = [0, 0, 8, tensor.dim(), *(byte for n in tensor.shape for byte in n.to_bytes(4, "big"))]
    path.write_bytes(bytes(header) + tensor.numpy().tobytes())


def test_torchrun_trains_it_on_two_workers(data: Path) -> None:
    words = ["--data", str(data), "--method", "topk", "--density", "0.1", *STEPS]
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/mnist_ddp.py", *words]
    calm = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **calm}
    command = [sys.executable, "-m", *run]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^accuracy (\S+)$", done.stdout, re.MULTILINE)  # rank 0 speaks
    assert float(accuracy) > 0.9


def test_both_doors_train_alike(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is enough to see it."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    topk = ("--method", "topk", "--density", "0.1")
    with torch.random.fork_rng(devices=[]):
        plain, register, distribute, *overlapped = (
            mnist_ddp.main(("--data", str(data), *words, *STEPS))
            for words in (
                (), topk, (*topk, "--through", "distribute"), (*topk, "--overlap"),
                (*topk, "--through", "distribute", "--overlap"),
            )
        )  # fmt: skip
    assert plain > 0.9
    assert register > 0.9
    assert register == distribute
    assert overlapped == [register, distribute]
