"""Sparsified gradients in one's own training: what the optimizer wrapper refuses.

Acts of users are told in tests/sparsify/wrappers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.distributed_optimizer import DistributedOptimizer
from sparsify.wrappers.engine import NonFiniteGradientError
from sparsify.wrappers.handshake import WorkerMismatch
from tests.conftest import there
from tests.sparsify.laws import build


def wrapped(model: nn.Module, comm: Comm) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return DistributedOptimizer(inner, model, build("topk", 0.2), comm)


def test_a_gradient_that_is_not_finite_is_named_and_reaches_no_residual() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[str, Tensor, Tensor]:
        layer = nn.Linear(6, 8)
        optimiser = wrapped(layer, comm)
        layer(torch.ones(6)).square().sum().backward()
        optimiser.step()
        before = optimiser.aggregator.residual_norm()
        if comm.rank == 2:
            there(layer.bias.grad)[4] = torch.nan
        with pytest.raises(NonFiniteGradientError) as caught:
            optimiser.step()
        return str(caught.value), before, optimiser.aggregator.residual_norm()

    for sentence, before, after in virtual.run(3, body):
        assert sentence == "rank 2, step 1: the gradient of bias has a NaN or Inf"
        assert before == after > 0


def test_late_parameters_and_a_missing_process_group_are_refused() -> None:
    layer = nn.Linear(6, 8)

    def body(comm: virtual.VirtualComm) -> None:
        with pytest.raises(ValueError, match="wrap the model anew"):
            wrapped(layer, comm).add_param_group({"params": []})

    virtual.run(1, body)
    with pytest.raises(ValueError, match=r"no process group; call torch.distributed.init_process_group"):
        sparsify.distribute(torch.optim.SGD(layer.parameters(), 0.1), layer, build("topk"))


def test_workers_that_do_not_do_the_same_step_are_told_apart() -> None:
    for kind, sentence in (
        ("step", r"disagree on step: ranks \[0, 2\] have 0; ranks \[1\] have 3"),
        ("k", r"disagree on k: ranks \[0, 2\] have 4; ranks \[1\] have 10"),
    ):

        def body(comm: virtual.VirtualComm, kind: str = kind) -> None:
            odd = kind if comm.rank == 1 else ""
            method = sparsify.build("topk", density=0.2, density_warmup=[0.5])
            parameters = [("p", nn.Parameter(torch.zeros(20)))]
            aggregator = Aggregator(method, parameters, comm, debug=True)
            aggregator.step = 3 if odd == "step" else 0
            aggregator.aggregate(epoch=0 if odd == "k" else 1)

        with pytest.raises(WorkerMismatch, match=sentence):
            virtual.run(3, body)
