"""What it takes to wrap a user's model and optimizer: checks, the first broadcast, epochs and rates."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sparsify.comm import Comm, broadcast_all
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import Bucket, check_tensor, ignored_names
from sparsify.method import Method
from sparsify.wrappers.engine import Engine, StepReport
from sparsify.wrappers.saved_states import check_no_wrapped_state, strip_mark

# An epoch of CIFAR-10 has 1,563 steps for one worker with batches of 32, and 49 for 8 with 128.
LONG_EPOCH_STEPS = 2000
log = logging.getLogger(__name__)

# Optimizer -> what refuses steps that its wrapper did not make.
GUARDS: WeakKeyDictionary[torch.optim.Optimizer, ForeignStepGuard] = WeakKeyDictionary()


def resolve_process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group of a DeviceMesh, where it is one.

    Raises:
        ValueError: this worker is not in it, or there are several.
    """
    is_outside = isinstance(group, DeviceMesh) and group.get_coordinate() is None
    if is_outside or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this worker, rank {dist.get_rank()} of all, is not in the group that was handed over; let only "
            "its members call this, or hand over a group that has this worker"
        )
    if not isinstance(group, DeviceMesh):
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"{group!r} is no process group; take what torch.distributed.new_group returns")
        return group
    if group.ndim != 1:
        raise ValueError(
            f"this DeviceMesh has a group for each of its {group.ndim} dimensions; hand over the one whose "
            "workers hold the same model, such as mesh['replicate']"
        )
    return group.get_group()


def make_comm(comm: Comm | None, group: dist.ProcessGroup | DeviceMesh | None) -> Comm:
    """`comm`, or the process group: by default torch.distributed's own."""
    group = resolve_process_group(group)
    if comm is not None and group is not None:
        raise ValueError("comm and group both say who averages; give one of them")
    if comm is not None:
        return comm
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group first, or pass comm="
        )
    return TorchComm(group)


def check_scaler_allows_overlap(scaler: GradScaler | None) -> None:
    """Refuse what must see all gradients before the first one is delivered."""
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "overlap=True delivers a gradient before it is known whether a later one overflows, and a "
            "GradScaler would then skip the step; train in bfloat16, which needs none, or leave overlap out"
        )


def broadcast_model(model: nn.Module, comm: Comm) -> None:
    """Give all workers the parameters and buffers of rank 0's model, but for those that DDP is told to
    ignore. All travel on the device of the parameters, for nccl knows no other.
    """
    ignored = ignored_names(model)
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = [tensor for name, tensor in named if name not in ignored]
    if tensors:
        broadcast_all(comm, tensors, tensors[0].device)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def learning_rate_by_parameter_id(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Learning rates by the parameters' ids."""
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has no learning rate for feedback in the learning-rate domain to "
            "follow; build the method with feedback='gradient'"
        )
    return {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}


def bucket_learning_rates(
    parameters: Sequence[tuple[str, nn.Parameter]],
    buckets: Sequence[Bucket],
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    """The learning rate of each bucket of these parameters."""
    rate_of, found = learning_rate_by_parameter_id(optimizer), list[float]()
    by_name = {name: rate_of[id(p)] for name, p in parameters}
    for bucket in buckets:
        inside = sorted({by_name[name] for name in bucket.names})
        if len(inside) > 1:
            raise ValueError(
                "feedback in the learning-rate domain needs one rate for all that is exchanged together, "
                f"and these have {inside}; build the method with scope='layer', or feedback='gradient'"
            )
        found += inside
    return found


def check_distribute_arguments(
    optimizer: torch.optim.Optimizer, model: nn.Module, method: Method, scaler: GradScaler | None = None
) -> None:
    """Refuse what can't be wrapped to average gradients."""
    check_optimizer_and_model(optimizer, model)
    check_gradient_dtypes(model.named_parameters())
    if not (scaler is None or isinstance(scaler, GradScaler)):
        raise ValueError(
            f"{scaler=} is no torch.amp.GradScaler; with others call aggregate(scale) before each step"
        )
    if not hasattr(method, "aggregate"):
        raise ValueError(
            f"{method!r} is not a method; build one, such as sparsify.build('topk', density=0.01)"
        )
    of_step = inspect.signature(optimizer.step).parameters.values()
    if any(part.name == "closure" and part.default is part.empty for part in of_step):
        raise ValueError(
            f"{type(optimizer).__name__} computes gradients within its step, where no other worker sees "
            "them; take DistributedDataParallel and sparsify.register, which average in each backward pass"
        )
    check_momentum_applied_once(optimizer, method)


def check_optimizer_and_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer and a model that don't belong together, or that others have wrapped."""
    for part, kind, what in (
        (optimizer, torch.optim.Optimizer, "an optimizer"), (model, nn.Module, "a model"),
    ):  # fmt: skip
        if not isinstance(part, kind):
            raise ValueError(
                f"{type(part).__name__} is not {what}; sparsify.distribute takes an optimizer, its model, "
                "and a method, in this order"
            )
    ignored, mine = ignored_names(model), set(map(id, parameters_of(optimizer)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in ignored:
            check_tensor(name, tensor)
        elif id(tensor) in mine and tensor.requires_grad:
            raise ValueError(
                f"DistributedDataParallel is told to ignore {name}, so that it is each worker's own, and "
                "this optimizer would average it; give it an optimizer of its own, which you don't wrap"
            )
    if isinstance(getattr(optimizer, "inner_optimizer", None), torch.optim.Optimizer):
        raise ValueError(
            "this optimizer is wrapped already; wrap the inner one (`optimizer.inner_optimizer`)"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} hides another optimizer, whose steps can't be watched through it; "
            "wrap the one inside first"
        )
    check_no_wrapped_state(optimizer)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "DistributedDataParallel averages by itself; hand over the model inside and train through it "
                "(`model = model.module`), or take sparsify.register"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError("FSDP shards the model; sparsification needs the whole model on every worker")
    of_model = {id(p) for p in model.parameters()}
    for p in parameters_of(optimizer):
        if id(p) not in of_model:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(p.shape)} that the model does not have; hand "
                "over a module that has all of them, such as nn.ModuleList([model, loss])"
            )


def check_gradient_dtypes(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients are of another type than they are.

    Raises:
        ValueError: one has such a `grad_dtype`.
    """
    for name, p in named:
        kind = getattr(p, "grad_dtype", None) if p.requires_grad and p.is_leaf else None
        if kind not in (None, p.dtype):
            raise ValueError(
                f"{name} is in {p.dtype} and takes gradients in {kind}, its grad_dtype, while gradients are "
                "averaged in the parameter's type; leave grad_dtype out, or keep the parameter in that type"
            )


def check_momentum_applied_once(optimizer: torch.optim.Optimizer, method: Method) -> None:
    """Momentum is applied once."""
    theirs = [group.get("momentum") or group.get("betas") for group in optimizer.param_groups]
    if method.applies_momentum and any(theirs):
        raise ValueError(
            f"the method applies momentum itself, and the optimizer has {theirs[0]} too; give the optimizer "
            "momentum=0, or build the method with momentum=0"
        )


class ForeignStepGuard:
    """A guard that refuses an optimizer's own steps, which would use one worker's gradients alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_stepping = False
        if (earlier := GUARDS.get(optimizer)) is not None:
            earlier.handle.remove()
        self.handle: RemovableHandle = optimizer.register_step_pre_hook(self.check)
        optimizer.register_load_state_dict_pre_hook(strip_mark)
        GUARDS[optimizer] = self

    def check(self, *_: Any) -> None:
        """Refuse a step that the wrapper did not make."""
        if not self.is_stepping:
            raise ValueError(
                "this optimizer was wrapped, and its own step would not average; call that of what "
                "sparsify.distribute or sparsify.shard returned"
            )

    @contextmanager
    def allow_step(self) -> Iterator[None]:
        """Allow the wrapper's own step within."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False


class WrapperBase:
    """The part that both doors have: a report, and the `epoch` for methods that raise the density at first.

    Args:
        steps_per_epoch: None: somebody sets `epoch`.
    """

    engine: Engine
    last_report: StepReport | None = None

    def __init__(
        self, method: Method, comm: Comm, steps_per_epoch: int | None, scaler: GradScaler | None
    ) -> None:
        is_number = isinstance(steps_per_epoch, int) and not isinstance(steps_per_epoch, bool)
        if steps_per_epoch is not None and not (is_number and steps_per_epoch > 0):
            raise ValueError(f"{steps_per_epoch=} must be a whole number above 0, such as len(batches)")
        self.comm, self.scaler = comm, scaler if scaler is not None and scaler.is_enabled() else None
        self._steps_per_epoch = steps_per_epoch
        self._warmup = [method.density_at(epoch) for epoch in range(method.num_warmup_epochs + 1)]
        self.user_epoch: int | None = None  # that somebody has set; saved
        self._began: tuple[int | None, int] = None, 0  # an epoch that was set, and its first step
        self._tells = comm.rank == 0  # warn where an epoch of the warm-up does not end

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.engine.step

    @property
    def epoch(self) -> int:
        """Number of epochs before this one: follows from `steps_per_epoch`, or is what somebody has set."""
        return self.steps // self._steps_per_epoch if self._steps_per_epoch else self.user_epoch or 0

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if self._steps_per_epoch:
            raise ValueError("the epoch follows from steps_per_epoch; leave one of them out")
        if operator.index(epoch) < 0:
            raise ValueError(f"{epoch=} is out of range: epochs are counted from 0")
        self.user_epoch = operator.index(epoch)

    def check_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """What must hold in every step, at both doors."""
        if optimizer is not None:
            check_momentum_applied_once(optimizer, self.engine.method)  # schedulers may bring it
        self.check_epoch()

    def check_epoch(self) -> None:
        """Refuse a step of an unknown epoch, and warn of an epoch that does not end."""
        if len(set(self._warmup)) == 1 or self._steps_per_epoch is not None:
            return
        if self.user_epoch is None:
            raise ValueError(
                "the method's density falls in the first epochs (density_warmup), and nobody says which "
                "one this is; pass steps_per_epoch=, or set .epoch, counted from 0, before each begins"
            )
        if self.user_epoch != self._began[0]:
            self._began = self.user_epoch, self.steps
        is_late = self.user_epoch < len(self._warmup) - 1 and self.steps - self._began[1] >= LONG_EPOCH_STEPS
        if is_late and self._tells:
            self._tells = False
            # No `warnings.warn`, which may be an error, and then the other workers wait for this one.
            log.warning(
                f".epoch has been {self.user_epoch} for {LONG_EPOCH_STEPS} steps, so the density stays at "
                f"{self._warmup[self.epoch]:g} and does not fall to {self._warmup[-1]:g} (density_warmup); "
                "unless an epoch is that long, set .epoch before each one, or pass "
                "steps_per_epoch=len(batches)"
            )


def stepped_by_scaler() -> bool:
    """True if a GradScaler calls this. Nothing else tells an optimizer's hooks."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False
