"""Sparsified gradients under DistributedDataParallel: a communication hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparsify import checkpoint
from sparsify.aggregate import Dense, Method, Step
from sparsify.aggregator import FORMAT, NonFinite, check_saved, check_unchanged
from sparsify.bucket import Bucket
from sparsify.comm import Comm
from sparsify.optimiser import check_momentum, default_comm
from sparsify.parts import Place
from sparsify.timer import PhaseTimer


class DDPHook:
    """A method in place of DDP's allreduce; make it with `register`.

    DDP hands gradients over in buckets of its own, which it rebuilds after the first step, while the rest of
    backpropagation goes on. Every tensor of a bucket is aggregated by itself, and states are kept by the
    parameter's name: whatever the buckets are, no residual is lost. Dense averages bucket by bucket,
    overlapped, as DDP itself does.

    Under `no_sync` DDP calls no hook: gradients accumulate, and are compressed once. With a GradScaler use
    `DistributedOptimiser`: here the first buckets are delivered before the last one can overflow.
    """

    def __init__(
        self, model: DistributedDataParallel, method: Method, optimiser: torch.optim.Optimizer | None,
        comm: Comm, seed: int, check: bool, select: str,
    ) -> None:  # fmt: skip
        self.method, self.optimiser, self.comm, self.check = method, optimiser, comm, check
        self.epoch = 0  # counted from 0, for methods that raise the density in the first epochs
        self.steps = 0
        self.timer = PhaseTimer("production")
        # Numbered as `Gradients` does: what is drawn for a layer is the same with and without DDP.
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad][::-1]
        self.names = {id(p): name for name, p in named}
        self.buckets = {
            name: Bucket(torch.empty_like(p).flatten(), (name,), (tuple(p.shape),)) for name, p in named
        }
        self.states = {
            name: method.init(bucket.flat, Place(seed, comm.rank, i, bucket.shapes, select))
            for i, (name, bucket) in enumerate(self.buckets.items())
        }

    def __call__(self, bucket: Any) -> Future[Tensor]:
        if isinstance(self.method, Dense):
            averaged = dist.all_reduce(bucket.buffer().div_(self.comm.size), async_op=True)
            assert averaged is not None
            done: Future[Tensor] = averaged.get_future().then(lambda work: work.value()[0])
            return done
        lr = float(self.optimiser.param_groups[0]["lr"]) if self.optimiser else 1.0
        step = Step(self.method.density_at(self.epoch), lr)
        tensors = [
            (self.names[id(p)], flat(grad))
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        if self.check:
            self._check_finite(tensors)
        for name, grad in tensors:
            if grad.numel():
                check_unchanged(grad, self.buckets[name].flat, name)
                self.method.aggregate(grad, step, self.states[name], self.comm, self.timer)
        self.steps += bucket.is_last()
        self.timer.samples.clear()
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        future.set_result(buffer)
        return future

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only: save it per rank, beside model and optimiser."""
        buckets = [{"names": [name], "state": checkpoint.dump(state)} for name, state in self.states.items()]
        who = {"rank": self.comm.rank, "size": self.comm.size}
        return {
            "format": FORMAT, "method": repr(self.method), "step": self.steps, **who, "buckets": buckets
        }  # fmt: skip

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; see `Aggregator.load_state_dict` for what is refused."""
        check_saved(saved, self.method, self.comm, list(self.buckets.values()))
        self.steps = saved["step"]
        for one in saved["buckets"]:
            (name,) = one["names"]
            self.states[name] = checkpoint.restore(self.states[name], one["state"])

    def _check_finite(self, tensors: list[tuple[str, Tensor]]) -> None:
        """All workers raise if any has a NaN or Inf in these; one host synchronisation."""
        mine = torch.stack([~torch.isfinite(grad).all() for _, grad in tensors])
        for rank, bad in enumerate(torch.stack(self.comm.all_gather(mine.int())).tolist()):
            if any(bad):
                raise NonFinite(rank, self.steps, tensors[bad.index(1)][0])


def register(
    model: DistributedDataParallel,
    method: Method,
    optimiser: torch.optim.Optimizer | None = None,
    comm: Comm | None = None,
    seed: int = 0,
    check: bool = True,
    select: str = "auto",
) -> DDPHook:
    """Let `method` average the gradients of `model`, instead of DDP's allreduce.

    Args:
        optimiser: whose learning rate feedback in the learning-rate domain follows.
        check: look for NaN and Inf, see `DDPHook`; one host synchronisation per bucket.
        select: see `sparsify.aggregator.Aggregator`.

    Raises:
        ValueError: a method that needs to see more than one tensor at a time, or whose momentum would be
            applied twice.
    """
    if method.scope != "layer" and not isinstance(method, Dense):
        raise ValueError(
            f"DDP hands gradients over bucket by bucket, so scope={method.scope!r} can't be had; take "
            "scope='layer', or sparsify.distribute, which sees the whole model"
        )
    if getattr(method, "clip_norm", None) is not None:
        raise ValueError(
            "clip_norm needs the norm of the whole gradient before the first bucket is sent, which DDP can't "
            "give; take clip_norm=None, or sparsify.distribute"
        )
    if optimiser is not None:
        check_momentum(optimiser, method)
    hook = DDPHook(model, method, optimiser, comm or default_comm(), seed, check, select)
    # DDP inspects annotations, which are text here; a lambda has none.
    model.register_comm_hook(hook, lambda state, bucket: state(bucket))
    return hook


def flat(grad: Tensor) -> Tensor:
    """(n,) view of a gradient as it lies in memory, whatever its strides."""
    return grad.as_strided((grad.numel(),), (1,))
