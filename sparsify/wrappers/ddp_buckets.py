"""Buckets of DistributedDataParallel, its process group, and checks of `sparsify.register`'s arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import TensorSpec
from sparsify.method import Dense, Method
from sparsify.wrappers.checks import (
    check_gradient_dtypes,
    check_is_method,
    check_momentum_applied_once,
    check_needs_no_whole_gradient,
    check_scaler_allows_overlap,
    is_wrapped,
    parameters_of,
)

# Settings, by DDP's own names, with which it does not hand all gradients to a hook.
REFUSAL_BY_DDP_OPTION = {
    "mixed_precision": (
        "DDP's mixed_precision averages with a hook of its own; leave it out, and use torch.autocast"
    ),
    "_use_python_reducer": (
        'torch._dynamo.config.optimize_ddp="python_reducer" lets DDP average each parameter by itself, '
        "without buckets that a hook could take; leave it at True, or take sparsify.distribute"
    ),
    "_delay_all_reduce_params": (
        "DDP averages delay_all_reduce_named_params in a hook of its own, all of them and whole; leave "
        "that option out"
    ),
    "skip_all_reduce_unused_params": (
        "with skip_all_reduce_unused_params DDP hands over other buckets in each step, while what nobody "
        "used may still be owed; leave that option out: find_unused_parameters=True alone is right"
    ),
}


class DDPParameter(NamedTuple):
    """A parameter that DDP averages, as it was when the hook was registered."""

    name: str
    number: int  # in the order of backpropagation
    strides: tuple[int, ...]
    like: Tensor  # (n,) real numbers, of the type of its gradient
    bucket: int | None  # number of the engine's bucket that has it; None: it is empty


class DDPBucketLayout(NamedTuple):
    """The parameters of one of DDP's buckets, and where their gradients lie in it."""

    ids: list[int]  # of its parameters
    spec: TensorSpec  # of its buffer
    strides: list[tuple[int, ...]]
    parameters: list[DDPParameter]
    sizes: list[int]  # real numbers of each parameter


class FullDDPBucket(NamedTuple):
    """A DDP bucket whose gradients have all arrived."""

    ddp_buffer: Tensor  # as DDP handed it over, which may be sparse
    buffer: Tensor  # (n,) that, dense
    reals: Tensor  # the buffer as real numbers
    layout: DDPBucketLayout
    used: list[bool] | None  # of each tensor, has this worker used it since the last step? None: it must
    averaged: Future[Tensor]
    ready_event: Any  # on the stream that filled the buffer; None on the CPU

    def grads(self) -> Sequence[Tensor]:
        """Return views (m,) of the gradient of each tensor."""
        return torch.split(self.reals, self.layout.sizes)


def restore_ddp_format(ddp_buffer: Tensor, average: Tensor) -> Tensor:
    """Return (n,) in the format of a DDP buffer; a sparse one leaves out rows of zeros."""
    if not ddp_buffer.is_sparse:
        return average
    return average.view(ddp_buffer.shape).to_sparse(ddp_buffer.sparse_dim())


def find_supported_ddp(model: nn.Module) -> DistributedDataParallel:
    """Return the DistributedDataParallel in a model, which `torch.compile` or a trainer may have wrapped."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    ddps = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if len(ddps) != 1:
        why = f"has {len(ddps)} inside, to be registered one by one" if ddps else "has no buckets"
        if any(hasattr(p, "device_mesh") for module in modules for p in module.parameters()):
            why = "shards its gradients, and sparsification needs whole ones"
        raise ValueError(
            f"register takes a DistributedDataParallel, and {type(model).__name__} {why}; wrap the model in "
            "one, as trainers do for several workers, or take sparsify.distribute for a plain loop"
        )
    (ddp,) = ddps
    for option, refusal in REFUSAL_BY_DDP_OPTION.items():
        if getattr(ddp, option, None):
            raise ValueError(refusal)
    _check_ddp_ignored_parameters(ddp)
    return ddp


def _check_ddp_ignored_parameters(model: DistributedDataParallel) -> None:
    """Refuse parameters that DDP was told to ignore, and averages nevertheless.

    Raises:
        ValueError: such a parameter is the outermost module's own, or has another name that is not ignored.
    """
    ddp_ignored_names = model.parameters_to_ignore
    ignored_ids = {id(p) for name, p in model.module.named_parameters() if name in ddp_ignored_names}
    for path, module in model.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}"
            if id(p) in ignored_ids and p.requires_grad and full_name not in ddp_ignored_names:
                raise ValueError(
                    f"DDP was told to ignore {full_name.strip('.')}, and averages it nevertheless: it "
                    "ignores parameters of submodules only, and those only of which all names were told; "
                    "tell all names, move it into a submodule, or let DDP average it"
                )


def register_comm_hook(model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
    """Register a communication hook with DDP.

    Raises:
        ValueError: DDP has one already.
    """
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise ValueError(
            "this model has a communication hook already, and DDP takes no other; leave that one out, or "
            "wrap `model.module` in a DistributedDataParallel anew"
        ) from error


def check_register_arguments(
    model: DistributedDataParallel,
    method: Method,
    optimizer: torch.optim.Optimizer | None,
    scaler: GradScaler | None,
    overlap: bool,
) -> None:
    """Refuse arguments of `sparsify.register` that can't average in DDP's hook.

    Raises:
        ValueError: names the argument, and what to do instead.
    """
    if hasattr(method, "every"):
        raise ValueError(
            "under DistributedDataParallel gradients are averaged in every backward pass, so nothing would "
            "be left to exchange after local steps; train the model inside (`model = model.module`) with "
            "sparsify.distribute(optimizer, model, strategy)"
        )
    check_is_method(method)
    if method.scope == "bucket" and not method.group_support.shared_k:
        raise ValueError(
            "scope='bucket' chooses the largest of several tensors, and this method does not; take "
            "scope='layer', or a size in MB"
        )
    if is_wrapped(optimizer):
        raise ValueError(
            "sparsify.distribute's optimizer averages by itself; give register the inner one, or leave it out"
        )
    if optimizer is None and (method.needs_lr or method.applies_momentum):
        why = "follows the learning rate" if method.needs_lr else "applies momentum itself"
        raise ValueError(
            f"the method {why}, so it must know the optimizer: sparsify.register(model, method, optimizer)"
        )
    if optimizer is not None:
        check_momentum_applied_once(optimizer, method)
        optimized_ids = set(map(id, parameters_of(optimizer)))
        for name, p in model.module.named_parameters():
            if method.needs_lr and p.requires_grad and id(p) not in optimized_ids:
                raise ValueError(
                    f"the method follows each parameter's learning rate, and {name} is not the optimizer's"
                )
    check_gradient_dtypes(model.module.named_parameters())
    if overlap and not isinstance(method, Dense):
        check_scaler_allows_overlap(scaler)
        _check_method_allows_overlap(method)


def _check_method_allows_overlap(method: Method) -> None:
    """Refuse to overlap a method that needs gradients of several of DDP's buckets."""
    check_needs_no_whole_gradient(method)
    if method.scope not in ("layer", "bucket"):
        raise ValueError(
            f"overlap=True sends each of DDP's buckets as soon as it is full, and scope={method.scope!r} "
            "spans several; take scope='layer' or 'bucket', or leave overlap out"
        )


def ddp_comm(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> TorchComm:
    """Return a communicator of `group`, by default DDP's own.

    Raises:
        ValueError: the group has other members than DDP's.
    """
    members = dist.get_process_group_ranks(model.process_group)
    if group is not None and sorted(dist.get_process_group_ranks(group)) != sorted(members):
        raise ValueError(
            f"DDP keeps the model alike on the workers {members}, so they must average together; leave group "
            "out, or give it to DistributedDataParallel(process_group=...)"
        )
    return TorchComm(group or model.process_group)


def separate_ddp_comm(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> TorchComm:
    """Return a communicator for a thread, whose collectives must not meet those of DDP's own group.

    Raises:
        ValueError: a new group of DDP's workers can't be made here, and none was given.
    """
    if group is not None and group is not model.process_group:
        return ddp_comm(model, group)
    members = dist.get_process_group_ranks(model.process_group)
    if group is None and len(members) == dist.get_world_size():
        return TorchComm.with_new_group()
    raise ValueError(
        f"overlap=True averages in a thread, and the group of the workers {members} is DDP's own; make "
        "another one of them, on all workers of the default group, and hand it over: "
        f"sparsify.register(..., group=torch.distributed.new_group({members}))"
    )
