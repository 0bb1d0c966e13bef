"""Saved states: whatever is wrong with one, no worker loads any, and all are told what it is."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.method import Method
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.distributed_optimizer import DistributedOptimizer
from sparsify.wrappers.redistribution import are_equal_trees
from sparsify.wrappers.saved_states import StateMismatch
from tests.conftest import ROOT, there
from tests.sparsify import laws
from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers.user_acts import Act, Training, loss_of, net, weights

METHODS: dict[str, Callable[[], Method]] = {
    **{name: partial(laws.build, name, 0.1) for name in laws.METHODS},
    "randomk, permutations": partial(sparsify.build, "randomk", density=0.1, sampling="permutation"),
    "topk, learning rate": partial(sparsify.build, "topk", density=0.1, feedback="learning_rate"),
}
# Each worker has a generator or a number of stages of its own; or regions, one a worker.
REFUSED = ("arctopk", "ef21", "exdyna", "oktopk", "qsgd", "randomk, permutations", "sidco", "terngrad")
KEYS = ("state", "param_groups", "method", "epoch")  # of an optimizer's state
EVERY_LENGTH = ("indices", "blocks", "borders")  # parts whose number of elements changes while training


def damages(whole: Any) -> Iterator[Any]:
    """Yield a saved state again and again, each time with something else in the place of one of its parts."""
    for path in [*paths({"": whole})][1:]:
        *outside, name = path
        for other in others_than(name, at({"": whole}, path)):
            state = {"": copy.deepcopy(whole)}
            at(state, outside)[name] = other
            yield state[""]


def others_than(name: str | int, part: Any) -> list[Any]:
    """Return what must not stand in the place of a part."""
    if part is None:  # it may have become anything of its kind
        return ["five"]
    others: list[Any] = [None, -5, math.nan, "five"]
    if not isinstance(part, float):
        others.append(0.5)
    if isinstance(part, dict):
        others.append({**part, "more": 1})
        for key in part.keys() - {"shapes"}:  # older states have none
            others.append({other: inside for other, inside in part.items() if other != key})
    if isinstance(part, list) and part and name not in EVERY_LENGTH:
        others += [part[:-1], [*part, part[0]]]
    if isinstance(part, Tensor):
        others += [part.unsqueeze(0), part.to(torch.complex128)]
        if name not in EVERY_LENGTH and part.numel():
            others.append(torch.cat([part.flatten(), part.flatten()]))
        if part.is_floating_point() and part.numel():
            others += [torch.full_like(part, torch.nan), torch.full_like(part, torch.inf)]
        if part.dtype == torch.uint8:  # of a generator
            others.append(torch.full_like(part, 255))
    return others


def paths(tree: Any, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield here
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, part in inside:
        yield from paths(part, (*here, name))


def at(tree: Any, path: Sequence[str | int]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def aggregator_of(method: Method, comm: Comm, steps: int = 3) -> Aggregator:
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(shape).double())) for i, shape in enumerate(laws.SHAPES)]
    aggregator = Aggregator(method, parameters, comm)
    for step in range(steps):
        for _, p in parameters:
            there(p.grad).copy_(laws.gradient(comm.rank, step, tuple(p.shape)))
        aggregator.aggregate(lr=0.1)
    return aggregator


def refusal(load: Callable[..., object], *states: Any) -> str:
    """Return the words with which `load` refuses the states; any other error is raised."""
    with pytest.raises(StateMismatch) as refused:
        load(*states)
    return str(refused.value)


def saved_state(name: str, comm: Comm) -> dict[str, Any]:
    return aggregator_of(METHODS[name](), comm).state_dict()


@pytest.mark.parametrize("name", METHODS)
def test_a_damaged_state_is_refused_on_all_workers_and_nothing_is_loaded(name: str) -> None:
    def body(comm: virtual.VirtualComm) -> list[str]:
        saved = saved_state(name, comm)
        later = aggregator_of(METHODS[name](), comm, steps=5)
        before = later.state_dict()
        others = [{**saved, "step": 900}, {"format": 99}, {**saved, "size": 3}, {**saved, "rank": 0}]
        told = []
        for damaged in [*others, *damages(saved)]:
            told.append(refusal(later.load_state_dict, damaged if comm.rank == 1 else saved))
            assert are_equal_trees(later.state_dict(), before), damaged
        later.load_state_dict(saved)
        assert are_equal_trees(later.state_dict(), saved)
        return told

    (healthy, *others), (broken, *own) = virtual.run(2, body)
    assert healthy == broken
    assert "differ in their step, which is, by rank, [3,900]" in broken
    assert others == [f"rank 1 can't load its state, so no worker does: {words}" for words in own]


def test_a_damaged_state_of_an_optimizer_leaves_all_of_it_as_it_was() -> None:
    def trained(comm: Comm, steps: int, kind: Any = torch.optim.Adam) -> DistributedOptimizer:
        model = net()
        inner = kind(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, model, sparsify.build("topk", density=0.1), comm)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
        return optimizer

    def body(comm: virtual.VirtualComm) -> None:
        saved = trained(comm, 2).state_dict()
        later = trained(comm, 3)
        later.epoch = 4
        before = copy.deepcopy(later.state_dict())
        moments = [state["exp_avg"] for state in later.state.values()]
        nan = copy.deepcopy(saved)
        nan["state"][0]["exp_avg"].view(-1)[0] = torch.nan
        halves = [{**saved["param_groups"][0], "params": [0, 1]}]
        changes: list[dict[str, Any]] = [
            {"epoch": 7}, {"epoch": "four"}, {"param_groups": halves}, {"param_groups": None}, {"state": 5},
            {"state": {}}, *({"method": method} for method in damages(saved["method"])),
        ]  # fmt: skip
        without = [{name: part for name, part in saved.items() if name != key} for key in KEYS]
        others = [nan, trained(comm, 2, torch.optim.SGD).state_dict(), *without]
        for damaged in [*others, *({**saved, **change} for change in changes)]:
            assert refusal(later.load_state_dict, damaged if comm.rank == 1 else saved)
            assert are_equal_trees(later.state_dict(), before), damaged
        assert all(state["exp_avg"] is own for state, own in zip(later.state.values(), moments, strict=True))
        later.load_state_dict(saved)
        assert are_equal_trees(later.state_dict(), saved)

    virtual.run(2, body)


def test_damaged_states_are_not_shared_out() -> None:
    for name in ("topk", "dgc", "topk, learning rate"):
        states = virtual.run(2, partial(saved_state, name))
        for damaged in damages(states[1]):
            for ranks in ([states[0], damaged], [damaged, states[1]]):
                assert refusal(sparsify.redistribute, ranks, 3)
    wrongs: list[Any] = [states[:1], states[::-1], [*states, states[1]], [], None, 7, "states", {}, states[0]]
    for wrong in wrongs:
        assert refusal(sparsify.redistribute, wrong, 3)
    steps = [{**states[0], "step": 5}, {**states[1], "step": 900}]
    assert "step of ranks 0 and 1 differ" in refusal(sparsify.redistribute, steps, 3)
    for size in (0, -1, 2.5, None, True):
        assert refusal(sparsify.redistribute, states, size)
    for now, before in zip(sparsify.redistribute(states, 2), states, strict=True):
        assert are_equal_trees(now, before)


def recipe() -> dict[str, Any]:
    """Return what docs/own-training.md defines to save and load."""
    page = (ROOT / "docs/own-training.md").read_text()
    names = dict[str, Any]()
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "dcp" in code), names)
    return names


def state_of(training: Training, comm: Comm) -> dict[str, Any]:
    """Return weights, moments, steps, and what all workers owe together, on average."""
    (holder,) = training.holders
    owed = {name: comm.all_reduce(residual) / comm.size for name, residual in training.owed().items()}
    moments = [state["momentum_buffer"].clone() for state in getattr(holder, "state", {}).values()]
    return {"weights": weights(training.model), "owed": owed, "moments": moments, "steps": holder.steps}


def go_on_from_checkpoints(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Train on from what another number of workers left in the folder above.

    Return what was loaded, what was saved, and what is loaded of that, by wrapper and kind of checkpoint; and
    whether a state is refused that all workers saved under one name.
    """
    torch.set_num_threads(1)
    folder = Path(sys.argv[4])
    names = recipe()
    found = dict[str, Any]()
    for wrapper, act in (("register", Act()), ("distribute", Act(momentum=0.5))):
        for kind in ("file", "folder"):
            path = folder.parent / f"{wrapper} {kind}.pt"
            training, resumed = (Training(act, wrapper, comm.rank) for _ in range(2))
            parts = (training.model, training.holders[0])
            if path.exists():
                names["load"](path, *parts)
            states = {"loaded": state_of(training, comm)}
            for step in range(3):
                training.advance(step)
            states["saved"] = state_of(training, comm)
            comm.barrier()
            if kind == "file":
                names["save"](path, *parts)
            else:
                names["save_sharded"](folder / wrapper, *parts)
                if comm.rank == 0:
                    dcp_to_torch_save(folder / wrapper, path)
            comm.barrier()
            names["load"](path, resumed.model, resumed.holders[0])
            states["resumed"] = state_of(resumed, comm)
            found[f"{wrapper} {kind}"] = states
    # A state without moments: torch.distributed.checkpoint drops what is empty.
    (holder,) = Training(Act(), "distribute", comm.rank).holders
    names["dcp"].save({"all": holder.state_dict()}, checkpoint_id=folder / "mixed")
    if comm.rank == 0:
        dcp_to_torch_save(folder / "mixed", folder / "mixed.pt")
    comm.barrier()
    mixed = torch.load(folder / "mixed.pt", weights_only=True)["all"]
    try:
        holder.load_state_dict(mixed)
    except StateMismatch:
        found["mixed is refused"] = True
    return found


def check_close(states: Any, others: Any, error: float = 0.0) -> None:
    torch.testing.assert_close(states, others, rtol=error, atol=error)


def test_another_number_of_workers_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    """Real processes follow the recipe of docs/own-training.md: first two, then three, then one.

    Together the new workers owe what was owed; and as many as before load what they saved, to the bit.
    """
    saved = dict[str, Any]()
    for size in (2, 3, 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        ranks = on_processes(go_on_from_checkpoints, size, folder)
        for found in ranks:
            assert found.pop("mixed is refused", False) is (size > 1)  # where one's overwrites the others'
            for name, states in found.items():
                check_close(states["resumed"], states["saved"])
                if saved:
                    check_close(states["loaded"], saved[name]["saved"], error=1e-12)
                check_close(states, found[name.replace("folder", "file")])
        saved = ranks[0]
    assert saved["register file"]["saved"]["steps"] == saved["distribute folder"]["saved"]["steps"] == 9
    assert any(owed.any() for owed in saved["distribute file"]["saved"]["owed"].values())


def test_what_can_be_shared_out_is_owed_as_before() -> None:
    for name in METHODS:
        check_shared_out(name)


def check_shared_out(name: str) -> None:
    """Check that other numbers of workers owe what two did."""
    method = METHODS[name]()

    def owed(aggregator: Aggregator) -> dict[str, Tensor]:
        return {key: residual.clone() for key, residual in aggregator.residuals().items()}

    def left(comm: Comm) -> tuple[dict[str, Any], dict[str, Tensor]]:
        aggregator = aggregator_of(method, comm)
        return aggregator.state_dict(), owed(aggregator)

    def resumed(comm: Comm) -> dict[str, Tensor]:
        aggregator = aggregator_of(method, comm, steps=0)
        aggregator.load_state_dict(shared[comm.rank])
        found = owed(aggregator)
        aggregator.gradients.flat.fill_(1.0)
        aggregator.aggregate(lr=0.1)
        return found

    states, (mine, theirs) = zip(*virtual.run(2, left), strict=True)
    if name in REFUSED:
        assert "remembers more than residuals" in refusal(sparsify.redistribute, states, 3)
        return
    expected = {key: (residual + theirs[key]) / 2 for key, residual in mine.items()}
    for size in (1, 3):
        shared = sparsify.redistribute(states, size)
        for found in virtual.run(size, resumed):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
