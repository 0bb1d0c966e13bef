"""Guards of local steps of whole models, and of what is loaded or saved in the wrong place.

Nothing that was trained is undone in silence. Those of shards are among the uses of sharded models.
"""

from __future__ import annotations

import copy
import pickle
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
from sparsify.local.strategy import LocalSteps, OuterStep
from sparsify.method import Method
from sparsify.wrappers.saved_states import StateMismatch
from tests.conftest import there
from tests.sparsify.local.rounds import INNER, MakeInner, Worker, fill, flat, model_of, step_randomly, wrapped
from tests.sparsify.local.uses_guards import NEUTRAL, NEUTRAL_OF_WHOLE, REFUSED, Wrapped, lived, net, told

EVERY_2 = sparsify.diloco(every=2)


def wrap(comm: Comm, strategy: LocalSteps, dtype: torch.dtype = torch.float32) -> Wrapped:
    model = net().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return Wrapped(model, inner, sparsify.distribute(inner, model, strategy, comm))


def test_what_an_exchange_would_undo_is_refused() -> None:
    def body(comm: Comm) -> None:
        for case, (change, sentence) in REFUSED.items():
            assert sentence in told(partial(wrap, comm), comm.rank, change), case
        for dtype in (torch.bfloat16, torch.float64):
            change, sentence = REFUSED["written to by data"]
            assert sentence in told(partial(wrap, comm, dtype=dtype), comm.rank, change)

    virtual.run(1, body)


def test_what_changes_no_weights_changes_no_training() -> None:
    def body(comm: Comm) -> None:
        changes = {**NEUTRAL, **NEUTRAL_OF_WHOLE}
        ends = {case: lived(partial(wrap, comm), comm.rank, change) for case, change in changes.items()}
        for case, end in ends.items():
            assert torch.equal(end, ends["nothing"]), case

    virtual.run(2, body)


def test_weights_that_each_step_clips_in_a_hook_count_as_its_own() -> None:
    def body(comm: Comm) -> None:
        worker = Worker(sparsify.localsgd(every=2), comm)

        @torch.no_grad()
        def clip(*_: Any) -> None:
            for p in worker.model.parameters():
                p.clamp_(-0.1, 0.1)

        worker.optimizer.register_step_post_hook(clip)
        worker.train(4)
        for p in worker.model.parameters():
            assert 0 < p.abs().max() <= 0.1 + 1e-7

    virtual.run(2, body)


def test_embeddings_that_limit_their_norms_in_the_forward_pass_are_trained() -> None:
    def body(comm: Comm) -> Tensor:
        model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 2))
        optimizer = wrapped(INNER.sgd, model, EVERY_2, comm)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.arange(5)).square().mean().backward()
            with optimizer.at_anchor():
                model(torch.arange(5))
            optimizer.step()
        trained = flat(model)
        nn.init.constant_(model.get_parameter("0.weight"), 0.1)
        with pytest.raises(ValueError, match=r"0\.weight was loaded"):
            optimizer.step()
        return trained

    assert torch.equal(*virtual.run(2, body))


def test_of_two_optimizers_that_share_a_layer_the_older_one_is_refused() -> None:
    def body(comm: Comm) -> None:
        first = Worker(EVERY_2, comm)
        first.train(1)
        layer = INNER.sgd([*first.model.get_submodule("0").parameters()])
        sparsify.distribute(layer, first.model, EVERY_2, comm)
        with pytest.raises(
            ValueError, match=r"wrapped anew since.*give each optimizer parameters of its own"
        ):
            first.train(2)

    virtual.run(1, body)


def part_of(kind: str, model: nn.Module, name: str) -> nn.Module:
    """Return what one optimizer of a model is wrapped with, that has the parameters of a layer."""
    layer = model.get_submodule(name)
    parts = {"list": nn.ModuleList([layer]), "parameters": nn.ParameterList(layer.parameters())}
    return {**parts, "layer": layer, "model": model}[kind]


@pytest.mark.parametrize("kind", ["model", "layer", "list", "parameters"])
def test_at_an_anchor_all_optimizers_of_a_model_are_at_theirs(kind: str) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        model = model_of()
        optimizers = [
            sparsify.distribute(
                INNER.sgd([*model.get_submodule(name).parameters()]),
                part_of(kind, model, name),
                EVERY_2,
                comm,
            )
            for name in ("0", "2")
        ]
        for step in range(5):
            model.zero_grad()
            fill(model, comm.rank, step)
            for optimizer in optimizers:
                optimizer.step()
        own = flat(model)
        with optimizers[1].at_anchor():
            anchor = flat(model)
            with optimizers[0].at_anchor():
                assert torch.equal(flat(model), anchor)
            with pytest.raises(ValueError, match=r"within `with optimizer\.at_anchor"):
                optimizers[0].step()
        assert torch.equal(flat(model), own)
        return own, anchor

    (own, anchor), (other_own, other_anchor) = virtual.run(2, body)
    assert torch.equal(anchor, other_anchor)
    assert not torch.equal(own, other_own)


@pytest.mark.parametrize("second", [EVERY_2, sparsify.topk(0.5)], ids=["local", "every step"])
def test_who_is_wrapped_in_mid_round_leaves_the_others_values_as_they_are(
    second: Method | LocalSteps,
) -> None:
    def body(comm: Comm) -> Tensor:
        model = model_of()
        layers = [INNER.sgd([*model.get_submodule(name).parameters()]) for name in ("0", "2")]
        first: Any = sparsify.distribute(layers[0], model, EVERY_2, comm)
        fill(model, comm.rank, 0)
        first.step()
        own = flat(model)
        wrap_any: Any = sparsify.distribute
        wrap_any(layers[1], model, second, comm)
        assert torch.equal(flat(model), own)
        with first.at_anchor():
            again = sparsify.distribute(layers[0], model, EVERY_2, comm)
            anchor = flat(model)
        assert torch.equal(flat(model), anchor)
        again.step()
        return own

    own, other_own = virtual.run(2, body)
    assert not torch.equal(own, other_own)


class Half(OuterStep):
    """An outer step of a user's own, that does not say what it is."""

    lr = 0.5

    def step(self, anchor: Any, drift: Any, state: Any) -> None:
        torch._foreach_add_([*anchor], [*drift], alpha=-self.lr)


def test_outer_steps_of_one_s_own_are_compared_by_their_attributes() -> None:
    def body(comm: Comm) -> None:
        outer = Half()
        outer.lr = 0.5 + 0.1 * comm.rank
        with pytest.raises(RuntimeError, match=r"the workers disagree on strategy.*Half\(lr=0.6\)"):
            Worker(LocalSteps(2, sparsify.topk(0.5), outer), comm)

    virtual.run(2, body)


class Master(torch.optim.Optimizer):
    """SGD on master weights in double precision, which it copies into the parameters.

    It lacks the defaults that torch's own optimizers have.
    """

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


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("diloco", {}),
        ("streaming_diloco", {"fragments": 2, "delay": 1}),
        ("sparseloco", {"density": 0.3}),
    ],
)
def test_master_weights_follow_the_exchange(strategy: str, own: dict[str, Any]) -> None:
    """Otherwise each worker would go on from its own, as if nothing had been exchanged."""

    def body(comm: Comm, inner: MakeInner) -> Tensor:
        built = sparsify.build(strategy, every=3, **own)
        worker = Worker(built, comm, inner, model_of(dtype=torch.float32))
        worker.train(14)
        return worker.own()

    with_master = virtual.run(2, lambda comm: body(comm, lambda params: Master(params, lr=0.05)))
    without = virtual.run(2, lambda comm: body(comm, INNER.momentum))
    torch.testing.assert_close(with_master, without, rtol=1e-4, atol=1e-5)


def test_an_average_that_is_due_when_training_resumes_reaches_master_weights() -> None:
    def body(comm: Comm) -> None:
        strategy = sparsify.build("streaming_diloco", every=3, fragments=2, delay=1)

        def make_inner(params: Any) -> Master:
            return Master(params, lr=0.05)

        worker = Worker(strategy, comm, make_inner)
        saved = []
        for stop in range(1, 7):
            worker.train(stop)
            saved.append(copy.deepcopy(worker.optimizer.state_dict()))
        worker.train(12)
        for state in saved:
            resumed = Worker(strategy, comm, make_inner, model_of(seed=7))
            resumed.optimizer.load_state_dict(state)
            resumed.train(12)
            assert torch.equal(resumed.own(), worker.own()), state["local"]["step"]

    virtual.run(2, body)


class Averaged(torch.optim.SGD):
    """Keeps averages beside the parameters, as optimizers without schedules do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Averaging(torch.optim.SGD):
    """Averages gradients in its step, as optimizers of sharded states do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        return super().step(closure)


@pytest.mark.usefixtures("group_of_one")
def test_optimizers_that_keep_other_weights_or_communicate_in_their_steps_are_refused() -> None:
    def worker_of(make: Any, **options: Any) -> Worker:
        return Worker(EVERY_2, None, lambda params: make(params, lr=0.1, **options))

    with pytest.raises(ValueError, match="Averaged has the modes train and eval"):
        worker_of(Averaged)
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer shares the parameters out"):
        worker_of(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
    with pytest.raises(ValueError, match="Averaging communicates with other workers within its step"):
        worker_of(Averaging).train(1)
    plain = worker_of(torch.optim.SGD)
    plain.optimizer.inner_optimizer.register_step_post_hook(reduce_something)
    plain.train(4)


def reduce_something(*_: Any) -> None:
    """Communicate as for a log."""
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("every", [2, 3, 6])
def test_the_density_of_a_round_is_that_of_the_epoch_in_which_its_last_step_was_made(every: int) -> None:
    def body(comm: Comm, **options: Any) -> list[float]:
        strategy = LocalSteps(every, sparsify.topk(1 / 64, density_warmup=[0.5]))
        model = nn.Linear(64, 64)
        optimizer = wrapped(INNER.sgd, model, strategy, comm, **options)
        densities = []
        for number in range(12):
            if not options:
                optimizer.epoch = number // 6
            step_randomly(model, optimizer)
            densities.append(round(there(optimizer.last_report).sent_density, 2))
        return densities[every - 1 :: every]

    expected = [0.5] * (6 // every) + [0.02] * (6 // every)
    assert virtual.run(1, partial(body, steps_per_epoch=6)) == virtual.run(1, body) == [expected]


# --- states of any optimizer


INNERS: dict[str, MakeInner] = {
    "SGD": INNER.momentum,
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.02),
    "one's own": partial(Master, lr=0.02),
}
METHODS: list[Method | LocalSteps] = [sparsify.topk(0.5), EVERY_2, LocalSteps(2, sparsify.topk(0.5), Half())]


def of_a_matrix(inner: str, method: Method | LocalSteps, comm: Comm) -> Worker:
    return Worker(method, comm, INNERS[inner], nn.Linear(6, 3, bias=False, dtype=torch.float64))


@pytest.mark.parametrize("inner", INNERS)
def test_training_resumes_to_the_bit_with_any_inner_optimizer(inner: str) -> None:
    def body(comm: Comm, method: Method | LocalSteps) -> None:
        first = of_a_matrix(inner, method, comm)
        first.train(3)
        saved = copy.deepcopy(first.optimizer.state_dict())
        weights = copy.deepcopy(first.model.state_dict())
        first.train(6)
        for num_loads in (1, 2):
            again = of_a_matrix(inner, method, comm)
            again.model.load_state_dict(weights)
            for _ in range(num_loads):
                again.optimizer.load_state_dict(copy.deepcopy(saved))
            again.train(6)
            assert torch.equal(again.own(), first.own())

    for method in METHODS:
        virtual.run(2, partial(body, method=method))


def test_a_scripted_model_is_wrapped() -> None:
    def body(comm: Comm) -> Tensor:
        with pytest.warns(FutureWarning, match=r"torch\.jit\.script"):
            model: Any = torch.jit.script(model_of())
        worker = Worker(sparsify.localsgd(every=1), comm, model=model)
        worker.train(1)
        return worker.own()

    assert torch.equal(*virtual.run(2, body))


DILOCO = sparsify.diloco(every=3)


def test_a_saved_state_loaded_into_the_inner_optimizer_before_it_is_wrapped_is_refused() -> None:
    def body(comm: Comm, method: LocalSteps | Method) -> None:
        worker = Worker(method, comm)
        worker.train(2)
        saved = copy.deepcopy(worker.optimizer.state_dict())
        other = model_of()
        inner = INNER.adamw([*other.parameters()])
        groups = [set(group) for group in inner.param_groups]
        inner.load_state_dict(copy.deepcopy(saved))
        with pytest.raises(ValueError, match=r"load it into what sparsify\.distribute returns"):
            Worker(method, comm, lambda _: inner, other)

        again = Worker(method, comm).optimizer
        again.load_state_dict(copy.deepcopy(saved))
        # As the documentation says: what was owed is lost.
        again.inner_optimizer.load_state_dict(copy.deepcopy(saved))
        assert [set(group) for group in again.param_groups] == groups

    for method in (DILOCO, sparsify.topk(0.5)):
        virtual.run(1, partial(body, method=method))


def test_within_the_anchor_nothing_is_stepped_exchanged_saved_or_loaded() -> None:
    def body(comm: Comm) -> None:
        worker = Worker(DILOCO, comm)
        worker.train(2)
        own = worker.own()
        optimizer = worker.optimizer
        calls: list[Callable[[], object]] = [
            optimizer.step,
            optimizer.exchange_if_due,
            optimizer.state_dict,
            optimizer.worker_state_dict,
            lambda: optimizer.load_state_dict({}),
        ]
        with optimizer.at_anchor():
            for call in calls:
                with pytest.raises(ValueError, match=r"within `with optimizer\.at_anchor\(\):`.*outside"):
                    call()
        assert torch.equal(worker.own(), own)
        assert optimizer.steps == 2
        with pytest.raises(ValueError, match="written to within"), optimizer.at_anchor():
            worker.model.load_state_dict(model_of(seed=1).state_dict())
        assert torch.equal(worker.own(), own)
        worker.train(4)

    virtual.run(1, body)


def test_a_copied_or_saved_model_is_nobody_s() -> None:
    def body(comm: Comm) -> None:
        worker = Worker(DILOCO, comm)
        worker.train(2)
        for other in (copy.deepcopy(worker.model), pickle.loads(pickle.dumps(worker.model))):
            other.load_state_dict(model_of(seed=1).state_dict())
        worker.train(4)

    virtual.run(1, body)


def test_states_of_local_steps_are_for_as_many_workers_each_its_own() -> None:
    states = virtual.run(2, lambda comm: Worker(DILOCO, comm).optimizer.state_dict())
    assert sparsify.redistribute(states, 2) == states
    with pytest.raises(StateMismatch, match="for 3 begin anew from the anchor"):
        sparsify.redistribute(states, 3)
    with pytest.raises(StateMismatch, match=r"load the anchor.*into the model before it is wrapped"):
        virtual.run(2, lambda comm: Worker(DILOCO, comm).optimizer.load_state_dict(states[0]))
