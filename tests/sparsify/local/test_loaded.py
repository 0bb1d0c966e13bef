"""What is loaded or saved in the wrong place is refused: nothing that was trained is undone in silence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.doors.states import StateMismatch
from tests.sparsify.local.rounds import INNER, Worker, fill, model_of

DILOCO = sparsify.diloco(every=3)


def test_a_saved_state_loaded_into_the_inner_optimiser_before_it_is_wrapped_is_refused() -> None:
    def body(comm: Comm, method: Any) -> None:
        model = model_of()
        optimiser = sparsify.distribute(INNER.adamw([*model.parameters()]), model, method, comm)
        for step in range(2):
            fill(model, 0, step)
            optimiser.step()
        saved = copy.deepcopy(optimiser.state_dict())
        other = model_of()
        inner = INNER.adamw([*other.parameters()])
        groups = [set(group) for group in inner.param_groups]
        inner.load_state_dict(copy.deepcopy(saved))
        with pytest.raises(ValueError, match=r"load it into what sparsify\.distribute returns"):
            sparsify.distribute(inner, other, method, comm)

        again = sparsify.distribute(INNER.adamw([*other.parameters()]), other, method, comm)
        again.load_state_dict(copy.deepcopy(saved))
        # As the documentation says: what was owed is lost.
        again.optimiser.load_state_dict(copy.deepcopy(saved))
        assert [set(group) for group in again.param_groups] == groups

    for method in (DILOCO, sparsify.topk(0.5)):
        virtual.run(1, lambda comm, method=method: body(comm, method))  # type: ignore[misc]  # bound at once


def test_within_the_anchor_nothing_is_stepped_exchanged_saved_or_loaded() -> None:
    def body(comm: Comm) -> None:
        worker = Worker(DILOCO, comm)
        worker.train(2)
        own = worker.own()
        optimiser = worker.optimiser
        calls: list[Callable[[], object]] = [
            optimiser.step,
            optimiser.exchange,
            optimiser.state_dict,
            optimiser.own_state_dict,
            lambda: optimiser.load_state_dict({}),
        ]
        with optimiser.at_anchor():
            for call in calls:
                with pytest.raises(ValueError, match=r"within `with optimiser\.at_anchor\(\):`.*outside"):
                    call()
        assert torch.equal(worker.own(), own)
        assert optimiser.steps == 2

    virtual.run(1, body)


def test_a_copied_or_saved_model_is_nobody_s() -> None:
    def body(comm: Comm) -> None:
        worker = Worker(DILOCO, comm)
        worker.train(2)
        file = io.BytesIO()
        torch.save(worker.model, file)
        file.seek(0)
        for other in (copy.deepcopy(worker.model), torch.load(file, weights_only=False)):
            other.load_state_dict(model_of(seed=1).state_dict())
        worker.train(4)

    virtual.run(1, body)


def test_states_of_local_steps_are_for_as_many_workers_each_its_own() -> None:
    states = virtual.run(2, lambda comm: Worker(DILOCO, comm).optimiser.state_dict())
    assert sparsify.redistribute(states, 2) == states
    with pytest.raises(StateMismatch, match="for 3 begin anew from the anchor"):
        sparsify.redistribute(states, 3)
    with pytest.raises(StateMismatch, match=r"load the anchor.*into the model before it is wrapped"):
        virtual.run(2, lambda comm: Worker(DILOCO, comm).optimiser.load_state_dict(states[0]))
