"""What is loaded or saved in the wrong place is refused: nothing that was trained is undone in silence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.doors.states import StateMismatch
from sparsify.local.optimiser import LocalOptimiser
from sparsify.local.strategy import Local
from sparsify.method import Method
from tests.sparsify.local.test_local import INNER, fill, flat, model_of, wrapped

EVERY = 3


def alone(test: Callable[[Comm], None]) -> Callable[[], None]:
    """A test of one worker."""

    def tested() -> None:
        virtual.run(1, test)

    return tested


def lived(comm: Comm, steps: int) -> tuple[nn.Module, LocalOptimiser]:
    """A worker's model and optimiser after so many steps."""
    model = model_of()
    optimiser = wrapped(INNER.adamw, model, sparsify.diloco(every=EVERY), comm)
    go_on(model, optimiser, range(steps))
    return model, optimiser


def go_on(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimiser.zero_grad()
        fill(model, 0, step)
        optimiser.step()


@alone
def test_parameters_loaded_into_a_wrapped_model_are_not_undone_in_silence(comm: Comm) -> None:
    other = model_of(seed=1)
    for part in ("", "0"):  # all of it, or its first layer
        model, optimiser = lived(comm, 2)
        model.get_submodule(part).load_state_dict(other.get_submodule(part).state_dict())
        with pytest.raises(ValueError, match=r"Load weights before sparsify\.distribute or"):
            go_on(model, optimiser, range(2, 3))


@alone
def test_a_state_loaded_after_the_model_or_before_it_goes_on(comm: Comm) -> None:
    model, optimiser = lived(comm, 4)
    saved, weights = copy.deepcopy(optimiser.state_dict()), copy.deepcopy(model.state_dict())
    go_on(model, optimiser, range(4, 8))
    for model_first in (True, False):
        again, resumed = lived(comm, 0)
        if model_first:
            again.load_state_dict(weights)
        resumed.load_state_dict(copy.deepcopy(saved))  # torch keeps what it loads
        if not model_first:
            again.load_state_dict(weights)
        go_on(again, resumed, range(4, 8))
        assert torch.equal(flat(again), flat(model))


@pytest.mark.parametrize("method", [sparsify.diloco(every=EVERY), sparsify.topk(0.5)], ids=["local", "topk"])
def test_a_saved_state_loaded_into_the_inner_optimiser_before_it_is_wrapped_is_refused(
    method: Local | Method,
) -> None:
    def body(comm: virtual.VirtualComm) -> None:
        model, other = model_of(), model_of()
        optimiser = sparsify.distribute(INNER.adamw([*model.parameters()]), model, method, comm)
        go_on(model, optimiser, range(2))
        saved, inner = copy.deepcopy(optimiser.state_dict()), INNER.adamw([*other.parameters()])
        groups = [set(group) for group in inner.param_groups]
        inner.load_state_dict(copy.deepcopy(saved))
        with pytest.raises(ValueError, match=r"load it into what sparsify\.distribute returns"):
            sparsify.distribute(inner, other, method, comm)

        again = sparsify.distribute(INNER.adamw([*other.parameters()]), other, method, comm)
        again.load_state_dict(copy.deepcopy(saved))
        again.optimiser.load_state_dict(
            copy.deepcopy(saved)
        )  # as the documentation says: what was owed is lost
        assert [set(group) for group in again.param_groups] == groups

    virtual.run(1, body)


@alone
def test_within_the_anchor_nothing_is_stepped_exchanged_or_saved(comm: Comm) -> None:
    model, optimiser = lived(comm, 2)
    own = flat(model)
    calls: list[Any] = [optimiser.step, optimiser.exchange, optimiser.state_dict, optimiser.own_state_dict]
    with optimiser.at_anchor():
        for call in calls:
            with pytest.raises(ValueError, match=r"within `with optimiser\.at_anchor\(\):`.*outside"):
                call()
    assert torch.equal(flat(model), own)
    assert optimiser.steps == 2


@alone
def test_a_copied_or_saved_model_is_nobody_s(comm: Comm) -> None:
    model, optimiser = lived(comm, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(model_of(seed=1).state_dict())
    go_on(model, optimiser, range(2, 4))


def test_states_of_local_steps_are_for_as_many_workers_each_its_own() -> None:
    def state(comm: virtual.VirtualComm) -> dict[str, Any]:
        model = model_of()
        return wrapped(INNER.adamw, model, sparsify.diloco(every=EVERY), comm).state_dict()

    states = virtual.run(2, state)
    assert sparsify.redistribute(states, 2) == states
    with pytest.raises(StateMismatch, match="for 3 begin anew from the anchor"):
        sparsify.redistribute(states, 3)

    def load_of_rank_0(comm: virtual.VirtualComm) -> None:
        wrapped(INNER.adamw, model_of(), sparsify.diloco(every=EVERY), comm).load_state_dict(states[0])

    with pytest.raises(StateMismatch, match=r"load the anchor.*into the model before it is wrapped"):
        virtual.run(2, load_of_rank_0)
