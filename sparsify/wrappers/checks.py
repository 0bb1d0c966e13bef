"""Checks of the arguments of all wrappers, the first broadcast, and learning rates of buckets."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sparsify.comm import Comm, broadcast_tensors
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import Bucket, check_supported_tensor, ddp_ignored_names
from sparsify.method import Method
from sparsify.wrappers.saved_states import check_no_wrapper_state_loaded


def resolve_process_group(
    group: dist.ProcessGroup | DeviceMesh | None, comm: Comm | None = None
) -> dist.ProcessGroup | None:
    """Return the process group of a one-dimensional DeviceMesh; a process group, or None, as it is.

    Raises:
        ValueError: this worker is not a member, the mesh has several dimensions, or there is a communicator
            as well.
    """
    is_outside = isinstance(group, DeviceMesh) and group.get_coordinate() is None
    if is_outside or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this worker, rank {dist.get_rank()} of all, is not in the group that was handed over; let only "
            "its members call this, or hand over a group that has this worker"
        )
    if not isinstance(group, DeviceMesh | dist.ProcessGroup | None):
        raise ValueError(f"{group!r} is no process group; take what torch.distributed.new_group returns")
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(
            f"this DeviceMesh has a group for each of its {group.ndim} dimensions; hand over the one whose "
            "workers hold the same model, such as mesh['replicate']"
        )
    if comm is not None and group is not None:
        raise ValueError("comm and group both say who averages; give one of them")
    return group.get_group() if isinstance(group, DeviceMesh) else group


def resolve_comm(comm: Comm | None, group: dist.ProcessGroup | DeviceMesh | None) -> Comm:
    """Return `comm`, or else a communicator of `group`, by default torch.distributed's default group."""
    group = resolve_process_group(group, comm)
    if comm is not None:
        return comm
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group first, or pass comm="
        )
    return TorchComm(group)


def check_scaler_allows_overlap(scaler: GradScaler | None) -> None:
    """Refuse an enabled GradScaler, which must see all gradients before the first one is delivered."""
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "overlap=True delivers a gradient before it is known whether a later one overflows, and a "
            "GradScaler would then skip the step; train in bfloat16, which needs none, or leave overlap out"
        )


def check_needs_no_whole_gradient(method: Method) -> None:
    """Refuse to overlap a method that needs the whole gradient before it sends any."""
    if method.needs_pass_over_all_gradients:
        raise ValueError(
            "overlap=True begins before the norm of the whole gradient is known, which clip_norm needs; "
            "leave one of them out"
        )


def broadcast_model(model: nn.Module, comm: Comm) -> None:
    """Broadcast the parameters and buffers of rank 0's model, without those that DDP is told to ignore.

    All travel on the device of the parameters, for nccl knows no other.
    """
    ignored = ddp_ignored_names(model)
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = [tensor for name, tensor in named if name not in ignored]
    if tensors:
        broadcast_tensors(comm, tensors, tensors[0].device)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def bucket_learning_rates(
    parameters: Sequence[tuple[str, nn.Parameter]],
    buckets: Sequence[Bucket],
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    """Return the learning rate of each bucket.

    Raises:
        ValueError: the parameters of a bucket have several, or the optimizer has none.
    """
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has no learning rate for feedback in the learning-rate domain to "
            "follow; build the method with feedback='gradient'"
        )
    rate_by_id = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    rate_by_name = {name: rate_by_id[id(p)] for name, p in parameters}
    bucket_rates = list[float]()
    for bucket in buckets:
        rates = sorted({rate_by_name[name] for name in bucket.names})
        if len(rates) > 1:
            raise ValueError(
                "feedback in the learning-rate domain needs one rate for all that is exchanged together, "
                f"and these have {rates}; build the method with scope='layer', or feedback='gradient'"
            )
        bucket_rates += rates
    return bucket_rates


def check_distribute_arguments(
    optimizer: torch.optim.Optimizer, model: nn.Module, method: Method, scaler: GradScaler | None
) -> None:
    """Refuse arguments of `sparsify.distribute` whose gradients can't be averaged."""
    check_optimizer_and_model(optimizer, model)
    check_gradient_dtypes(model.named_parameters())
    if not (scaler is None or isinstance(scaler, GradScaler)):
        raise ValueError(
            f"{scaler=} is no torch.amp.GradScaler; with others call aggregate(scale) before each step"
        )
    check_is_method(method)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes gradients within its step, where no other worker sees "
            "them; take DistributedDataParallel and sparsify.register, which average in each backward pass"
        )
    check_momentum_applied_once(optimizer, method)


def check_optimizer_and_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer and a model that don't belong together, or that others have wrapped."""
    for argument, kind, description in (
        (optimizer, torch.optim.Optimizer, "an optimizer"),
        (model, nn.Module, "a model"),
    ):
        if not isinstance(argument, kind):
            raise ValueError(
                f"{type(argument).__name__} is not {description}; sparsify.distribute takes an optimizer, "
                "its model, and a method, in this order"
            )
    ignored = ddp_ignored_names(model)
    optimized_ids = set(map(id, parameters_of(optimizer)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in ignored:
            check_supported_tensor(name, tensor)
        elif id(tensor) in optimized_ids and tensor.requires_grad:
            raise ValueError(
                f"DistributedDataParallel is told to ignore {name}, so that it is each worker's own, and "
                "this optimizer would average it; give it an optimizer of its own, which you don't wrap"
            )
    if is_wrapped(optimizer):
        raise ValueError(
            "this optimizer is wrapped already; wrap the inner one (`optimizer.inner_optimizer`)"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} hides another optimizer, whose steps can't be watched through it; "
            "wrap the one inside first"
        )
    check_no_wrapper_state_loaded(optimizer)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "DistributedDataParallel averages by itself; hand over the model inside and train through it "
                "(`model = model.module`), or take sparsify.register"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError("FSDP shards the model; sparsification needs the whole model on every worker")
    check_parameters_in_model(
        optimizer, model, "hand over a module that has all of them, such as nn.ModuleList([model, loss])"
    )


def check_parameters_in_model(optimizer: torch.optim.Optimizer, model: nn.Module, advice: str) -> None:
    """Refuse an optimizer of parameters that the model does not have."""
    model_ids = set(map(id, model.parameters()))
    for p in parameters_of(optimizer):
        if id(p) not in model_ids:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(p.shape)} that the model does not have; "
                f"{advice}"
            )


def is_wrapped(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return True for an optimizer that one of this library's wrappers averages for."""
    return isinstance(getattr(optimizer, "inner_optimizer", None), torch.optim.Optimizer)


def check_is_method(method: Method) -> None:
    """Refuse an object that is no method."""
    if not hasattr(method, "aggregate"):
        raise ValueError(
            f"{method!r} is not a method; build one, such as sparsify.build('topk', density=0.01)"
        )


def check_gradient_dtypes(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients have another dtype than they have.

    Raises:
        ValueError: a parameter has such a `grad_dtype`.
    """
    for name, p in named_parameters:
        grad_dtype = getattr(p, "grad_dtype", None) if p.requires_grad and p.is_leaf else None
        if grad_dtype not in (None, p.dtype):
            raise ValueError(
                f"{name} is in {p.dtype} and takes gradients in {grad_dtype}, its grad_dtype, while "
                "gradients are averaged in the parameter's type; leave grad_dtype out, or keep the "
                "parameter in that type"
            )


def check_momentum_applied_once(optimizer: torch.optim.Optimizer, method: Method) -> None:
    """Refuse momentum of the optimizer where the method applies momentum itself."""
    momenta = [group.get("momentum") or group.get("betas") for group in optimizer.param_groups]
    if method.applies_momentum and any(momenta):
        raise ValueError(
            f"the method applies momentum itself, and the optimizer has {momenta[0]} too; give the optimizer "
            "momentum=0, or build the method with momentum=0"
        )
