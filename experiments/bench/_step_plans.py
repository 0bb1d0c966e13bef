"""Launch plans of the benchmark of whole steps: times of steps, counts of a step, times around the search."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

import sparsify
from experiments.bench._launches import CPU, LaunchPlan, TimedVariant
from experiments.bench._operator_count import OperatorCounter
from experiments.bench._runner import Record
from experiments.bench._select_comparison import cache_flush_bytes
from experiments.bench._step_variants import NETWORKS, STEP_MAKERS, TrainingStepSetup
from sparsify.comm import Comm
from sparsify.core import huge_pages

SETTLING_STEPS = 2  # before one is counted: DDP rebuilds its buckets after the first
NUM_COPIES = 3  # of the gradient around the search, which take turns


def training_step_setup_from_options(
    comm: Comm, options: Any, around_averaging: Any = None
) -> TrainingStepSetup:
    return TrainingStepSetup(
        options.network, options.layers, options.density, options.bucket_mb, comm.rank,
        around_averaging=around_averaging,
    )  # fmt: skip


def plan_whole_steps(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time the steps of all variants."""
    setup = training_step_setup_from_options(comm, options)
    return LaunchPlan({name: TimedVariant(STEP_MAKERS[name](setup)) for name in options.ways})


def count_step_operators(comm: Comm, options: Any) -> LaunchPlan:
    """Count what one settled step of each variant does, without timing it.

    Collectives are those of the whole step; operators are those that run where gradients are averaged.
    """
    counts_by_variant = dict[str, Record]()
    for name in options.ways:
        context = SwitchableContext()
        whole_step = OperatorCounter()
        averaging = OperatorCounter()
        step = STEP_MAKERS[name](training_step_setup_from_options(comm, options, context))
        for _ in range(SETTLING_STEPS):
            step()
        context.inner = averaging
        with whole_step:
            step()
        counts: Record = {"collectives": whole_step.num_collectives_but_buffer_broadcasts}
        if averaging.counts:
            counts |= {
                "operations": averaging.num_operations_but_collectives,
                "around_search": averaging.num_operations_around_search,
                "operators": dict(averaging.counts.most_common()),
            }  # fmt: skip
        counts_by_variant[name] = counts
        del step
        gc.collect()
    return LaunchPlan(make_report=lambda: {"counts": counts_by_variant})


class SwitchableContext:
    """A callable that returns the context `inner`, or a context that does nothing while `inner` is None."""

    inner: AbstractContextManager[object] | None = None

    def __call__(self) -> AbstractContextManager[object]:
        return self.inner or nullcontext()


class PreparedGradientsLoss(Function):
    """A loss whose backpropagation only hands over gradients, and then releases them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        result = (None, *ctx.gradients)
        ctx.gradients.clear()  # so that autograd alone has them, and may keep them as they are
        return result


def plan_times_around_search(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time a step of Top-k without a network, beside the in-place add of as many elements.

    `aggregate` is the check and the averaging; `around` also has `zero_grad` and autograd's accumulation of
    gradients. Caches are cold.
    """
    shapes = [p.shape for p in NETWORKS[options.network].make(options.layers).parameters()]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    n = sum(p.numel() for p in parameters)
    rng = torch.Generator().manual_seed(options.launch)
    sources = cycle([[torch.randn(shape, generator=rng) for shape in shapes] for _ in range(NUM_COPIES)])
    inner = torch.optim.SGD(parameters, lr=1.0)
    method = sparsify.build("topk", density=options.density)
    optimizer = sparsify.distribute(inner, nn.ParameterList(parameters), method)
    acc, grad = (huge_pages.request(torch.empty(n)).normal_(generator=rng) for _ in range(2))
    cold_memory = torch.full((cache_flush_bytes(CPU) // 4,), 1.0)
    gradients = list[Tensor]()

    def copy_gradients() -> None:
        """Put the gradients into memory that nothing else has."""
        gradients[:] = [
            huge_pages.request(torch.empty_like(source)).copy_(source) for source in next(sources)
        ]

    def backward() -> None:
        optimizer.zero_grad()
        PreparedGradientsLoss.apply(gradients, *parameters).backward()

    def backward_and_aggregate() -> None:
        backward()
        optimizer.aggregate()

    def prepare(*actions: Callable[[], object]) -> Callable[[], None]:
        def run_actions() -> None:
            for action in actions:
                action()
            cold_memory.sum()

        return run_actions

    for _ in range(SETTLING_STEPS):
        copy_gradients()
        backward_and_aggregate()
    settled_totals = total_candidates_and_selected(optimizer)

    def report() -> Record:
        candidates, selected = (total_candidates_and_selected(optimizer) - settled_totals).tolist()
        copy_gradients()
        with OperatorCounter() as counter:
            backward_and_aggregate()
        return {
            "n": n, "candidates_over_k": candidates / selected if selected else None,
            "operator_bytes": counter.nbytes, "operators": dict(counter.counts.most_common()),
        }  # fmt: skip

    variants = {
        "add": TimedVariant(lambda: acc.add_(grad), prepare()),
        "aggregate": TimedVariant(optimizer.aggregate, prepare(copy_gradients, backward)),
        "around": TimedVariant(backward_and_aggregate, prepare(copy_gradients)),
    }
    return LaunchPlan(variants, report)


def total_candidates_and_selected(optimizer: Any) -> Tensor:
    """Return the numbers of candidates and of selected elements of all searches until now."""
    stats = optimizer.engine.search_stats().values()
    return torch.tensor([[search.candidates, search.selected] for search in stats]).sum(0)
