"""Saved states: whatever is wrong with one, no worker loads any, and all are told what it is."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
OTHER = repr(sparsify.build("gaussiank", density=0.5))
KEYS = ("state", "param_groups", "method", "epoch")  # of an optimizer's state
EVERY_LENGTH = ("indices", "blocks", "borders")  # parts whose number of elements changes while training


class Damage(NamedTuple):
    """What is wrong with a saved state, and the state."""

    what: str
    state: Any


def damages(whole: Any, skips: tuple[str, ...] = ()) -> Iterator[Damage]:
    """All of a saved state: of each part of the tree those that its kind can have."""
    others: list[Any] = [None, 7, [], {}, "state"]
    yield from (Damage(f"{other!r} in its place", other) for other in others)
    for path in paths(whole):
        if not path or path[-1] in skips:
            continue
        *_, name = path
        for what, part in damaged(name, at(whole, path)):
            yield changed(whole, path, f"{what} for {path}", partial(put, part=part))
        if isinstance(name, str) and name != "shapes":  # older states have none
            yield changed(whole, path, f"no {path}", lambda inside, n: inside.pop(n))
            yield changed(
                whole, path, f"{path} renamed", lambda inside, n: put(inside, f"{n}s", inside.pop(n))
            )
        if isinstance(at(whole, path), dict):
            yield changed(whole, path, f"more in {path}", lambda inside, n: put(inside[n], "more", 1))


def damaged(name: str | int, part: Any) -> list[tuple[str, Any]]:
    """Other values in the place of a part."""
    if isinstance(part, Tensor):
        found: list[tuple[str, Any]] = [("another shape", part.unsqueeze(0)), ("None", None), ("a number", 1)]
        found += [("another type", part.to(torch.complex128)), ("words", "five")]
        if name not in EVERY_LENGTH and part.numel():
            found.append(("another size", torch.cat([part.flatten(), part.flatten()])))
        if part.is_floating_point() and part.numel():
            found += [("NaN", torch.full_like(part, torch.nan)), ("Inf", torch.full_like(part, torch.inf))]
        if part.dtype == torch.uint8:
            found.append(("no generator's bytes", torch.full_like(part, 255)))
        return found
    if isinstance(part, bool | int):
        return [(repr(other), other) for other in (-5, 0.5, "five", None, True, torch.tensor(5))]
    if isinstance(part, float):
        return [(repr(other), other) for other in (-5.0, float("nan"), float("inf"), "five", None)]
    if isinstance(part, str):
        return [(repr(other), other) for other in (OTHER, None, 5)]
    if isinstance(part, list) and part and name not in EVERY_LENGTH:
        return [("fewer items", part[:-1]), ("more items", [*part, part[0]]), ("None", None)]
    return [("a number", 7)]  # for None, and what holds nothing


def paths(tree: Any, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield here
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, part in inside:
        yield from paths(part, (*here, name))


def at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def put(inside: Any, name: Any, part: Any) -> None:
    inside[name] = part


def changed(whole: Any, path: tuple[str | int, ...], what: str, change: Callable[[Any, Any], Any]) -> Damage:
    state = copy.deepcopy(whole)
    change(at(state, path[:-1]), path[-1])
    return Damage(what, state)


def aggregator_of(method: Method, comm: Comm, steps: int = 3) -> Aggregator:
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(shape).double())) for i, shape in enumerate(laws.SHAPES)]
    aggregator = Aggregator(method, parameters, comm)
    for step in range(steps):
        for _, p in parameters:
            there(p.grad).copy_(laws.gradient(comm.rank, step, tuple(p.shape)))
        aggregator.aggregate(lr=0.1)
    return aggregator


def refusal(load: Callable[..., object], *states: Any) -> str:
    """The words with which it is refused; anything else but a refusal is an error."""
    with pytest.raises(StateMismatch) as refused:
        load(*states)
    return str(refused.value)


def saved_state(name: str, comm: Comm) -> dict[str, Any]:
    return aggregator_of(METHODS[name](), comm).state_dict()


@pytest.mark.parametrize("name", METHODS)
def test_a_damaged_state_is_refused_on_all_workers_and_nothing_is_loaded(name: str) -> None:
    def body(comm: virtual.VirtualComm) -> list[tuple[str, str]]:
        saved = saved_state(name, comm)
        later = aggregator_of(METHODS[name](), comm, steps=5)
        before, told = later.state_dict(), list[tuple[str, str]]()
        cases = [
            *damages(saved), Damage("step 900", {**saved, "step": 900}), Damage("format 99", {"format": 99}),
            Damage("rank 0 of 3", {**saved, "size": 3}), Damage("other rank", {**saved, "rank": 0}),
        ]  # fmt: skip
        for damage in cases:
            state = damage.state if comm.rank == 1 else saved
            told.append((damage.what, refusal(later.load_state_dict, state)))
            assert are_equal_trees(later.state_dict(), before), damage.what
        later.load_state_dict(saved)
        assert are_equal_trees(later.state_dict(), saved)
        return told

    for (what, healthy), (_, broken) in zip(*virtual.run(2, body), strict=True):
        if what == "step 900":
            assert healthy == broken
            assert "differ in their step, which is, by rank, [3,900]" in broken
        else:
            assert healthy == f"rank 1 can't load its state, so no worker does: {broken}", what


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
        saved, others = trained(comm, 2).state_dict(), trained(comm, 2, torch.optim.SGD).state_dict()
        later = trained(comm, 3)
        later.epoch = 4
        before = copy.deepcopy(later.state_dict())
        moments = [state["exp_avg"] for state in later.state.values()]
        halves = [{**saved["param_groups"][0], "params": [0, 1]}]
        nan = copy.deepcopy(saved)
        nan["state"][0]["exp_avg"].view(-1)[0] = torch.nan
        cases = [
            *damages({"method": saved["method"]}), Damage("other epochs", {**saved, "epoch": 7}),
            *(Damage(key, {k: v for k, v in saved.items() if k != key}) for key in KEYS),
            Damage("an epoch in words", {**saved, "epoch": "four"}), Damage("SGD's", others),
            Damage("other parameters", {**saved, "param_groups": halves}), Damage("NaN", nan),
            Damage("no groups", {**saved, "param_groups": None}), Damage("no state", {**saved, "state": 5}),
            Damage("an empty state", {**saved, "state": {}}),
        ]  # fmt: skip
        for damage in cases:
            assert refusal(later.load_state_dict, damage.state if comm.rank == 1 else saved)
            assert are_equal_trees(later.state_dict(), before), damage.what
        assert all(state["exp_avg"] is own for state, own in zip(later.state.values(), moments, strict=True))
        later.load_state_dict(saved)
        assert are_equal_trees(later.state_dict(), saved)

    virtual.run(2, body)


def test_damaged_states_are_not_shared_out() -> None:
    for name in ("topk", "dgc", "topk, learning rate"):
        states = virtual.run(2, partial(saved_state, name))
        for damage in damages(states[1]):
            for ranks in ([states[0], damage.state], [damage.state, states[1]]):
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
    """Train on from what another number of workers left in the folder above; return what was loaded, what is
    saved, and where that training ends, and one that is interrupted, by wrapper and kind of checkpoint. And
    is a state refused that all workers saved under one name?
    """
    torch.set_num_threads(1)
    folder = Path(sys.argv[4])
    names = recipe()
    found = dict[str, Any]()
    for wrapper, act in (("register", Act()), ("distribute", Act(momentum=0.5))):
        for kind in ("file", "folder"):
            path = folder.parent / f"{wrapper} {kind}.pt"
            training = Training(act, wrapper, comm.rank)
            (holder,) = training.holders
            if path.exists():
                names["load"](path, training.model, holder)
            states = {"loaded": state_of(training, comm)}
            for step in range(3):
                training.advance(step)
            states["saved"] = state_of(training, comm)
            comm.barrier()
            if kind == "file":
                names["save"](path, training.model, holder)
            else:
                names["save_sharded"](folder / wrapper, training.model, holder)
                if comm.rank == 0:
                    dcp_to_torch_save(folder / wrapper, path)
            comm.barrier()
            resumed = Training(act, wrapper, comm.rank)
            names["load"](path, resumed.model, resumed.holders[0])
            for name, going_on in (("straight", training), ("resumed", resumed)):
                for step in range(3, 5):
                    going_on.advance(step)
                states[name] = state_of(going_on, comm)
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
    """In real processes, by the recipe of docs/own-training.md: first two, then three, then one. Together the
    new workers owe what was owed; and as many as before resume to the bit.
    """
    saved = dict[str, Any]()
    for size in (2, 3, 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        ranks = on_processes(go_on_from_checkpoints, size, folder)
        for found in ranks:
            assert found.pop("mixed is refused", False) is (size > 1)  # where one's overwrites the others'
            for name, states in found.items():
                check_close(states["straight"], states["resumed"])
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

    def owed(aggregator: Aggregator) -> Tensor:
        residuals = aggregator.residuals()
        return torch.cat([residuals[name] for name in sorted(residuals)] or [torch.zeros(1)])

    def left(comm: Comm) -> tuple[dict[str, Any], Tensor]:
        aggregator = aggregator_of(method, comm)
        return aggregator.state_dict(), owed(aggregator)

    def resumed(comm: Comm) -> Tensor:
        aggregator = aggregator_of(method, comm, steps=0)
        aggregator.load_state_dict(shared[comm.rank])
        found = owed(aggregator).clone()
        aggregator.gradients.flat.fill_(1.0)
        aggregator.aggregate(lr=0.1)
        return found

    states, residuals = zip(*virtual.run(2, left), strict=True)
    if name in REFUSED:
        assert "remembers more than residuals" in refusal(sparsify.redistribute, states, 3)
        return
    for size in (1, 3):
        shared = sparsify.redistribute(states, size)
        for found in virtual.run(size, resumed):
            expected = torch.stack(residuals).mean(0)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
