"""Task vector: gradients of any size, without a network."""

from __future__ import annotations

import itertools

import pytest
import torch

from experiments.config import compose
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.task import Task
from experiments.training.vector import draw_gradient, most_square_shape
from experiments.worker.build import build_run
from sparsify.types import BucketContext
from tests.conftest import there
from tests.training.tasks import CPU, backward, model_of

N = 100_000


def gradients(task: Task, rank: int, first: int = 0) -> list[torch.Tensor]:
    data = datasets.load("vector", None, CPU)
    batches = task.batches(data, rank, 2, 0, torch.Generator(), torch.float32, first)
    return [gradient for gradient, _ in itertools.islice(batches, 3)]


def test_what_reaches_the_parameters_is_the_gradient() -> None:
    task = TASKS.build("vector", {"elements": 120, "tensors": 2})
    model = model_of(task, datasets.load("vector", None, CPU))
    assert [tuple(p.shape) for p in model.parameters()] == [(6, 10)] * 2
    gradient = gradients(task, rank=0)[0]
    backward(task, model, (gradient, gradient[:0]))
    assert torch.equal(torch.cat([there(p.grad).flatten() for p in model.parameters()]), gradient)


def test_gradients_change_from_step_to_step_and_from_worker_to_worker_and_begin_anywhere() -> None:
    task = TASKS.build("vector", {"elements": 1000})
    first, second, third = gradients(task, 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, gradients(task, 1)[0])
    assert all(map(torch.equal, gradients(task, 0, first=1), (second, third)))


def test_workers_select_alike_as_much_as_is_stated() -> None:
    k = 1000
    for overlap in (0.0, 0.3, 1.0):
        contexts = (BucketContext(0, rank, 0) for rank in (0, 1))
        first, second = ({*draw_gradient(N, overlap, of).abs().topk(k).indices.tolist()} for of in contexts)
        assert len(first & second) / k == pytest.approx(overlap, abs=0.05)


def test_gradients_have_a_heavy_tail_and_no_preferred_sign() -> None:
    values = draw_gradient(N, 0.0, BucketContext(0, 0, 0))
    assert values.isfinite().all()
    assert values.sign().mean().abs() < 0.02
    top = values.abs().sort(descending=True).values
    assert top[:1000].square().sum() / top.square().sum() > 0.25  # 0.08 in a normal distribution


def test_matrices_are_as_square_as_they_can_be() -> None:
    assert [most_square_shape(elements) for elements in (1, 7, 12, 100_000)] == [
        (1, 1),
        (1, 7),
        (3, 4),
        (250, 400),
    ]


def test_tensors_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"elements=10 can't be put into tensors=3 of one size"):
        TASKS.build("vector", {"elements": 10, "tensors": 3})


def test_there_is_nothing_to_validate() -> None:
    config = compose.resolve(["task=vector", "profile=smoke"])
    with pytest.raises(ValueError, match=r"task=vector learns nothing .* take train.validate=never"):
        build_run(config, None, CPU)
