"""A run in a single process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from analysis.records.files import read_struct_if_there
from analysis.records.log import RankLog
from analysis.records.schema import Progress
from experiments.config import compose
from experiments.worker.build import effective_precision, prepare_device, set_gpu_precision, tf32_backends
from experiments.worker.run import ProgressFile, gather_distinct_names
from slurm.environment import WorkerPlace
from sparsify.comm import virtual


def test_who_searched_on_any_rank_is_told() -> None:
    """Because a node without a compiler makes the others wait."""

    def told(*names: str) -> list[list[str]]:
        return virtual.run(3, lambda comm: gather_distinct_names(names[comm.rank], comm, torch.device("cpu")))

    assert told("native avx2", "numpy", "native avx2") == [["native avx2", "numpy"]] * 3
    assert told("", "", "") == [[]] * 3


@pytest.fixture
def products_as_before() -> Iterator[None]:
    before = [backend.fp32_precision for backend in tf32_backends()]
    yield
    for backend, products in zip(tf32_backends(), before, strict=True):
        backend.fp32_precision = products


@pytest.mark.usefixtures("products_as_before")
def test_tf32_is_taken_where_there_is_some_and_what_was_got_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    device = torch.device("cuda", 0)
    for version, asked, got, products in (
        (8, "tf32", "tf32", "tf32"),
        (8, "fp32", "fp32", "ieee"),
        (7, "tf32", "fp32", "ieee"),  # a V100
        (9, "fp64", "fp64", "ieee"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=version: (of, 0))
        set_gpu_precision(asked, device)
        assert effective_precision(asked, device) == got
        assert {backend.fp32_precision for backend in tf32_backends()} == {products}
        assert ("Tesla V100 has no TF32" in capsys.readouterr().err) is (asked != got)
        assert effective_precision(asked, torch.device("cpu")) == asked


def test_a_worker_without_a_gpu_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose.resolve(["task=cnn_cifar10", "device=cuda", f"threads={torch.get_num_threads()}"])
    for gpus, why in ((0, "torch finds no GPU here"), (1, "2 workers need 2 GPUs and this")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ValueError, match=why):
            prepare_device(config, WorkerPlace(1, 2, 1))


def test_the_note_of_progress_has_the_newest_loss_and_accuracy_that_are_numbers(tmp_path: Path) -> None:
    note = ProgressFile(tmp_path / "progress.json", 100)
    with RankLog(tmp_path / "rank0.jsonl") as log:
        note.newest = log.progress
        log.add_line("step", step=0, loss=2.5)
        log.add_line("epoch", epoch=1, val_top1=12.5, train_loss=2.6)
        log.add_line("step", step=1, loss=2.25)
        log.add_line("step", step=1, loss=9.0, variant="dense")  # variants that take turns have a loss each
        note(100)
        assert read_struct_if_there(note.path, Progress) == Progress(100, 100, 2.25, 12.5)
        log.add_line("step", step=2, loss=float("nan"))
        note(100)
        assert read_struct_if_there(note.path, Progress) == Progress(100, 100, None, 12.5)
