"""Changes of a model between local steps: those that must be refused, and those that must change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import sparsify
from sparsify.local.local_optimizer import LocalOptimizer
from sparsify.local.strategy import LocalSteps
from tests.sparsify.worker_functions import words_of

EVERY, BEFORE, STEPS = 3, 5, 10  # steps of a round, before the change (an exchange follows), in all


class Net(nn.Module):
    """Two layers that are trained, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.output, self.frozen = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.frozen(self.output(self.body(x).tanh()))
        return scores


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


class Wrapped(NamedTuple):
    """A model, its inner optimizer, and what local steps are made with."""

    model: Any
    inner: torch.optim.Optimizer
    optimizer: LocalOptimizer


Wrap = Callable[[LocalSteps], Wrapped]  # anew, in one of the ways that there are


def step(wrapped: Wrapped, number: int, rank: int) -> None:
    draws = torch.Generator().manual_seed(100 * number + rank)
    images = torch.randn(8, 6, generator=draws)
    wrapped.optimizer.zero_grad()
    wrapped.model(images.to(next(wrapped.model.parameters()).dtype)).square().mean().backward()
    wrapped.optimizer.step()


# --- refused


def load_others(wrapped: Wrapped, load: Callable[[nn.Module, dict[str, Any]], object]) -> None:
    """Load other weights, but for those that are frozen."""
    state = {
        name: tensor if name.startswith("frozen") else torch.randn_like(tensor)
        for name, tensor in wrapped.model.state_dict().items()
    }
    load(wrapped.model, state)


def load_at_anchor(wrapped: Wrapped) -> None:
    with wrapped.optimizer.at_anchor():
        load_others(wrapped, nn.Module.load_state_dict)


def load_and(act: Callable[[Wrapped], object]) -> Callable[[Wrapped], object]:
    def load_and_act(wrapped: Wrapped) -> None:
        load_others(wrapped, nn.Module.load_state_dict)
        act(wrapped)

    return load_and_act


def load_anchor(wrapped: Wrapped) -> None:
    """Lose the steps of a round, of a worker that goes on."""
    with wrapped.optimizer.at_anchor():
        anchor = copy.deepcopy(wrapped.model.state_dict())
    wrapped.model.load_state_dict(anchor)


@torch.no_grad()
def write(wrapped: Wrapped) -> None:
    wrapped.model.body.weight.mul_(2)


def take_other_memory(wrapped: Wrapped) -> None:
    for p in wrapped.model.parameters():
        p.data = 2 * p.data


def lie_otherwise(wrapped: Wrapped) -> None:
    weight = wrapped.model.body.weight
    weight.data = weight.data.t().contiguous().t()


OTHERS = "the model has other parameters than when it was wrapped, such as body."
WROTE = "was loaded or written to after the model was wrapped"
EARLIER = "Load weights before sparsify.distribute or sparsify.shard"
REFUSED: Mapping[str, tuple[Callable[[Wrapped], object], str]] = {
    "stepped by itself": (lambda wrapped: wrapped.inner.step(), "its own step would not average"),
    "loaded": (lambda wrapped: load_others(wrapped, nn.Module.load_state_dict), f"body.weight {WROTE}"),
    "loaded, and at the anchor": (load_and(load_anchor), WROTE),
    "loaded, and a batch left out": (load_and(lambda wrapped: wrapped.optimizer.skip()), WROTE),
    "loaded, and exchanged": (load_and(lambda wrapped: wrapped.optimizer.exchange_if_due()), WROTE),
    "loaded, and saved": (load_and(lambda wrapped: wrapped.optimizer.state_dict()), WROTE),
    "loaded at the anchor": (load_at_anchor, "was loaded or written to within `with optimizer.at_anchor():`"),
    "assigned": (
        lambda wrapped: load_others(wrapped, partial(nn.Module.load_state_dict, assign=True)),
        OTHERS,
    ),
    "replaced": (lambda wrapped: setattr(wrapped.model, "body", nn.Linear(6, 6)), OTHERS),
    "loaded from the anchor": (load_anchor, f"body.weight {WROTE}"),
    "set": (lambda wrapped: load_others(wrapped, set_model_state_dict), WROTE),
    "written to": (write, EARLIER),
    "written to by data": (lambda wrapped: wrapped.model.output.bias.data.add_(1), f"output.bias {WROTE}"),
    "given other memory": (take_other_memory, WROTE),
    "given a group": (
        lambda wrapped: wrapped.inner.add_param_group({"params": [*nn.Linear(2, 2).parameters()]}),
        "the optimizer has other parameters than when it was wrapped",
    ),
    "converted": (lambda wrapped: wrapped.model.bfloat16(), "and is now"),
    "laid out otherwise": (lie_otherwise, "strides (1, 6)"),
    "unfrozen": (
        lambda wrapped: wrapped.model.frozen.requires_grad_(True),
        "was frozen when its optimizer was wrapped, and is trained now",
    ),
    "frozen": (lambda wrapped: wrapped.model.body.requires_grad_(False), "and is now"),
}


# --- changes nothing


def load_again(wrapped: Wrapped) -> None:
    wrapped.model.load_state_dict(copy.deepcopy(wrapped.model.state_dict()))


def move(wrapped: Wrapped) -> None:
    for p in wrapped.model.parameters():
        p.data = p.data.clone()


def swap(wrapped: Wrapped) -> None:
    """As for an evaluation of averaged weights."""
    parameters = [*wrapped.model.parameters()]
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.zero_()
        evaluate(wrapped)
        for p, own in zip(parameters, kept, strict=True):
            p.copy_(own)
    for module in wrapped.model.modules():
        if hasattr(module, "reshard"):  # as FSDP2 asks for after writing
            module.reshard()


def evaluate(wrapped: Wrapped) -> Tensor:
    with torch.no_grad():
        loss: Tensor = wrapped.model(torch.ones(2, 6)).square().mean()
    return loss


def evaluate_anchor(wrapped: Wrapped) -> None:
    """Before and after an evaluation of this worker's own parameters, and within another."""
    with wrapped.optimizer.at_anchor():
        before = evaluate(wrapped)
    evaluate(wrapped)
    with wrapped.optimizer.at_anchor(), wrapped.optimizer.at_anchor():
        assert torch.equal(evaluate(wrapped), before)
    assert not torch.equal(evaluate(wrapped), before)


def leave_anchor_in_any_order(wrapped: Wrapped) -> None:
    """And move the model there, as to save it elsewhere."""
    first, second = wrapped.optimizer.at_anchor(), wrapped.optimizer.at_anchor()
    first.__enter__()
    anchor = evaluate(wrapped)
    move(wrapped)
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(evaluate(wrapped), anchor)
    second.__exit__(None, None, None)


def resume(wrapped: Wrapped) -> None:
    saved = copy.deepcopy(wrapped.optimizer.state_dict())
    weights = copy.deepcopy(wrapped.model.state_dict())
    evaluate(wrapped)
    wrapped.optimizer.load_state_dict(saved)
    wrapped.model.load_state_dict(weights)


def load_others_and_resume(wrapped: Wrapped) -> None:
    """Load the state after the model: its parameters are the worker's own."""
    saved = copy.deepcopy(wrapped.optimizer.state_dict())
    load_others(wrapped, nn.Module.load_state_dict)
    wrapped.optimizer.load_state_dict(saved)


NEUTRAL_OF_WHOLE: Mapping[str, Callable[[Wrapped], object]] = {
    "left the anchor in any order": leave_anchor_in_any_order,  # torch does not move shards
}
NEUTRAL: Mapping[str, Callable[[Wrapped], object]] = {
    "nothing": lambda wrapped: None,
    "loaded again": load_again,
    "moved": move,
    "swapped and put back": swap,
    "evaluated": evaluate,
    "evaluated at the anchor": evaluate_anchor,
    "resumed": resume,
    "loaded, and then resumed": load_others_and_resume,
}


def weights(wrapped: Wrapped) -> Tensor:
    """All of the anchor, whole, one after the other."""
    with wrapped.optimizer.at_anchor():
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in wrapped.model.parameters()]
        return torch.cat([p.detach().flatten() for p in whole]).clone()


def lived(
    wrap: Wrap, rank: int, change: Callable[[Wrapped], object], strategy: LocalSteps | None = None
) -> Tensor:
    """Return the anchor at the end of a training, with a change in the middle of a round."""
    wrapped = wrap(strategy or sparsify.diloco(every=EVERY))
    train(wrapped, rank, change, STEPS)
    return weights(wrapped)


def train(wrapped: Wrapped, rank: int, change: Callable[[Wrapped], object], steps: int) -> None:
    for number in range(steps):
        if number == BEFORE:
            change(wrapped)
        step(wrapped, number, rank)


def told(wrap: Wrap, rank: int, change: Callable[[Wrapped], object]) -> str:
    """Return the sentence with which a change is refused, at the latest in the next step."""
    return words_of(lambda: train(wrap(sparsify.diloco(every=EVERY)), rank, change, BEFORE + 1))
