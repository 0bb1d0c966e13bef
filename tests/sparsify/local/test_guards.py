"""Guards of local steps of whole models; those of shards are among the uses of sharded models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.local.guards import ParameterGuard
from sparsify.local.strategy import Local, Outer
from tests.sparsify.local.test_local import INNER, fill, flat, model_of, there, wrapped
from tests.sparsify.local.uses_guards import (
    NEUTRAL,
    REFUSED,
    Wrapped,
    evaluate,
    lived,
    net,
    step,
    told,
)


def wrap(comm: Comm, strategy: Local) -> Wrapped:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return Wrapped(model, inner, sparsify.distribute(inner, model, strategy, comm))


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_exchange_would_undo_is_refused(case: str) -> None:
    change, sentence = REFUSED[case]
    (said,) = virtual.run(1, lambda comm: told(partial(wrap, comm), comm.rank, change))
    assert sentence in said


@pytest.mark.parametrize("case", NEUTRAL)
def test_what_changes_no_weights_changes_no_training(case: str) -> None:
    def ends(comm: Comm) -> tuple[Tensor, Tensor]:
        make = partial(wrap, comm)
        return lived(make, comm.rank, NEUTRAL[case]), lived(make, comm.rank, NEUTRAL["nothing"])

    for changed, plain in virtual.run(2, ends):
        assert torch.equal(changed, plain)


def test_weights_that_each_step_clips_in_a_hook_count_as_its_own() -> None:
    def ends(comm: Comm) -> tuple[float, float]:
        own = wrap(comm, sparsify.localsgd(every=2))

        @torch.no_grad()
        def clip(*_: Any) -> None:
            for p in own.model.parameters():
                p.clamp_(-0.1, 0.1)

        own.optimiser.register_step_post_hook(clip)
        for number in range(4):
            step(own, number, comm.rank)
        largest = [float(p.detach().abs().max()) for p in own.model.parameters() if p.requires_grad]
        return min(largest), max(largest)

    for smallest, largest in virtual.run(2, ends):
        assert 0 < smallest <= largest <= 0.1 + 1e-7


def test_embeddings_that_limit_their_norms_in_the_forward_pass_are_trained() -> None:
    def ends(comm: Comm) -> Tensor:
        model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 2))
        optimiser = wrapped(INNER.sgd, model, sparsify.diloco(every=2), comm)
        for _ in range(4):
            optimiser.zero_grad()
            model(torch.arange(5)).square().mean().backward()
            optimiser.step()
        return flat(model)

    first, second = virtual.run(2, ends)
    assert torch.equal(first, second)


def test_of_two_optimisers_that_share_a_layer_the_older_one_is_refused() -> None:
    def body(comm: Comm) -> None:
        first = wrap(comm, sparsify.diloco(every=2))
        step(first, 0, comm.rank)
        layer = torch.optim.SGD(first.model.body.parameters(), lr=0.0)
        sparsify.distribute(layer, first.model, sparsify.diloco(every=2), comm)
        with pytest.raises(
            ValueError, match=r"wrapped anew since.*give each optimiser parameters of its own"
        ):
            step(first, 1, comm.rank)

    virtual.run(1, body)


def test_at_an_anchor_all_optimisers_of_a_model_are_at_theirs() -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        model = net()
        optimisers = [
            sparsify.distribute(
                torch.optim.SGD(part.parameters(), 0.1), model, sparsify.diloco(every=2), comm
            )
            for part in (model.body, model.output)
        ]
        unrelated = wrap(comm, sparsify.diloco(every=9))
        step(unrelated, 0, comm.rank)
        other = evaluate(unrelated)
        for number in range(5):
            model.zero_grad()
            images = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + comm.rank))
            model(images).square().mean().backward()
            for optimiser in optimisers:
                optimiser.step()
        own = flat(model)
        with optimisers[1].at_anchor():
            anchor = flat(model)
            with optimisers[0].at_anchor():
                assert torch.equal(flat(model), anchor)
            with pytest.raises(ValueError, match=r"within `with optimiser\.at_anchor"):
                optimisers[0].step()
            assert torch.equal(evaluate(unrelated), other)
        assert torch.equal(flat(model), own)
        return own, anchor

    (own, anchor), (other_own, other_anchor) = virtual.run(2, body)
    assert torch.equal(anchor, other_anchor)
    assert not torch.equal(own, other_own)


def test_at_the_anchor_a_model_may_be_moved_and_left_in_any_order() -> None:
    def ends(comm: Comm) -> tuple[Tensor, Tensor]:
        found = []
        for is_moved in (False, True):
            own = wrap(comm, sparsify.diloco(every=3))
            for number in range(8):
                step(own, number, comm.rank)
                if is_moved:
                    kept = flat(own.model)
                    first, second = own.optimiser.at_anchor(), own.optimiser.at_anchor()
                    first.__enter__()
                    anchor = evaluate(own)
                    own.model.double().float()  # as to save it elsewhere
                    second.__enter__()
                    first.__exit__(None, None, None)
                    assert torch.equal(evaluate(own), anchor)
                    second.__exit__(None, None, None)
                    assert torch.equal(flat(own.model), kept)
            found.append(flat(own.model))
        return found[0], found[1]

    for plain, moved in virtual.run(2, ends):
        assert torch.equal(plain, moved)


def test_what_would_lose_a_worker_s_steps_is_refused() -> None:
    """The anchor is loaded in the middle of a round; or a saved state where its values would be replaced."""

    def body(comm: Comm) -> None:
        own = wrap(comm, sparsify.diloco(every=3))
        for number in range(4):
            step(own, number, comm.rank)
        with own.optimiser.at_anchor():
            anchor = copy.deepcopy(own.model.state_dict())
            with pytest.raises(ValueError, match="load_state_dict within `with"):
                own.optimiser.load_state_dict({})
        own.model.load_state_dict(anchor)
        with pytest.raises(ValueError, match=r"^body\.weight was loaded or written to"):
            step(own, 4, comm.rank)

    virtual.run(1, body)


def test_the_refusal_names_what_was_written_to() -> None:
    def body(comm: Comm) -> None:
        own = wrap(comm, sparsify.localsgd(every=3))
        step(own, 0, comm.rank)
        own.model.output.weight.data[0, 0] += 1
        with pytest.raises(ValueError, match=r"^output\.weight was loaded or written to"):
            step(own, 1, comm.rank)

    virtual.run(1, body)


def test_outer_steps_of_one_s_own_are_compared_by_their_attributes() -> None:
    def body(comm: Comm) -> str:
        model = net()
        outer = Half()
        outer.lr = 0.5 + 0.1 * comm.rank
        try:
            sparsify.distribute(
                torch.optim.SGD(model.parameters(), 0.1), model, Local(2, sparsify.topk(0.5), outer), comm
            )
        except RuntimeError as error:
            return str(error)
        return "nothing"

    for said in virtual.run(2, body):
        assert "the workers disagree on strategy" in said
        assert "Half(lr=0.6)" in said


class Master(torch.optim.Optimizer):
    """Plain SGD on master weights in double precision, which it copies into the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                master = state.setdefault("master", p.detach().double())
                state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                master.sub_(state["momentum"].double(), alpha=group["lr"])
                p.copy_(master)


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco", "sparseloco"])
def test_master_weights_follow_the_exchange(strategy: str) -> None:
    """Otherwise each worker would go on from its own, as if nothing had been exchanged."""
    own: dict[str, Any] = {"fragments": 2, "delay": 1} if strategy == "streaming_diloco" else {}
    own |= {"density": 0.3} if strategy == "sparseloco" else {}

    def body(comm: Comm, inner: Callable[[Any], torch.optim.Optimizer]) -> Tensor:
        model = net()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimiser = sparsify.distribute(inner(trained), model, sparsify.build(strategy, every=3, **own), comm)
        wrapped_model = Wrapped(model, optimiser.optimiser, optimiser)
        for number in range(14):
            step(wrapped_model, number, comm.rank)
        return flat(model)

    def plain(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    with_master = virtual.run(2, lambda comm: body(comm, lambda params: Master(params, lr=0.05)))
    without = virtual.run(2, lambda comm: body(comm, plain))
    for ours, theirs in zip(with_master, without, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Averaged(torch.optim.SGD):
    """Keeps averages beside the parameters, as optimizers without schedules do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_optimisers_with_weights_of_their_own_are_refused() -> None:
    def body(comm: Comm) -> None:
        model = net()
        with pytest.raises(ValueError, match="Averaged has the modes train and eval"):
            sparsify.distribute(Averaged(model.parameters(), 0.1), model, sparsify.diloco(every=2), comm)

    virtual.run(1, body)


def test_the_density_of_a_round_is_that_of_the_epoch_in_which_its_last_step_was_made() -> None:
    def sent(comm: Comm, every: int, **options: Any) -> list[float]:
        strategy = Local(every, sparsify.topk(1 / 64, density_warmup=[0.5]))
        model = nn.Linear(64, 64)
        optimiser = wrapped(INNER.sgd, model, strategy, comm, **options)
        densities = []
        for number in range(12):
            if not options:
                optimiser.epoch = number // 6
            optimiser.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimiser.step()
            if (number + 1) % every == 0:
                densities.append(round(there(optimiser).sent_density, 2))
        return densities

    for every in (2, 3, 6):
        (counted,) = virtual.run(1, partial(sent, every=every, steps_per_epoch=6))
        (told_epoch,) = virtual.run(1, partial(sent, every=every))
        assert counted == told_epoch == [0.5] * (6 // every) + [0.02] * (6 // every)


def test_a_moment_that_one_worker_lacks_is_refused_by_all() -> None:
    def body(comm: Comm) -> str:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, sparsify.desloc(2, 1, 1), comm)
        for number in range(2):
            optimiser.zero_grad()
            fill(model, comm.rank, number)
            if comm.rank == 1:
                model.get_parameter("2.bias").grad = None
            try:
                optimiser.step()
            except ValueError as error:
                return str(error)
        return "nothing"

    for said in virtual.run(2, body):
        assert "AdamW keeps no 'exp_avg' of 2.bias to be averaged (rank 1)" in said


# --- steps that are not local


class Averaging(torch.optim.SGD):
    """Averages gradients in its step, as optimizers of sharded states do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        return super().step(closure)


@pytest.mark.usefixtures("group_of_one")
def test_an_optimiser_that_communicates_in_its_step_is_refused() -> None:
    model = net()
    trained = [p for p in model.parameters() if p.requires_grad]
    sharing = ZeroRedundancyOptimizer(trained, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer shares the parameters out"):
        sparsify.distribute(sharing, model, sparsify.diloco(every=2))
    inner = Averaging(trained, lr=0.1)
    own = Wrapped(model, inner, sparsify.distribute(inner, model, sparsify.diloco(every=2)))
    with pytest.raises(ValueError, match="Averaging communicates with other workers within its step"):
        step(own, 0, 0)
    plain = torch.optim.SGD(trained, lr=0.1)
    own = Wrapped(model, plain, sparsify.distribute(plain, model, sparsify.diloco(every=2)))
    plain.register_step_post_hook(reduce_something)
    for number in range(4):
        step(own, number, 0)


def reduce_something(*_: Any) -> None:
    """As for a log."""
    dist.all_reduce(torch.ones(1))


# --- states of any optimizer


class SignMomentum(torch.optim.Optimizer):
    """As one writes it oneself: without the defaults that torch's own have."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum.sign(), alpha=group["lr"])


class Half(Outer):
    """An outer step of a user's own, that does not say what it is."""

    lr = 0.5

    def step(self, anchor: Any, drift: Any, state: Any) -> None:
        torch._foreach_add_([*anchor], [*drift], alpha=-self.lr)


INNERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=0.02),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.02),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.02),
    "one's own": SignMomentum,
}
METHODS: dict[str, Any] = {
    "topk": sparsify.topk(0.5),
    "diloco": sparsify.diloco(every=2),
    "own outer step": lambda: Local(2, sparsify.topk(0.5), Half()),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inner", INNERS)
def test_training_resumes_to_the_bit_with_any_inner_optimiser(inner: str, method: str) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        def made(weights: Tensor | None = None) -> tuple[nn.Module, Any]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = nn.Linear(6, 3, bias=False)
            if weights is not None:
                model.load_state_dict({"weight": weights})
            chosen = METHODS[method]
            strategy = chosen() if method == "own outer step" else chosen
            return model, sparsify.distribute(INNERS[inner](model.parameters()), model, strategy, comm)

        def train(model: nn.Module, optimiser: Any, steps: range) -> Tensor:
            for number in steps:
                optimiser.zero_grad()
                fill_of(model, comm.rank, number)
                optimiser.step()
            return flat(model)

        model, optimiser = made()
        train(model, optimiser, range(3))
        saved = copy.deepcopy(optimiser.state_dict())
        weights = model.get_parameter("weight").detach().clone()
        end = train(model, optimiser, range(3, 6))
        ends = []
        for _ in range(2):  # into one that has loaded nothing yet, and again
            model, optimiser = made(weights)
            optimiser.load_state_dict(copy.deepcopy(saved))
            optimiser.load_state_dict(copy.deepcopy(saved))
            ends.append(train(model, optimiser, range(3, 6)))
        assert torch.equal(*ends)
        return end, ends[0]

    for end, resumed in virtual.run(2, body):
        assert torch.equal(end, resumed)


def fill_of(model: nn.Module, rank: int, number: int) -> None:
    draws = torch.Generator().manual_seed(100 * number + rank)
    model(torch.randn(5, 6, generator=draws)).square().mean().backward()


def test_the_state_of_another_kind_of_optimiser_is_still_refused() -> None:
    def body(comm: Comm) -> None:
        states = {}
        for name in ("Muon", "SGD"):
            model = nn.Linear(6, 3, bias=False)
            optimiser = sparsify.distribute(INNERS[name](model.parameters()), model, sparsify.topk(0.5), comm)
            fill_of(model, 0, 0)
            optimiser.step()
            states[name] = optimiser.state_dict()
        with pytest.raises(ValueError, match="is of another optimiser than SGD"):
            optimiser.load_state_dict(states["Muon"])

    virtual.run(1, body)


def test_a_change_of_any_type_is_noticed() -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        model = nn.Linear(5, 5, dtype=dtype)
        guard = ParameterGuard(model, [*model.named_parameters()])
        guard.check(dict)
        model.weight.data[0, 0] += 1
        pair = model.weight.detach(), model.weight.detach() - 1
        with pytest.raises(ValueError, match="weight was loaded or written to"):
            guard.check(partial(dict, weight=pair))


def test_a_scripted_model_is_wrapped() -> None:
    def body(comm: Comm) -> Tensor:
        with pytest.warns(FutureWarning, match=r"torch\.jit\.script"):
            model = torch.jit.script(nn.Linear(6, 3))
        optimiser = wrapped(INNER.sgd, model, sparsify.localsgd(every=1), comm)
        optimiser.zero_grad()
        fill_of(model, comm.rank, 0)
        optimiser.step()
        return flat(model)

    first, second = virtual.run(2, body)
    assert torch.equal(first, second)
