"""The units of a model that `fully_shard` made, with all private names of torch that this library uses."""

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

from sparsify.core.modes import without_torch_modes

# `set_all_reduce_hook` and its kin are marked experimental: these versions have been tried, and others may
# hand over something else.
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
HOOK = "_all_reduce_hook"
# The hook of this library that a module's unit has.
HOOK_BY_MODULE: WeakKeyDictionary[nn.Module, Callable[[Tensor], None]] = WeakKeyDictionary()


@dataclass
class ShardedUnit:
    """The trained parameters of a module that `fully_shard` gathers and reduces together.

    Parameters of units inside the module are not among them. A worker has a shard of each parameter, and gets
    their gradients as one flat tensor, each padded to the size that the first worker has.
    """

    name: str
    module: Any  # an FSDPModule
    group: Any  # torch's FSDPParamGroup
    names: list[str]  # of its trained parameters, in the order in which their gradients lie
    parameters: list[Parameter]  # DTensors
    shapes: list[tuple[int, ...]]  # of their shards, padded
    dtype: torch.dtype  # in which gradients are reduced
    hook: Callable[[Tensor], None] | None = None  # as set by this library
    reduce_scatter: Any = None  # as set by this library

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each shard, padded."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def device(self) -> torch.device:
        """Device on which gradients are reduced, also those of parameters that are kept on the host."""
        device: torch.device = self.group.device
        return device

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Group of the workers that share a replica."""
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Group of the workers that have equal shards, where the unit itself averages over them (HSDP)."""
        group: dist.ProcessGroup | None = getattr(self.group.mesh_info, "replicate_process_group", None)
        return group

    @property
    def is_all_reduce_deferred(self) -> bool:
        """True in a backward pass under `set_requires_all_reduce(False)`."""
        return not self.group.all_reduce_grads

    def find_late_divisor(self, dtype: torch.dtype) -> float:
        """Return the number by which torch divides gradients of a type after the all-reduce hook, now."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

        group = self.group
        _, divisor, *_ = _get_gradient_divide_factors(
            self.shard_group,
            None,
            dtype,
            group.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        return divisor or 1.0

    def replace_all_reduce(self, average: Callable[[Tensor], None], num_replicas: int) -> None:
        """Let `average` change a shard's gradients in place of the unit's own all-reduce.

        It is given the gradients (n,) as they come from the reduce-scatter: their mean over the replica's
        workers; or, after `set_gradient_divide_factor` for all workers of R replicas, R times their sum over
        the factor.
        """
        self._remove_all_reduce()

        def hook(grad: Tensor) -> None:
            # After `set_gradient_divide_factor`, whose factor divides the sum over all workers.
            if self.group.gradient_divide_factor is not None:
                grad.mul_(num_replicas)
            average(grad)

        self.hook = hook
        HOOK_BY_MODULE[self.module] = hook
        self.module.set_all_reduce_hook(hook)

    def move_to_shard_mesh(self, shard_mesh: DeviceMesh, num_replicas: int) -> None:
        """Keep gradients, and the arithmetic of optimizers, within the replica.

        Parameters on a mesh of replicas and shards become DTensors on `shard_mesh`, the mesh of this replica.
        """
        self.replace_all_reduce(lambda grad: None, num_replicas)
        for fsdp_param in self.group.fsdp_params:
            fsdp_param._sharding_spec = _spec_without_replicas(fsdp_param._sharding_spec, shard_mesh)
            fsdp_param.sharded_param._spec = fsdp_param._sharding_spec

    def check_hooks_not_replaced(self) -> None:
        """Refuse a unit whose all-reduce hook or reduce-scatter was replaced since.

        Raises:
            ValueError: the unit has another hook, or another reduce-scatter than that of `within`.
        """
        if self.reduce_scatter not in (None, self.group._reduce_scatter_comm):
            raise ValueError(
                f"{self.name} was given another reduce-scatter after sparsify.shard, in the place of that of "
                "within=; leave one of them out"
            )
        if getattr(self.group, HOOK) is not self.hook:
            raise ValueError(
                f"{self.name} was given another all-reduce hook after sparsify.shard, so that its gradients "
                "are not averaged between replicas; leave set_all_reduce_hook out, or call sparsify.shard "
                "after fully_shard anew"
            )

    def _remove_all_reduce(self) -> None:
        """Remove the all-reduce of a unit on a mesh of replicas and shards; other units have none."""
        if self.replica_group is None:
            return
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        group = self.group
        grid_info = group.mesh_info
        shards_info: Any = FSDPMeshInfo(grid_info.mesh, shard_mesh_dim=grid_info.shard_mesh_dim)
        for name in ("dp_mesh_dims", "spmd_mesh", "is_spmd_mesh", "reduce_scatter_process_group"):
            if hasattr(grid_info, name):
                setattr(shards_info, name, getattr(grid_info, name))
        if group.post_forward_mesh_info is grid_info:  # else parameters would move between two meshes
            group.post_forward_mesh_info = shards_info
        group.mesh_info = shards_info

    def check_gradient_complete(self, grad: Tensor) -> None:
        """Refuse a gradient that is not of all trained parameters.

        Raises:
            ValueError: it has fewer or more elements, or another dtype.
        """
        if grad.dtype != self.dtype:
            raise ValueError(
                f"{self.name} is reduced in {grad.dtype}, and was in {self.dtype} when it was sharded; its "
                "residual can't follow: call sparsify.shard anew after the change"
            )
        n = sum(self.sizes)
        if n != grad.numel():
            raise ValueError(
                f"{self.name} has {n} trained elements on this worker, and {grad.numel()} have a gradient: a "
                "parameter was not used in this step, or frozen or unfrozen since; call "
                "model.set_reduce_scatter_unused_params(True) where torch has it, give such a part a unit of "
                "its own (fully_shard), or call sparsify.shard anew"
            )

    def check_reduce_scatter_is_torchs(self) -> None:
        """Refuse a unit with a reduce-scatter of the user's, which another one would replace.

        Raises:
            ValueError: the unit has such a reduce-scatter.
        """
        if not type(self.group._reduce_scatter_comm).__module__.startswith("torch."):
            raise ValueError(
                f"{self.name} has a reduce-scatter of its own (set_custom_reduce_scatter), and within= "
                "would replace it; leave one of them out"
            )

    def replace_reduce_scatter(self, scatter: Any) -> None:
        """Reduce within the shards by `scatter`, a ReduceScatter of `torch.distributed.fsdp`."""
        self.reduce_scatter = _ReduceScatterOutsideAutocast(scatter)
        self.module.set_custom_reduce_scatter(self.reduce_scatter)


class _ReduceScatterOutsideAutocast:
    """A reduce-scatter that computes outside of autocast, in which a backward pass may run."""

    def __init__(self, scatter: Any) -> None:
        self.scatter = scatter
        self.allocate = scatter.allocate

    @without_torch_modes
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.scatter(*args, **options)


def _spec_without_replicas(spec: Any, shard_mesh: DeviceMesh) -> Any:
    """Return a DTensor's spec on a mesh of replicas and shards, in this order, for the shards alone."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if spec.mesh.ndim == 1:
        return spec
    return DTensorSpec(shard_mesh, spec.placements[1:], spec.tensor_meta)


def move_grads_and_optimizer_state_to_mesh(optimizer: torch.optim.Optimizer, shard_mesh: DeviceMesh) -> None:
    """Move gradients and an optimizer's state to the mesh of shards, see `ShardedUnit.move_to_shard_mesh`."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            for tensor in (p.grad, *optimizer.state.get(p, {}).values()):
                if hasattr(tensor, "_spec"):
                    tensor._spec = _spec_without_replicas(tensor._spec, shard_mesh)


def find_units(model: nn.Module, allow_library_hooks: bool = False) -> list[ShardedUnit]:
    """Return the units of a model that have trained parameters, the outermost first.

    Args:
        allow_library_hooks: units may have a hook of this library, and keep it.

    Raises:
        ValueError: the model has no units, or units that hand no gradients over; or this library does not
            know the version of torch.
    """
    _check_torch_version()
    from torch.distributed.fsdp import FSDPModule

    fsdp_modules = [
        (name or "the whole model", module)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    ]
    for _, module in fsdp_modules:  # a forward pass may have left gathered copies in their place
        module.reshard()
    names = {id(p): name for name, p in model.named_parameters()}
    units = list[ShardedUnit]()
    for name, module in fsdp_modules:
        unit = _make_unit_of_trained(name, module, names)
        if unit is not None:
            units.append(unit)
            unit.hook = HOOK_BY_MODULE.get(unit.module) if allow_library_hooks else None
    _check_model_sharded(model, units)
    return units


def _make_unit_of_trained(name: str, module: Any, names: Mapping[int, str]) -> ShardedUnit | None:
    """Return the unit of one module; None where the module has no trained parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    trained_groups = list[tuple[Any, list[Any]]]()
    for group in groups:
        trained = [fsdp_param for fsdp_param in group.fsdp_params if fsdp_param.sharded_param.requires_grad]
        if trained:
            trained_groups.append((group, trained))
    if not trained_groups:
        return None
    if len(trained_groups) > 1:
        raise ValueError(
            f"{name} has parameters on {len(trained_groups)} meshes; give each kind a unit of its own: "
            "fully_shard(part, mesh=...) before fully_shard(model)"
        )
    ((group, trained),) = trained_groups
    policy = group.mp_policy
    return ShardedUnit(
        name,
        module,
        group,
        [names.get(id(fsdp_param.sharded_param), "?") for fsdp_param in trained],
        [fsdp_param.sharded_param for fsdp_param in trained],
        [tuple(fsdp_param.padded_sharded_param_size) for fsdp_param in trained],
        policy.reduce_dtype or policy.param_dtype or trained[0].sharded_param.dtype,
    )


def _check_torch_version() -> None:
    """Refuse a version of torch that this library was not tried with.

    Raises:
        ValueError: the version is older or newer.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= (major, minor) <= NEWEST_TORCH:
        known = " to ".join(".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH))
        raise ValueError(
            f"sparsify.shard works with torch {known}, and this is {torch.__version__}: FSDP2's hooks are "
            "marked experimental, and may hand over something else here; take one of those versions"
        )


def _check_model_sharded(model: nn.Module, units: list[ShardedUnit]) -> None:
    """Refuse a model with trained parameters that no unit has, or that something else averages."""
    if not units:
        kind = type(model).__name__
        advice = "call torch.distributed.fsdp.fully_shard on its blocks and on itself first"
        if kind == "FullyShardedDataParallel":
            advice = "FSDP1 has no hook for it: call fully_shard, its successor, in its place"
        elif any(type(module).__name__ == "DistributedDataParallel" for module in model.modules()):
            advice = "for DistributedDataParallel take sparsify.register"
        raise ValueError(f"shard takes a model that is sharded, and this {kind} is not; {advice}")
    sharded_ids = {id(p) for unit in units for p in unit.parameters}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in sharded_ids:
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
            placements = getattr(p, "placements", ())
            num_dims = sum(not placement.is_replicate() for placement in placements)  # that divide it
            if num_dims > 1:
                raise ValueError(
                    f"{name} is divided along {num_dims} dimensions of its mesh, as tensor "
                    "parallelism does; shard takes those that fully_shard alone has divided"
                )
