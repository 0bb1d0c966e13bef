"""What is loaded or saved in the wrong place is refused: nothing that was trained is undone in silence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial

import pytest
import torch

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.doors.states import StateMismatch
from sparsify.local.strategy import Local
from sparsify.method import Method
from tests.sparsify.local.rounds import INNER, Worker, model_of

DILOCO = sparsify.diloco(every=3)


def test_a_saved_state_loaded_into_the_inner_optimiser_before_it_is_wrapped_is_refused() -> None:
    def body(comm: Comm, method: Local | Method) -> None:
        worker = Worker(method, comm)
        worker.train(2)
        saved = copy.deepcopy(worker.optimiser.state_dict())
        other = model_of()
        inner = INNER.adamw([*other.parameters()])
        groups = [set(group) for group in inner.param_groups]
        inner.load_state_dict(copy.deepcopy(saved))
        with pytest.raises(ValueError, match=r"load it into what sparsify\.distribute returns"):
            Worker(method, comm, lambda _: inner, other)

        again = Worker(method, comm).optimiser
        again.load_state_dict(copy.deepcopy(saved))
        # As the documentation says: what was owed is lost.
        again.optimiser.load_state_dict(copy.deepcopy(saved))
        assert [set(group) for group in again.param_groups] == groups

    for method in (DILOCO, sparsify.topk(0.5)):
        virtual.run(1, partial(body, method=method))


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
