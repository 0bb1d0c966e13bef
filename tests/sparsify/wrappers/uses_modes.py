"""Steps within settings of torch that are not ours: the average of each method, by every way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm
from sparsify.methods import names, per_step_names
from tests.sparsify import laws
from tests.sparsify.wrappers.user_acts import WRAPPERS, Act, Training, weights

Mode = Callable[[], AbstractContextManager[Any]]
STEPS = 4
SHAPES = [(40, 6), (6,), (8, 4), (2,)]  # which two shards divide
SCOPES = ("layer", "global")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast(dtype: torch.dtype) -> Mode:
    return lambda: torch.autocast("cpu", dtype)


PLAIN = "plain"
MODES: Mapping[str, Mode] = {
    PLAIN: nullcontext,
    "default float64": lambda: default_dtype(torch.float64),
    "default float16": lambda: default_dtype(torch.float16),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "autocast bfloat16": autocast(torch.bfloat16),
    "autocast float16": autocast(torch.float16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
}
# In inference torch's own optimizers remember what can't be changed later.
OF_STEPS = [name for name in MODES if name != "inference"]
OF_PROCESSES = (PLAIN, "default float64", "default device", "autocast bfloat16")


class Given(nn.Module):
    """A model whose gradients are given."""

    blocks = ()  # it is one unit of a sharded model

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.ones(shape, dtype=dtype, device="cpu") for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        products = [(p * grad).sum() for p, grad in zip(self.tensors, gradients, strict=True)]
        return torch.stack(products).sum()

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.tensors])


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    own = torch.Generator().manual_seed(100 * step + rank)
    drawn = [torch.randn(shape, generator=own, dtype=torch.float64, device="cpu") for shape in SHAPES]
    return [tensor.to(dtype) for tensor in drawn]


def methods(scopes: tuple[str, ...] = ("layer",)) -> dict[str, Any]:
    """Return every method of every step, by a name."""
    found = {
        f"{name} {scope}": laws.build(name, 0.05, scope) for name in per_step_names() for scope in scopes
    }
    # By default only signs are applied, which hide much.
    found["demo values"] = laws.build("demo", 0.05, "layer", sign=False)
    return found


def strategies() -> dict[str, Any]:
    """Return strategies of local steps, by a name, with every code of values that they offer."""
    found = {}
    for name in names():
        if name not in per_step_names():
            parts = {"fragments": 1} if "fragments" in sparsify.defaults(name) else {}
            found[name] = sparsify.build(name, every=2, **parts)
    for code in ("fp32", "bf16", "int8", "e3m0", "symmetric2", "statistical2"):
        found[f"sparseloco {code}"] = sparsify.build("sparseloco", every=2, code=code)
    return found


def stepped(
    optimizer: Any, model: Given, comm: Comm, mode: Mode = nullcontext, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Give a wrapped optimizer its gradients, and make every second step within the mode."""
    for step in range(STEPS):
        for p, grad in zip(model.tensors, gradients(comm.rank, step, dtype), strict=True):
            p.grad = grad
        with mode() if step % 2 == 0 else nullcontext():
            optimizer.step()
    return model.flat()


def distributed(method: Any, comm: Comm, mode: Mode = nullcontext, **options: Any) -> Tensor:
    """Train with what `distribute` returns; made within the mode, too."""
    model = Given()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with mode():
        optimizer = sparsify.distribute(inner, model, method, comm, **options)
    return stepped(optimizer, model, comm, mode)


WAYS = WRAPPERS
OF_EACH_KIND = ("topk", "powersgd", "qsgd", "demo", "sidco")


def loss_of(called: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = called(gradients(rank, step))
    return loss


def of_processes(comm: Comm, now: Callable[[], float]) -> dict[str, Tensor]:
    """Train in single precision by each wrapper with methods of each kind, within each mode.

    The mode covers wrapping, all backward passes and all steps.
    """
    torch.set_num_threads(1)
    found = dict[str, Tensor]()
    for wrapper in WAYS:
        for name in OF_EACH_KIND if wrapper != "local steps" else OF_EACH_KIND[:1]:
            for mode in OF_PROCESSES:
                act = Act(kind=Given, loss=loss_of, method=name, dtype=torch.float32, mode=MODES[mode])
                training = Training(act, wrapper, comm.rank)
                for step in range(STEPS):
                    training.zero_grad()
                    loss = training.loss(step)
                    with MODES[mode]():
                        loss.backward()
                        training.step()
                end = weights(training.model).values()
                found[f"{wrapper}|{name}|{mode}"] = torch.cat([p.flatten() for p in end])
    return found
