"""Sparsified gradients in one's own training: what the optimizer wrapper refuses, and that DDP's hook does
the same. Acts of users are told in tests/sparsify/wrappers.
"""

from __future__ import annotations

from pathlib import Path

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
from tests.sparsify import worker_functions
from tests.sparsify.laws import METHODS, build
from tests.sparsify.worker_functions import on_processes


def wrapped(model: nn.Module, name: str, momentum: float, comm: Comm) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return DistributedOptimizer(inner, model, build(name, 0.2), comm)


def test_a_gradient_that_is_not_finite_is_named_and_reaches_no_residual() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[str, Tensor, Tensor]:
        layer = nn.Linear(6, 8)
        optimiser = wrapped(layer, "topk", 0.9, comm)
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


def test_momentum_twice_and_late_parameters_are_refused() -> None:
    layer = nn.Linear(6, 8)

    def body(comm: virtual.VirtualComm) -> None:
        with pytest.raises(ValueError, match=r"applies momentum itself, and the optimiser has 0.9 too"):
            wrapped(layer, "dgc", 0.9, comm)
        optimiser = wrapped(layer, "dgc", 0.0, comm)
        with pytest.raises(ValueError, match="wrap the model anew"):
            optimiser.add_param_group({"params": []})
        assert "DistributedOptimizer" in repr(optimiser)

    virtual.run(1, body)
    with pytest.raises(ValueError, match=r"no process group; call torch.distributed.init_process_group"):
        sparsify.distribute(torch.optim.SGD(layer.parameters(), 0.1), layer, build("topk"))


def test_workers_that_do_not_do_the_same_step_are_told_apart() -> None:
    for kind, sentence in (
        ("method", r"ranks \[0, 2\] have ... select=TopK\(\), ...; ranks \[1\] have ... select=GaussianG"),
        ("step", r"disagree on step: ranks \[0, 2\] have 0; ranks \[1\] have 3"),
        ("k", r"disagree on k: ranks \[0, 2\] have 4; ranks \[1\] have 10"),
    ):

        def body(comm: virtual.VirtualComm, kind: str = kind) -> None:
            odd = kind if comm.rank == 1 else ""
            name = "gaussiank" if odd == "method" else "topk"
            method = sparsify.build(name, density=0.2, density_warmup=[0.5])
            parameters = [("p", nn.Parameter(torch.zeros(20)))]
            aggregator = Aggregator(method, parameters, comm, debug=True)
            aggregator.step = 3 if odd == "step" else 0
            aggregator.aggregate(epoch=0 if odd == "k" else 1)

        with pytest.raises(WorkerMismatch, match=sentence):
            virtual.run(3, body)


@pytest.mark.extended
def test_ddp_with_the_hook_trains_to_the_weights_of_the_wrapper(tmp_path: Path) -> None:
    """On two gloo processes, through DDP's rebuilding of its buckets: each method in each scope to the bit;
    dense DDP to 1e-12, as a clipped gradient: its norm is summed by buckets there, by tensors here.
    """
    for found in on_processes(worker_functions.ddp_and_wrapper, 2, tmp_path):
        for name in worker_functions.ddp_methods():
            error = 1e-12 if name.startswith("clipped") else 0
            ends = found[f"{name} ddp"], found[f"{name} wrapper"]
            torch.testing.assert_close(*ends, rtol=error, atol=error, msg=name)
            assert found[f"{name} buckets"] > 1
        torch.testing.assert_close(found["dense ddp"], found["dense wrapper"], rtol=1e-12, atol=1e-12)
        assert found["resumed"].item()


def test_every_method_is_built_by_its_name_and_says_what_it_is() -> None:
    for name in METHODS:
        method = repr(build(name))
        assert method == repr(build(name))  # checkpoints and handshakes compare it
        assert " at 0x" not in method
