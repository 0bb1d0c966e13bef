"""More virtual ranks than memory holds are refused before any is made."""

from __future__ import annotations

import pytest
import torch

from experiments.config import compose
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.worker import memory
from experiments.worker.build import RunComponents, build_run
from tests.conftest import Command, refused

CPU = torch.device("cpu")
MB = 2**20


def built(*words: str) -> RunComponents:
    return build_run(compose.resolve(["task=vector", "train.validate=never", *words]), None, CPU)


def check(run: RunComponents, workers: int) -> None:
    memory.check_memory_for_virtual_ranks([run], workers)


def rank_mb(*words: str) -> float:
    run = built("task.elements=1000000", *words)
    model = run.task.make_model(run.data, 0, CPU, torch.float32)
    return memory.measure_bytes_per_rank(run.task, model, run.method, run.settings) / MB


def test_a_rank_of_local_steps_holds_parameters_optimiser_and_anchor_besides() -> None:
    """Tensors have 4 MB each: gradient, parameters, anchor, Nesterov's momentum, and one message.

    There is one message, for so much travels together; task vector's SGD has no momentum.
    """
    assert rank_mb("method=diloco") == pytest.approx(5 * 4e6 / MB, rel=0.01)
    assert rank_mb("method=localsgd") == pytest.approx(4 * 4e6 / MB, rel=0.01)
    # The residual; and 1.6 % of the elements: where they lie, and in which chunk.
    assert 4 * 4e6 / MB < rank_mb("method=sparseloco") < 4.3 * 4e6 / MB


def test_a_rank_holds_its_gradient_and_what_its_method_needs() -> None:
    """4 MB a tensor: gradient; and residual; and momentum; and the work buffers of torch's operators."""
    gradient = 4e6 / MB
    assert rank_mb("method=dense") == pytest.approx(gradient, rel=0.01)
    assert rank_mb("method=topk", "method.density=0.001") == pytest.approx(2 * gradient, rel=0.05)
    assert rank_mb("method=dgc", "method.density=0.001") > 2.9 * gradient
    plain = rank_mb("method=topk", "method.density=0.001", "select=torch")
    assert plain > 2.9 * gradient  # magnitudes


def test_the_most_that_fit_are_named_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = built("task.elements=1000000", "method=topk", "method.density=0.001")
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 100 * MB)
    said = r"workers=64 virtual ranks need 0\.5 GiB: .* each .*; 0\.1 are free .* workers=(\d+)$"
    with pytest.raises(ValueError, match=said) as refusal:
        check(run, 64)
    fitting = int(str(refusal.value).rpartition("=")[2])
    assert 9 <= fitting <= 11  # (90 - 8) / 8
    check(run, fitting)
    with pytest.raises(ValueError, match=f"workers={fitting}$"):
        check(run, fitting + 1)
    with pytest.raises(ValueError, match=f"workers={fitting} virtual ranks need"):
        memory.check_memory_for_virtual_ranks([run, run], fitting)  # variants are counted together


def test_a_model_that_does_not_fit_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_bytes_per_rank", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 2**17)
    with pytest.raises(ValueError, match=r"the model does not fit into memory: .* take a smaller one"):
        check(built("task.elements=1000000"), 8)


@pytest.mark.extended
def test_parameters_that_are_not_trained_are_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    data = datasets.load("digits32", None, CPU)
    part = built("method=topk")._replace(task=TASKS.build("maetiny_cifar10", {}), data=data)
    size = sum(p.nbytes for p in part.task.make_model(part.data, 0, CPU, torch.float32).parameters())
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 12 * size)
    with pytest.raises(ValueError, match=r"which is enough for workers=(4|3)$"):
        memory.check_memory_for_virtual_ranks([part], 8)


def test_a_run_that_does_not_fit_ends_with_a_sentence(here: Command) -> None:
    done = here(
        "run", "method=topk", "task=vector", "task.elements=10000000", "train.validate=never",
        "profile=smoke", "workers=90000", "cluster=virtual",
    )  # fmt: skip
    refused(done, "workers=90000 virtual ranks need", "which is enough for workers=")
