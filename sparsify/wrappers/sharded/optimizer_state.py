"""What workers of a sharded model remember, as a part of their optimizer's saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from sparsify.ranges import stable_repr
from sparsify.wrappers.checks import parameters_of
from sparsify.wrappers.engine import while_alive
from sparsify.wrappers.handshake import digest
from sparsify.wrappers.saved_states import FORMAT, StateMismatch, check_all_can_load, parts_by_name
from sparsify.wrappers.sharded.grid import ShardGrid
from sparsify.wrappers.wrapper_base import WrapperBase

OURS = "sparsify."  # begins the names of what is ours in the state of a parameter
FACTS, LENGTH = f"{OURS}facts", ".length"
NO_EPOCH = -1


class OptimizerStateExtension:
    """Adds to what an optimizer's `state_dict` returns, and takes it out of what its `load_state_dict` is
    given. Each part is a DTensor (replicas, shards, *shape), in the state of the first parameter of the
    bucket that it belongs to: so `torch.distributed.checkpoint` saves and loads what each worker has.

    Args:
        door: whose engine's states are saved, with its epoch.
        check: refuses what comes in the middle of a step, whose name it is given.
    """

    def __init__(
        self,
        door: WrapperBase,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Parameter],
        grid: ShardGrid,
        check: Callable[[str], None],
    ) -> None:
        check_no_extension_loaded(optimizer)
        self.door, self.optimizer, self.parameters, self.grid = door, optimizer, parameters, grid
        self.check = check
        for handle in (
            optimizer.register_state_dict_post_hook(while_alive(self._add)),
            optimizer.register_load_state_dict_pre_hook(while_alive(self._take)),
        ):
            finalize(self, handle.remove)

    def _places(self) -> list[int]:
        """The number of each bucket's first parameter, as the optimizer counts."""
        numbers = {id(p): number for number, p in enumerate(parameters_of(self.optimizer))}
        return [numbers[id(self.parameters[bucket.names[0]])] for bucket in self.door.engine.buckets]

    def _facts(self) -> Tensor:
        """What must be alike: (4,) a digest of method and buckets, the step, the epoch and the format."""
        engine, epoch = self.door.engine, self.door.user_epoch
        named = [(bucket.names, bucket.shapes) for bucket in engine.buckets]
        fits = digest((stable_repr(engine.method), named))
        told = [fits, engine.step, NO_EPOCH if epoch is None else epoch, FORMAT]
        return torch.tensor(told, device=self.grid.device)

    def _add(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """To what the optimizer has saved."""
        self.check("state_dict()")
        places, engine = self._places(), self.door.engine
        for place, bucket, state in zip(places, engine.buckets, engine.states, strict=True):
            parts = {
                f"{OURS}{bucket.names[0]}{path}": part
                for path, part in flatten_state(state, bucket.flat.numel(), self.grid.device)
            }
            self._put(saved, place, parts)
        self._put(saved, places[0], {FACTS: self._facts()})

    def _put(self, saved: dict[str, Any], place: int, parts: Mapping[str, Tensor]) -> None:
        of_parameter = dict(saved["state"].get(place, {}))
        saved["state"][place] = of_parameter | {
            name: self.grid.stack_workers(part.detach().clone()) for name, part in parts.items()
        }

    def _take(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Out of a saved state, a copy of the user's; what is left is the optimizer's own."""
        self.check("load_state_dict()")
        found = dict[str, Any]()
        state = dict(saved.get("state", {}))
        for number, of_parameter in state.items():
            ours = {name: part for name, part in of_parameter.items() if str(name).startswith(OURS)}
            found |= ours
            if ours:
                state[number] = {name: part for name, part in of_parameter.items() if name not in ours}
        saved["state"] = {number: rest for number, rest in state.items() if rest}
        agreed = dict[str, Any]()
        check_all_can_load(self.grid.all_workers(), self.grid.device, partial(self._check, found, agreed))
        self.door.engine.restore_state(agreed["state"])
        self.door.user_epoch = agreed["epoch"]

    def _check(self, found: Mapping[str, Any], agreed: dict[str, Any]) -> dict[str, Any]:
        """Refuse what is not of these workers, this method and this model; else fill `agreed` with what is to
        be loaded. Returns what must be the same on all workers.
        """
        if FACTS not in found:
            raise StateMismatch(
                "the saved state has nothing of sparsify.shard, such as residuals. With "
                "flatten_optimizer_state_dict=True torch reads back only what the optimizer itself "
                "remembers: save and load without it. To go on without residuals, load it into the "
                "optimizer before sparsify.shard"
            )
        engine = self.door.engine
        mine = {name: self._own(name, part) for name, part in found.items()}
        now, (fits, step, epoch, form) = self._facts().tolist(), mine[FACTS].tolist()
        if form != now[3]:
            raise StateMismatch(f"a saved state of format {form} can't be read; this version reads {now[3]}")
        if fits != now[0]:
            raise StateMismatch(
                "the saved state is of another method, or of a model with other units; build the method with "
                "the hyperparameters that it was saved with, and shard the model alike"
            )
        states = [
            unflatten_state(state, f"{OURS}{bucket.names[0]}", mine)
            for state, bucket in zip(engine.states, engine.buckets, strict=True)
        ]
        buckets = [
            {"names": list(bucket.names), "shapes": [list(shape) for shape in bucket.shapes], "state": state}
            for bucket, state in zip(engine.buckets, states, strict=True)
        ]
        who = {"rank": engine.comm.rank, "size": engine.comm.size}
        whole = {
            "format": form,
            "method": stable_repr(engine.method),
            "step": step,
            **who,
            "buckets": buckets,
        }
        agreed["epoch"] = None if epoch == NO_EPOCH else epoch
        agreed["state"] = whole
        return {**engine.check_state(whole), "epoch": epoch}

    def _own(self, name: str, part: Any) -> Tensor:
        """This worker's of all workers'."""
        if not isinstance(part, Tensor):
            raise StateMismatch(f"{name} is {type(part).__name__}, and must be a tensor")
        grid, now = tuple(part.shape[:2]), (self.grid.replicas.size, self.grid.shards.size)
        if grid != now:
            raise StateMismatch(
                "the saved state is of {} replicas of {} shards, and there are {} of {}; resume on as many. "
                "To go on without what workers still owed, load the optimizer's state before "
                "sparsify.shard".format(*grid, *now)
            )
        if hasattr(part, "to_local"):
            found: Tensor = part.to_local()[0, 0]
            return found
        return part[self.grid.replicas.rank, self.grid.shards.rank]


def flatten_state(
    state: Any, most: int, device: torch.device, any_size: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The parts of a bucket's state, each by the path to it, as tensors whose shapes do not change while
    training. What grows and shrinks is padded.

    Args:
        most: elements of the bucket, as many as anything has that grows.
    """
    if isinstance(state, Generator):
        yield "", state.get_state()
    elif isinstance(state, Tensor) and any_size:
        yield "", torch.cat([state, state.new_zeros(most - len(state))])
        yield LENGTH, torch.tensor(len(state), device=device)
    elif isinstance(state, Tensor):
        yield "", state
    elif (named := parts_by_name(state)) is not None:
        grow = any_size_fields(state)
        for name, part in named.items():
            for path, leaf in flatten_state(part, most, device, name in grow):
                yield f".{name}{path}", leaf
    elif isinstance(state, list | tuple):
        for at, part in enumerate(state):
            for path, leaf in flatten_state(part, most, device):
                yield f".{at}{path}", leaf
    else:  # a number; none is NaN
        is_whole = isinstance(state, int)
        number = torch.nan if state is None else state
        yield "", torch.tensor(number, dtype=torch.int64 if is_whole else torch.float64, device=device)


def unflatten_state(state: Any, path: str, found: Mapping[str, Tensor], any_size: bool = False) -> Any:
    """The tree that `sparsify.wrappers.saved_states.dump` would have made, of what `leaves` gave.

    Args:
        state: one like that which was saved.

    Raises:
        StateMismatch: a part is missing.
    """
    if (named := parts_by_name(state)) is not None:
        grow = any_size_fields(state)
        parts = {
            name: unflatten_state(part, f"{path}.{name}", found, name in grow) for name, part in named.items()
        }
        return parts or None
    if isinstance(state, list | tuple):
        return [unflatten_state(part, f"{path}.{at}", found) for at, part in enumerate(state)]
    if path not in found:
        raise StateMismatch(f"the saved state lacks {path!r}; it was broken, or saved by another version")
    saved = found[path]
    if isinstance(state, Tensor | Generator):
        return saved[: int(found[path + LENGTH])] if any_size else saved
    number = saved.item()
    if isinstance(state, bool):
        return bool(number)
    return None if number != number else number


def any_size_fields(state: Any) -> set[str]:
    """Names of a dataclass's fields that hold more or fewer elements from step to step."""
    told = fields(state) if is_dataclass(state) else ()
    return {field.name for field in told if field.metadata.get("any_size")}


def check_no_extension_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds what another one's `OptimizerStateExtension` saved, and that nobody would read.

    Raises:
        ValueError: it does.
    """
    if any(str(name).startswith(OURS) for state in optimizer.state.values() for name in state):
        raise ValueError(
            "this optimizer has loaded a state that was saved after sparsify.shard, with residuals that "
            "would be lost; load it after sparsify.shard"
        )
