"""Gradients from a generator in place of a network: what is left of a step is what the method does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import Parameter

from experiments.training.datasets import Dataset
from experiments.training.task import Task
from sparsify.types import BucketContext

SPARE_ELEMENTS = 2**16  # elements beyond n: so many different gradients are views of the same memory
TAIL_SHAPE = 0.25  # shape of the generalised Pareto distribution: its moments below 1 / 0.25 = 4 are finite
# In place of a bucket's, for the generators: no bucket has it, and -1 is the augmentation's.
BUCKET_NUMBER = -2
EPOCH_STEPS = 100  # what an epoch is where nothing is passed over; train.epoch_steps says otherwise


@dataclass(frozen=True)
class VectorTask(Task):
    """A task without data: in each step a worker's gradient is another part of one long vector of its own.

    Magnitudes follow a generalised Pareto distribution, with which Abdelmoniem et al. 2021 (SIDCo,
    arXiv:2101.10761) describe those of deep networks; signs are even. All tensors are alike.
    """

    has_metric: ClassVar[bool] = False
    elements: int = 1
    overlap: float = 0.0  # share of the elements that are alike on all workers

    def steps_per_epoch(self, data: Dataset, workers: int) -> int:
        return EPOCH_STEPS

    def batches(
        self,
        data: Dataset,
        rank: int,
        size: int,
        seed: int,
        generator: Generator,
        dtype: torch.dtype,
        first_batch: int = 0,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's gradients, without end: (n,) views, and nothing to compare with."""
        context = BucketContext(seed, rank, BUCKET_NUMBER)
        spare = min(SPARE_ELEMENTS, self.elements)
        step = first_batch
        long = draw_gradient(self.elements + spare, self.overlap, context).to(generator.device, dtype)
        while True:
            start = context.without_rank.random_key_for_rank(step) % (spare + 1)
            yield long[start : start + self.elements], long[:0]
            step += 1

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs


def draw_gradient(count: int, overlap: float, context: BucketContext) -> Tensor:
    """(count,) float32, of one worker.

    An element is alike on all workers with probability `overlap`, else each draws its own. So of a worker's k
    largest about that share is among the k largest of every other one.
    """
    common = context.without_rank.make_generator_for_rank(torch.device("cpu"))
    shared_values = draw_generalised_pareto(count, common)
    is_own = torch.rand(count, generator=common) >= overlap
    return torch.where(
        is_own,
        draw_generalised_pareto(count, context.make_generator_for_rank(torch.device("cpu"))),
        shared_values,
    )


def draw_generalised_pareto(count: int, generator: Generator) -> Tensor:
    """(count,) float32: generalised Pareto of shape `TAIL_SHAPE` and scale 1, with a sign."""
    uniform = torch.rand(count, generator=generator).mul_(2).sub_(1)
    return (
        uniform.abs()
        .neg_()
        .add_(1)
        .clamp_(min=2**-24)
        .pow_(-TAIL_SHAPE)
        .sub_(1)
        .div_(TAIL_SHAPE)
        .copysign_(uniform)
    )


class VectorModel(nn.Module):
    """A model of so many elements in matrices of one shape, whose gradient is what goes in."""

    def __init__(self, elements: int, tensors: int) -> None:
        super().__init__()
        shape = most_square_shape(elements // tensors)
        self.tensors = nn.ParameterList(Parameter(torch.zeros(shape)) for _ in range(tensors))

    def forward(self, gradient: Tensor) -> Tensor:
        loss: Tensor = GivenGradientLoss.apply(gradient, *self.tensors)
        return loss


class GivenGradientLoss(torch.autograd.Function):
    """A loss of 0 whose gradient is given: backpropagation costs nothing."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *parameters: Tensor) -> Tensor:
        ctx.gradient = gradient
        ctx.shapes = [p.shape for p in parameters]
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.gradient.split([shape.numel() for shape in ctx.shapes])
        return (None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)))


def most_square_shape(elements: int) -> tuple[int, int]:
    """Rows and columns of a matrix, no more rows than columns, with as many rows as that allows."""
    rows = next(rows for rows in range(math.isqrt(elements), 0, -1) if elements % rows == 0)
    return rows, elements // rows
