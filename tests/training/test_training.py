"""Sparsified gradients in one's own training: optimiser wrapper, DDP, checkpoints, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.doors.aggregator import Aggregator
from sparsify.doors.engine import NonFinite
from sparsify.doors.handshake import Disagreement
from sparsify.doors.optimiser import DistributedOptimiser
from tests.sparsify import worker_functions
from tests.sparsify.laws import METHODS, build
from tests.sparsify.worker_functions import on_processes


def wrapped(
    comm: Comm, name: str = "topk", momentum: float = 0.9, debug: bool = False
) -> tuple[nn.Module, DistributedOptimiser]:
    """A small model under the wrapper; rank r's own weights are r, so that the broadcast shows."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).double() * (i + 1) / 4 + comm.rank)
    method = build(name, 0.2)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return model, DistributedOptimiser(inner, model, method, comm, debug=debug)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(12, 6, generator=own, dtype=torch.float64), torch.arange(12) % 3


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), labels)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_rank_0s_model_is_everybodys_and_workers_stay_together() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[Tensor, Tensor, float, float]:
        model, optimiser = wrapped(comm)
        start, first = weights(model), loss_of(model, comm.rank, 0).item()
        for step in range(60):
            optimiser.zero_grad()
            loss_of(model, comm.rank, step % 3).backward()
            optimiser.step()
        return start, weights(model), first, loss_of(model, comm.rank, 0).item()

    lived = virtual.run(3, body)
    for start, end, first_loss, last_loss in lived:
        assert torch.equal(start, lived[0][0])
        assert torch.equal(end, lived[0][1])
        assert last_loss < 0.8 * first_loss


def test_a_step_that_overflows_on_one_worker_is_skipped_by_all() -> None:
    """Residuals see unscaled gradients, and nothing of an overflow."""

    def body(comm: virtual.VirtualComm) -> None:
        model, optimiser = wrapped(comm)
        plain_model, plain = wrapped(comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for step in range(6):
            before, owed = weights(model), optimiser.aggregator.residual_norm().item()
            optimiser.zero_grad()
            scaler.scale(loss_of(model, comm.rank, step)).backward()
            if step == 2 and comm.rank == 1:
                gradients(model)[0][0, 0] = torch.inf
            optimiser.aggregate(scaler.get_scale())
            scaler.step(optimiser)
            scaler.update()
            if step == 2:
                assert torch.equal(weights(model), before)
                assert optimiser.aggregator.residual_norm().item() == owed
                assert scaler.get_scale() == 2.0**9
                continue
            plain.zero_grad()
            loss_of(plain_model, comm.rank, step).backward()
            plain.step()
            torch.testing.assert_close(weights(model), weights(plain_model), rtol=1e-12, atol=1e-12)

    virtual.run(3, body)


def test_a_gradient_that_is_not_finite_is_named_and_reaches_no_residual() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[str, float, float]:
        model, optimiser = wrapped(comm)
        loss_of(model, comm.rank, 0).backward()
        optimiser.step()
        owed = optimiser.aggregator.residual_norm().item()
        optimiser.zero_grad()
        loss_of(model, comm.rank, 1).backward()
        if comm.rank == 2:
            gradients(model)[1][4] = torch.nan
        with pytest.raises(NonFinite) as caught:
            optimiser.step()
        return str(caught.value), owed, optimiser.aggregator.residual_norm().item()

    for sentence, before, after in virtual.run(3, body):
        assert sentence == "rank 2, step 1: the gradient of 0.bias has a NaN or Inf"
        assert before == after > 0


def test_momentum_twice_and_late_parameters_are_refused() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        with pytest.raises(ValueError, match=r"applies momentum itself, and the optimiser has 0.9 too"):
            wrapped(comm, "dgc")
        _, optimiser = wrapped(comm, "dgc", momentum=0.0)
        with pytest.raises(ValueError, match="wrap the model anew"):
            optimiser.add_param_group({"params": []})
        assert "DistributedOptimiser" in repr(optimiser)

    virtual.run(1, body)
    with pytest.raises(ValueError, match=r"no process group; call torch.distributed.init_process_group"):
        sparsify.distribute(
            torch.optim.SGD((model := nn.Linear(1, 1)).parameters(), 0.1), model, build("topk")
        )


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

        with pytest.raises(Disagreement, match=sentence):
            virtual.run(3, body)


def test_workers_that_agree_shake_hands_before_each_step_and_train_as_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(debug: bool) -> list[tuple[Tensor, int]]:
        def body(comm: virtual.VirtualComm) -> tuple[Tensor, int]:
            model, optimiser = wrapped(comm, debug=debug)
            gathers, gather = list[Tensor](), comm.all_gather

            def counted(tensor: Tensor) -> list[Tensor]:
                gathers.append(tensor)
                return gather(tensor)

            monkeypatch.setattr(comm, "all_gather", counted)
            for step in range(2):
                loss_of(model, comm.rank, step).backward()
                optimiser.step()
            return weights(model), len(gathers)

        return virtual.run(3, body)

    for (with_hands, many), (without, few) in zip(trained(True), trained(False), strict=True):
        assert torch.equal(with_hands, without)
        assert many == few + 2


@pytest.mark.parametrize("name", ["topk", "dgc", "randomk", "oktopk", "powersgd", "qsgd"])
def test_training_resumes_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    """Model, optimiser and method through files that `weights_only=True` reads."""
    momentum = 0.0 if name == "dgc" else 0.9

    def train(steps: range, comm: Comm, model: nn.Module, optimiser: DistributedOptimiser) -> Tensor:
        for step in steps:
            optimiser.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimiser.step()
        return weights(model)

    def straight(comm: virtual.VirtualComm) -> Tensor:
        model, optimiser = wrapped(comm, name, momentum)
        train(range(5), comm, model, optimiser)
        saved = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        torch.save(saved, tmp_path / f"{comm.rank}.pt")
        return train(range(5, 9), comm, model, optimiser)

    def resumed(comm: virtual.VirtualComm) -> Tensor:
        model, optimiser = wrapped(comm, name, momentum)
        saved = torch.load(tmp_path / f"{comm.rank}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        return train(range(5, 9), comm, model, optimiser)

    assert torch.equal(virtual.run(3, straight)[2], virtual.run(3, resumed)[2])


def test_the_state_of_another_method_worker_number_or_version_is_refused() -> None:
    def aggregator_of(name: str, comm: Comm) -> Aggregator:
        method = sparsify.build(name, density=0.1)
        return Aggregator(method, [("p", nn.Parameter(torch.zeros(40)))], comm)

    states = virtual.run(2, lambda comm: aggregator_of("topk", comm).state_dict())
    renamed = [{**state, "buckets": [{**state["buckets"][0], "names": ["q"]}]} for state in states]
    for name, given, why in (
        ("randomk", states, r"saved state is of Sparsifier.*TopK.*build the method with"),
        ("topk", [*states, states[0]], r"is of 2 workers, and there are 3; .* sparsify.redistribute"),
        ("topk", states[::-1], "is of rank 1, and this is rank 0"),
        ("topk", [{**state, "format": 99} for state in states], "format 99 can't be read"),
        ("topk", renamed, "a model with other parameters"),
    ):

        def load(comm: Comm, name: str = name, given: list[Any] = given) -> None:
            aggregator_of(name, comm).load_state_dict(given[comm.rank])

        with pytest.raises(ValueError, match=why):
            virtual.run(len(given), load)


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
