"""The states of a sharded model's workers, as a part of their optimizer's saved state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from sparsify.ranges import repr_without_addresses
from sparsify.wrappers.checks import parameters_of
from sparsify.wrappers.engine import weak_callback
from sparsify.wrappers.handshake import hash_repr
from sparsify.wrappers.saved_states import (
    FORMAT,
    StateMismatch,
    check_all_can_load,
    resizable_fields,
    saved_parts_by_name,
)
from sparsify.wrappers.sharded.grid import ShardGrid
from sparsify.wrappers.wrapper_base import WrapperBase

KEY_PREFIX = "sparsify."  # of the names of this library in an optimizer's state of a parameter
FACTS = f"{KEY_PREFIX}facts"
LENGTH = ".length"
NO_EPOCH = -1


class OptimizerStateExtension:
    """An extension of an optimizer's `state_dict` by the states of a wrapper's engine.

    It is added to what the optimizer saves, and taken out of what the optimizer loads. Each part is a DTensor
    (replicas, shards, *shape), in the state of the first parameter of its bucket, so that
    `torch.distributed.checkpoint` saves and loads the parts of each worker.

    Args:
        wrapper: whose engine's states are saved, with its epoch.
        optimizers: of all parameters; the first one's state is extended.
        check_between_steps: refuses a call, given by its name, in the middle of a step.
    """

    def __init__(
        self,
        wrapper: WrapperBase,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, Parameter],
        grid: ShardGrid,
        check_between_steps: Callable[[str], None],
    ) -> None:
        for part in optimizers:
            _check_no_sparsify_state_loaded(part)
        optimizer = optimizers[0]
        self.wrapper = wrapper
        self.optimizer = optimizer
        self.parameters = parameters
        self.grid = grid
        self.check_between_steps = check_between_steps
        for handle in (
            optimizer.register_state_dict_post_hook(weak_callback(self._add_states)),
            optimizer.register_load_state_dict_pre_hook(weak_callback(self._load_states)),
        ):
            finalize(self, handle.remove)

    def _facts(self) -> Tensor:
        """Return what must be equal: (4,) a digest of method and buckets, the step, the epoch, the format."""
        engine = self.wrapper.engine
        epoch = self.wrapper.user_epoch
        layout = hash_repr(
            (
                repr_without_addresses(engine.method),
                [(bucket.names, bucket.shapes) for bucket in engine.buckets],
            )
        )
        facts = [layout, engine.step, NO_EPOCH if epoch is None else epoch, FORMAT]
        return torch.tensor(facts, device=self.grid.device)

    def _add_states(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Add the states of all buckets to a state that the optimizer has saved."""
        self.check_between_steps("state_dict()")
        engine = self.wrapper.engine
        number_by_id = {id(p): number for number, p in enumerate(parameters_of(self.optimizer))}
        # The optimizer's number of each bucket's first parameter; 0 where another optimizer has that.
        numbers = [number_by_id.get(id(self.parameters[bucket.names[0]]), 0) for bucket in engine.buckets]
        for number, bucket, state in zip(numbers, engine.buckets, engine.states, strict=True):
            parts = {
                f"{KEY_PREFIX}{bucket.names[0]}{path}": part
                for path, part in _flatten_state(state, bucket.flat.numel(), self.grid.device)
            }
            self._add_parts(saved, number, parts)
        self._add_parts(saved, numbers[0], {FACTS: self._facts()})

    def _add_parts(self, saved: dict[str, Any], number: int, parts: Mapping[str, Tensor]) -> None:
        """Add this worker's parts to the saved state of a parameter."""
        stacked = {name: self.grid.stack_workers(part.detach().clone()) for name, part in parts.items()}
        saved["state"][number] = {**saved["state"].get(number, {}), **stacked}

    def _load_states(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Load this library's parts of a saved state, and leave the optimizer's own in it."""
        self.check_between_steps("load_state_dict()")
        parts = dict[str, Any]()
        optimizer_state = dict[Any, Any]()
        for number, parameter_state in saved.get("state", {}).items():
            optimizer_parts = {
                name: part for name, part in parameter_state.items() if not str(name).startswith(KEY_PREFIX)
            }
            parts |= {name: part for name, part in parameter_state.items() if name not in optimizer_parts}
            if optimizer_parts:
                optimizer_state[number] = optimizer_parts
        saved["state"] = optimizer_state
        checked = dict[str, Any]()
        check = partial(self._check, parts, checked)
        check_all_can_load(self.grid.all_workers_comm(), self.grid.device, check)
        self.wrapper.engine.restore_checked_state(checked["state"])
        self.wrapper.user_epoch = checked["epoch"]

    def _check(self, parts: Mapping[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
        """Refuse parts that are not of these workers, this method and this model.

        Args:
            parts: of all workers, by name.
            checked: is filled with the `state` and the `epoch` to load.

        Returns:
            What must be equal on all workers, by name.
        """
        if FACTS not in parts:
            raise StateMismatch(
                "the saved state has nothing of sparsify.shard, such as residuals. With "
                "flatten_optimizer_state_dict=True torch reads back only what the optimizer itself "
                "remembers: save and load without it. To go on without residuals, load it into the "
                "optimizer before sparsify.shard"
            )
        engine = self.wrapper.engine
        own_parts = {name: self._own_part(name, part) for name, part in parts.items()}
        saved_layout, step, epoch, saved_format = own_parts[FACTS].tolist()
        layout = self._facts().tolist()[0]
        if saved_format != FORMAT:
            raise StateMismatch(
                f"a saved state of format {saved_format} can't be read; this version reads {FORMAT}"
            )
        if saved_layout != layout:
            raise StateMismatch(
                "the saved state is of another method, or of a model with other units; build the method with "
                "the hyperparameters that it was saved with, and shard the model alike"
            )
        saved = engine.uncopied_state_dict()
        saved["step"] = step
        for bucket in saved["buckets"]:
            path = f"{KEY_PREFIX}{bucket['names'][0]}"
            bucket["state"] = _unflatten_state(bucket["state"], path, own_parts)
        checked["epoch"] = None if epoch == NO_EPOCH else epoch
        checked["state"] = saved
        return {**engine.check_state_and_collect_facts(saved), "epoch": epoch}

    def _own_part(self, name: str, part: Any) -> Tensor:
        """Return this worker's part of all workers' part."""
        if not isinstance(part, Tensor):
            raise StateMismatch(f"{name} is {type(part).__name__}, and must be a tensor")
        saved_grid = tuple(part.shape[:2])
        grid = (self.grid.replica_comm.size, self.grid.shard_comm.size)
        if saved_grid != grid:
            raise StateMismatch(
                "the saved state is of {} replicas of {} shards, and there are {} of {}; resume on as many. "
                "To go on without what workers still owed, load the optimizer's state before "
                "sparsify.shard".format(*saved_grid, *grid)
            )
        if hasattr(part, "to_local"):
            own_part: Tensor = part.to_local()[0, 0]
            return own_part
        return part[self.grid.replica_comm.rank, self.grid.shard_comm.rank]


def _flatten_state(
    state: Any, max_size: int, device: torch.device, any_length: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a bucket's state, each with its path, as tensors of shapes that never change.

    Parts whose number of elements changes while training are padded.

    Args:
        max_size: number of elements of the bucket, which no part exceeds.
    """
    parts = saved_parts_by_name(state)
    if isinstance(state, Generator):
        yield "", state.get_state()
    elif isinstance(state, Tensor) and any_length:
        yield "", torch.cat([state, state.new_zeros(max_size - len(state))])
        yield LENGTH, torch.tensor(len(state), device=device)
    elif isinstance(state, Tensor):
        yield "", state
    elif parts is not None:
        resizable = resizable_fields(state)
        for name, part in parts.items():
            for path, leaf in _flatten_state(part, max_size, device, name in resizable):
                yield f".{name}{path}", leaf
    elif isinstance(state, list | tuple):
        for index, part in enumerate(state):
            for path, leaf in _flatten_state(part, max_size, device):
                yield f".{index}{path}", leaf
    else:  # a number, or None, which is saved as NaN
        dtype = torch.int64 if isinstance(state, int) else torch.float64
        yield "", torch.tensor(torch.nan if state is None else state, dtype=dtype, device=device)


def _unflatten_state(state: Any, path: str, leaves: Mapping[str, Tensor], any_length: bool = False) -> Any:
    """Return the tree that `saved_states.dump` would have made, from the parts that `_flatten_state` yielded.

    Args:
        state: one with the types of the saved state.
        path: of the state; the parts' names begin with it.

    Raises:
        StateMismatch: a part is missing.
    """
    parts = saved_parts_by_name(state)
    if parts is not None:
        resizable = resizable_fields(state)
        tree = {
            name: _unflatten_state(part, f"{path}.{name}", leaves, name in resizable)
            for name, part in parts.items()
        }
        return tree or None
    if isinstance(state, list | tuple):
        return [_unflatten_state(part, f"{path}.{index}", leaves) for index, part in enumerate(state)]
    if path not in leaves:
        raise StateMismatch(f"the saved state lacks {path!r}; it was broken, or saved by another version")
    saved = leaves[path]
    if isinstance(state, Tensor | Generator):
        return saved[: int(leaves[path + LENGTH])] if any_length else saved
    number = saved.item()
    if isinstance(state, bool):
        return bool(number)
    return None if math.isnan(number) else number


def _check_no_sparsify_state_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has itself loaded the parts of an `OptimizerStateExtension`.

    Raises:
        ValueError: its state has such parts.
    """
    if any(str(name).startswith(KEY_PREFIX) for state in optimizer.state.values() for name in state):
        raise ValueError(
            "this optimizer has loaded a state that was saved after sparsify.shard, with residuals that "
            "would be lost; load it after sparsify.shard"
        )
