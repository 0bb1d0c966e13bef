"""The units of a model that `fully_shard` made. The one file that knows torch's private names of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from sparsify.core.modes import outside_of_modes

# `set_all_reduce_hook` and its kin are marked experimental: these versions have been tried, and others may
# hand over something else.
FIRST, LAST = (2, 11), (2, 15)
HOOK, SCATTER = "_all_reduce_hook", "_reduce_scatter_comm"
# Modules whose units have one of this library's hooks.
HOOK_BY_MODULE: WeakKeyDictionary[nn.Module, Callable[[Tensor], None]] = WeakKeyDictionary()


@dataclass
class ShardedUnit:
    """What `fully_shard` gathers and reduces together: the parameters of a module, but for those of units
    inside it. A worker has a shard of each, and gets their gradients as one flat tensor, each padded to the
    size that the first worker has.
    """

    name: str
    module: Any  # an FSDPModule
    group: Any  # torch's FSDPParamGroup
    names: list[str]  # of its trained parameters, in the order in which their gradients lie
    parameters: list[Parameter]  # DTensors
    shapes: list[tuple[int, ...]]  # of their shards, padded
    dtype: torch.dtype  # in which gradients are reduced
    hook: Callable[[Tensor], None] | None = None  # that this library has set

    @property
    def sizes(self) -> list[int]:
        """Elements of each shard, padded."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced, also those of parameters that are kept on the host."""
        found: torch.device = self.group.device
        return found

    @property
    def shards(self) -> dist.ProcessGroup:
        """The workers that share a replica."""
        mesh_info = self.group.mesh_info
        found: dist.ProcessGroup = mesh_info.shard_process_group
        return found

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The workers that have the same shard, where the unit averages over them by itself (HSDP)."""
        found: dist.ProcessGroup | None = getattr(self.group.mesh_info, "replicate_process_group", None)
        return found

    @property
    def is_factor_set(self) -> bool:
        """True after `set_gradient_divide_factor`: what it was told divides the sum over all workers."""
        return self.group.gradient_divide_factor is not None

    @property
    def is_all_reduce_deferred(self) -> bool:
        """True in a backward pass that is told not to reduce between replicas yet:
        `set_requires_all_reduce(False)`.
        """
        return not self.group.all_reduce_grads

    def replace_all_reduce(self, average: Callable[[Tensor], None]) -> None:
        """Let `average` change a shard's gradients in place, as they come from the reduce-scatter: (n,), the
        mean over the replica's workers; or R times their sum divided by what `set_gradient_divide_factor` was
        told, which is of all workers of the R replicas. In the place of the unit's own all-reduce.
        """
        num_replicas = 1 if self.replicas is None else self.replicas.size()
        self._take_all_reduce_away()

        def hook(grad: Tensor) -> None:
            if num_replicas > 1 and self.is_factor_set:
                grad.mul_(num_replicas)
            average(grad)

        self.hook = hook
        HOOK_BY_MODULE[self.module] = hook
        self.module.set_all_reduce_hook(hook)

    def confine_to_replica(self, shards: DeviceMesh) -> None:
        """Keep gradients, and the arithmetic of optimizers, within the replica: parameters of a mesh of
        replicas and shards become DTensors on `shards`, the mesh of this replica.
        """
        self.replace_all_reduce(lambda grad: None)
        for one in self.group.fsdp_params:
            one._sharding_spec = spec_without_replicas(one._sharding_spec, shards)
            one.sharded_param._spec = one._sharding_spec

    def check_hook(self) -> None:
        """Refuse a unit whose gradients somebody else has been given since.

        Raises:
            ValueError: its all-reduce hook is another one.
        """
        if getattr(self.group, HOOK) is not self.hook:
            raise ValueError(
                f"{self.name} was given another all-reduce hook after sparsify.shard, so that its gradients "
                "are not averaged between replicas; leave set_all_reduce_hook out, or call sparsify.shard "
                "after fully_shard anew"
            )

    def _take_all_reduce_away(self) -> None:
        """From a unit on a mesh of replicas and shards; others average within their replica only."""
        if self.replicas is None:
            return
        group, own = self.group, mesh_info_without_replicas(self.group.mesh_info)
        if group.post_forward_mesh_info is group.mesh_info:  # else parameters would move between two meshes
            group.post_forward_mesh_info = own
        group.mesh_info = own

    def check(self, grad: Tensor) -> None:
        """Refuse gradients of others than of all trained parameters.

        Raises:
            ValueError: there are fewer or more, or of another type.
        """
        if grad.dtype != self.dtype:
            raise ValueError(
                f"{self.name} is reduced in {grad.dtype}, and was in {self.dtype} when it was sharded; its "
                "residual can't follow: call sparsify.shard anew after the change"
            )
        if (n := sum(self.sizes)) != grad.numel():
            raise ValueError(
                f"{self.name} has {n} trained elements on this worker, and {grad.numel()} have a gradient: a "
                "parameter was not used in this step, or frozen or unfrozen since; call "
                "model.set_reduce_scatter_unused_params(True) where torch has it, give such a part a unit of "
                "its own (fully_shard), or call sparsify.shard anew"
            )

    def replace_reduce_scatter(self, scatter: Any) -> None:
        """Let another one reduce within the shards, see `torch.distributed.fsdp`'s ReduceScatter."""
        self.module.set_custom_reduce_scatter(ReduceScatterOutsideAutocast(scatter))


class ReduceScatterOutsideAutocast:
    """A reduce-scatter that computes outside of autocast, in which a backward pass may run."""

    def __init__(self, scatter: Any) -> None:
        self.scatter = scatter
        self.allocate = scatter.allocate

    @outside_of_modes
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.scatter(*args, **options)


def mesh_info_without_replicas(mesh_info: Any) -> Any:
    """What HSDP knows of its mesh, of the shards alone."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    found: Any = FSDPMeshInfo(mesh_info.mesh, shard_mesh_dim=mesh_info.shard_mesh_dim)
    for name in ("dp_mesh_dims", "spmd_mesh", "is_spmd_mesh", "reduce_scatter_process_group"):
        if hasattr(mesh_info, name):
            setattr(found, name, getattr(mesh_info, name))
    return found


def spec_without_replicas(spec: Any, shards: DeviceMesh) -> Any:
    """A DTensor's place on a mesh of replicas and shards, in this order, on the mesh of shards alone."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if spec.mesh.ndim == 1:
        return spec
    return DTensorSpec(shards, spec.placements[1:], spec.tensor_meta)


def confine_optimizer_to_replica(optimizer: torch.optim.Optimizer, shards: DeviceMesh) -> None:
    """Let gradients, and what an optimizer remembers, follow their parameters from a mesh of replicas and
    shards to the mesh of shards.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            for tensor in (p.grad, *optimizer.state.get(p, {}).values()):
                if hasattr(tensor, "_spec"):
                    tensor._spec = spec_without_replicas(tensor._spec, shards)


def find_units(model: nn.Module, allow_library_hooks: bool = False) -> list[ShardedUnit]:
    """All units of a model that train something, the outermost first.

    Args:
        allow_library_hooks: units may have a hook of this library, which they keep.

    Raises:
        ValueError: it has none, or one of a kind that gradients can't be taken from; or torch is of a version
            that this library does not know.
    """
    check_version()
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):  # a forward pass may have left gathered copies in their place
            module.reshard()
    names = {id(p): name for name, p in model.named_parameters()}
    found = [
        unit
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) and (unit := make_unit(name or "the whole model", module, names))
    ]
    sharded = {id(p) for unit in found for p in unit.parameters}
    for unit in found if allow_library_hooks else ():
        unit.hook = HOOK_BY_MODULE.get(unit.module)
    check_sharded(model, found, sharded)
    return found


def make_unit(name: str, module: Any, names: Mapping[int, str]) -> ShardedUnit | None:
    """That of one module; None where it trains nothing."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    groups = [group for group in groups if any(one.sharded_param.requires_grad for one in group.fsdp_params)]
    if not groups:
        return None
    if len(groups) > 1:
        raise ValueError(
            f"{name} has parameters on {len(groups)} meshes; give each kind a unit of its own: "
            "fully_shard(part, mesh=...) before fully_shard(model)"
        )
    (group,) = groups
    trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
    policy, kept = group.mp_policy, trained[0].sharded_param.dtype
    return ShardedUnit(
        name,
        module,
        group,
        [names.get(id(one.sharded_param), "?") for one in trained],
        [one.sharded_param for one in trained],
        [tuple(one.padded_sharded_param_size) for one in trained],
        policy.reduce_dtype or policy.param_dtype or kept,
    )


def check_version() -> None:
    """Refuse a torch that nobody has tried this with.

    Raises:
        ValueError: it is older or newer.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not FIRST <= (major, minor) <= LAST:
        known = " to ".join(".".join(map(str, version)) for version in (FIRST, LAST))
        raise ValueError(
            f"sparsify.shard works with torch {known}, and this is {torch.__version__}: FSDP2's hooks are "
            "marked experimental, and may hand over something else here; take one of those versions"
        )


def check_sharded(model: nn.Module, units: list[ShardedUnit], sharded: set[int]) -> None:
    """Refuse a model of which something would not be averaged, or by another one."""
    if not units:
        kind = type(model).__name__
        advice = "call torch.distributed.fsdp.fully_shard on its blocks and on itself first"
        if kind == "FullyShardedDataParallel":
            advice = "FSDP1 has no hook for it: call fully_shard, its successor, in its place"
        elif any(type(module).__name__ == "DistributedDataParallel" for module in model.modules()):
            advice = "for DistributedDataParallel take sparsify.register"
        raise ValueError(f"shard takes a model that is sharded, and this {kind} is not; {advice}")
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in sharded:
            raise ValueError(
                f"{name} is trained and in no unit, so that nobody would average it; call fully_shard on the "
                "whole model as well, or freeze it"
            )
    for unit in units:
        hook = getattr(unit.group, HOOK)
        is_foreign = hook is not None and hook is not unit.hook
        if is_foreign and hook is HOOK_BY_MODULE.get(unit.module):
            raise ValueError(
                "sparsify.shard was called for this model already; go on with what that returned. To begin "
                "anew, with another method or optimizer, make the model and fully_shard it anew"
            )
        if is_foreign:
            raise ValueError(
                f"{unit.name} has an all-reduce hook already, and takes no other; leave that one out, or "
                "shard the model anew"
            )
        for name, p in zip(unit.names, unit.parameters, strict=True):
            if len(sharding_dims(p)) > 1:
                raise ValueError(
                    f"{name} is divided along {len(sharding_dims(p))} dimensions of its mesh, as tensor "
                    "parallelism does; shard takes those that fully_shard alone has divided"
                )


def sharding_dims(p: Tensor) -> list[int]:
    """Dimensions of its mesh along which a DTensor is divided."""
    placements = getattr(p, "placements", ())
    return [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
