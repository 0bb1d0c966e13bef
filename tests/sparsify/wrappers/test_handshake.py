"""Workers that are not alike: all of them say so, in the same words, before anything is exchanged."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.wrappers.handshake import WorkerMismatch
from tests.sparsify.worker_functions import on_processes, words_of
from tests.sparsify.wrappers.user_acts import AVERAGING, LR, Act, Training, net, whole

ODD = 1  # its rank


class Parts:
    """Arguments of a wrapper."""

    def __init__(self) -> None:
        self.model: Any = net()
        self.kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
        self.optimizer_facts = {"lr": LR}
        self.method = "topk"
        self.of_method: dict[str, Any] = {"density": 0.1, "scope": "layer"}
        self.options: dict[str, Any] = {}
        self.of_ddp: dict[str, Any] = {}

    def wrap(self, wrapper: str, comm: Comm | None) -> object:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.kind(parameters, **self.optimizer_facts)
        if wrapper == "local steps":
            return sparsify.distribute(optimizer, self.model, sparsify.localsgd(every=2), comm)
        method = sparsify.build(self.method, **self.of_method)
        if wrapper == "distribute":
            return sparsify.distribute(optimizer, self.model, method, comm, **self.options)
        ddp = DistributedDataParallel(self.model, **self.of_ddp)
        return sparsify.register(ddp, method, optimizer, **self.options)


def rename(parts: Parts) -> None:
    parts.model.add_module("head", parts.model._modules.pop("output"))


def reorder(parts: Parts) -> None:
    parts.model.add_module("convolution", parts.model._modules.pop("convolution"))


def apply_momentum_twice(parts: Parts) -> None:
    parts.method, parts.of_method = "dgc", {"density": 0.1}
    parts.optimizer_facts["momentum"] = 0.9


def option(**options: Any) -> Callable[[Parts], object]:
    return lambda parts: parts.options.update(options)


class Difference(NamedTuple):
    """Oddity of one worker, and the sentence that all workers read.

    What DDP itself refuses is not tried with DDP.
    """

    change: Callable[[Parts], object]
    sentence: str
    wrappers: tuple[str, ...] = ("distribute", "register")


WHOLE = ("distribute", "local steps")
CONVOLUTION = "(4, 2, 2, 2) torch.float64 on cpu, trained"
DIFFERENCES: dict[str, Difference] = {
    "shape": Difference(
        lambda parts: setattr(parts.model, "output", nn.Linear(16, 4).double()),
        "parameter output.weight: ranks [0, 2] have (3, 16) torch.float64 on cpu, trained; ranks [1] have "
        "(4, 16)",
        WHOLE,
    ),
    "order": Difference(
        reorder,
        "on the order; in one place: ranks [0, 2] have parameter convolution.weight; ranks [1] have "
        "parameter output.weight",
        WHOLE,
    ),
    "one more": Difference(
        lambda parts: setattr(parts.model, "more", nn.Linear(2, 2).double()),
        "parameter more.weight: ranks [0, 2] have none; ranks [1] have (2, 2)",
        WHOLE,
    ),
    "frozen": Difference(
        lambda parts: parts.model.convolution.bias.requires_grad_(False),
        "parameter convolution.bias: ranks [0, 2] have (4,) torch.float64 on cpu, trained; ranks [1] have "
        "(4,) torch.float64 on cpu.",
        WHOLE,
    ),
    "buffer": Difference(
        lambda parts: parts.model.register_buffer("calls", torch.zeros(2), persistent=False),
        "buffer calls: ranks [0, 2] have (1,)",
        WHOLE,
    ),
    "strides": Difference(
        lambda parts: parts.model.to(memory_format=torch.channels_last),
        f"parameter convolution.weight: ranks [0, 2] have {CONVOLUTION}; ranks [1] have {CONVOLUTION}, with "
        "strides (8, 1, 4, 2)",
        (*WHOLE, "register"),
    ),
    "shared memory": Difference(
        lambda parts: setattr(parts.model.output.bias, "data", torch.zeros(1, dtype=torch.float64).expand(3)),
        "parameter output.bias: ranks [0, 2] have (3,) torch.float64 on cpu, trained; ranks [1] have (3,) "
        "torch.float64 on cpu, in memory that its elements share, trained",
        WHOLE,
    ),
    "type": Difference(  # of the same size, or DDP itself comes to grief
        lambda parts: parts.model.half(),
        "parameter convolution.weight: ranks [0, 2] have (4, 2, 2, 2) torch.bfloat16 on cpu, trained; ranks "
        "[1] have (4, 2, 2, 2) torch.float16",
    ),
    "name": Difference(
        rename,
        "parameter output.weight: ranks [0, 2] have (3, 16) torch.float64 on cpu, trained; ranks [1] have "
        "none",
    ),
    "method": Difference(
        lambda parts: setattr(parts, "method", "randomk"),
        "on method: ranks [0, 2] have ... select=TopK(), ",
    ),
    "density": Difference(
        lambda parts: parts.of_method.update(density=0.2),
        "on method: ranks [0, 2] have Sparsifier(density=0.1, ...; ranks [1] have ",
    ),
    "seed": Difference(option(seed=7), "on seed: ranks [0, 2] have 0; ranks [1] have 7"),
    "check": Difference(option(check=False), "on check: ranks [0, 2] have True; ranks [1] have False"),
    "overlap": Difference(option(overlap=True), "on overlap: ranks [0, 2] have False; ranks [1] have True"),
    "epochs": Difference(
        option(steps_per_epoch=3), "on steps_per_epoch: ranks [0, 2] have None; ranks [1] have 3"
    ),
    "rate": Difference(
        lambda parts: parts.optimizer_facts.update(lr=1.0),
        "on lr of group 0: ranks [0, 2] have 0.05; ranks [1] have 1.0",
    ),
    "optimizer": Difference(
        lambda parts: setattr(parts, "kind", torch.optim.Adam),
        "on optimizer: ranks [0, 2] have SGD; ranks [1] have Adam",
    ),
    "refused on one": Difference(
        apply_momentum_twice,
        "wrapped: ranks [0, 2] have yes; ranks [1] have no: the method applies momentum itself, and the",
    ),
}


def told(case: str, wrapper: str, comm: Comm, is_simulated: bool = True) -> str:
    """Return what this worker is told where one is odd."""
    parts = Parts()
    if case == "type":
        parts.model.bfloat16()
    if case == "strides":
        parts.of_ddp["init_sync"] = False  # else DDP itself refuses it
    if comm.rank == ODD:
        DIFFERENCES[case].change(parts)
    return words_of(lambda: parts.wrap(wrapper, comm if is_simulated else None))


def told_in_a_step(wrapper: str, rank: int, freezes: bool = False) -> str:
    """Return what this worker is told with `debug`, where one is odd in the second step."""
    training = Training(Act(options={"debug": True}), wrapper, rank)
    training.advance(0)
    if rank == ODD and freezes:
        training.model.convolution.bias.requires_grad_(False)
    elif rank == ODD:
        training.optimizers[0].param_groups[0]["lr"] = 0.01
    return words_of(lambda: training.advance(1))


def be_told(comm: Comm, now: Callable[[], float]) -> dict[str, str]:
    """Return what this worker is told in every case, by case and wrapper."""
    torch.set_num_threads(1)
    found = {}
    for case, difference in DIFFERENCES.items():
        for wrapper in difference.wrappers:
            found[f"{case}|{wrapper}"] = told(case, wrapper, comm, is_simulated=False)
    for wrapper in AVERAGING:
        found[f"a step|{wrapper}"] = told_in_a_step(wrapper, comm.rank)
    found["a step|frozen"] = told_in_a_step("distribute", comm.rank, freezes=True)
    return found


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return what three gloo processes are told, by rank."""
    return on_processes(be_told, 3, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("case", DIFFERENCES)
def test_all_workers_raise_the_same_words(case: str, heard: list[dict[str, str]]) -> None:
    """As processes, and as virtual ranks."""
    _, sentence, wrappers = DIFFERENCES[case]
    for wrapper in wrappers:
        groups = [[words[f"{case}|{wrapper}"] for words in heard]]
        if wrapper != "register" and case != "overlap":  # which virtual ranks can't, and refuse by themselves
            groups.append(virtual.run(3, partial(told, case, wrapper)))
        for first, *others in groups:
            assert sentence in first, wrapper
            assert first.startswith("WorkerMismatch: the workers disagree on ")
            same = "Give every worker the same model, optimizer, method and options"
            assert first.endswith(f"{same}, and call the same, equally often")
            assert others == [first, first]


def test_with_debug_each_step_compares_anew(heard: list[dict[str, str]]) -> None:
    for name in (name for name in heard[0] if name.startswith("a step")):
        first, *others = (words[name] for words in heard)
        sentence = "the workers disagree on lr of group 0: ranks [0, 2] have 0.05; ranks [1] have 0.01"
        if name.endswith("frozen"):
            sentence = (
                "convolution.bias: ranks [0, 2] have (4,) torch.float64 on cpu, trained; ranks [1] have"
            )
        assert sentence in first, name
        assert others == [first, first]


def test_what_all_refuse_is_refused_as_ever() -> None:
    def body(comm: Comm) -> None:
        parts = Parts()
        apply_momentum_twice(parts)
        parts.wrap("distribute", comm)

    with pytest.raises(ValueError, match=r"^the method applies momentum itself"):
        virtual.run(2, body)


# Shapes, the strides that two workers have, and how these differ: the same order in memory, up to what says
# nothing of it; gaps; or another order.
STRIDES = """
    4 1 3 3      9 9 3 1       9 1 3 1        alike
    4 3 1 1      3 1 1 1       3 1 3 3        alike
    1 3 2 2      12 1 6 3      1 1 6 3        alike
    1 5          5 1           1 1            alike
    1 1          1 1           7 3            alike
    0 3          3 1           1 9            alike
    2 0 3        0 3 1         3 3 2          alike
    3 2          2 1           8 4            gaps
    3 2          2 1           1 5            gaps
    4 3 2 2      12 4 2 1      12 1 6 3       differ
    3 5          5 1           1 3            differ
    2 3 4        12 4 1        12 1 3         differ
    2 3 4        1 2 6         12 1 3         differ
    2 2 2 2 2    16 8 4 2 1    16 1 8 4 2     differ
"""
METHODS: dict[str, Any] = {
    "dense": sparsify.dense(),
    "topk": sparsify.topk(density=1.0),
    "localsgd": sparsify.localsgd(every=1),
}


def averaged(shape: tuple[int, ...], strides: Any, method: Any) -> list[Tensor]:
    """Return each worker's weights after a step, for which all have the same gradient."""

    def body(comm: Comm) -> Tensor:
        strided = torch.empty_strided(shape, strides[comm.rank], dtype=torch.float64)
        strided.copy_(torch.arange(strided.numel()).view(shape))  # wherever they lie
        model = nn.ParameterList([strided, torch.ones(2, dtype=torch.float64)])
        optimizer = sparsify.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, method, comm)
        for p in model:
            p.grad = torch.full_like(p, 3.0)
            p.grad += p.detach()
        optimizer.step()
        return whole(model[0])

    return virtual.run(2, body)


@pytest.mark.parametrize("row", STRIDES.strip().splitlines())
def test_strides_differ_only_where_they_tell_another_order(row: str) -> None:
    *numbers, kind = re.split(r"\s{2,}", row.strip())
    shape, *strides = [tuple(map(int, number.split())) for number in numbers]
    for name, method in METHODS.items():
        refusal = r"parameter 0: .* with strides \(" if kind == "differ" else ""
        if kind == "gaps" and name == "localsgd":
            refusal = "gaps, or elements that share memory"
        if refusal:
            with pytest.raises(WorkerMismatch, match=refusal):
                averaged(shape, strides, method)
            continue
        for weights in averaged(shape, strides, method):
            assert torch.equal(weights, torch.full(shape, -3.0, dtype=torch.float64))
