"""Workers that are not alike: all of them say so, in the same words, before anything is exchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsify.comm import virtual
from sparsify.doors.handshake import Disagreement
from tests.sparsify import worker_functions
from tests.sparsify.doors import uses, uses_odd
from tests.sparsify.worker_functions import on_processes


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What three gloo processes are told in each case, by rank."""
    return on_processes(worker_functions.odd_workers, 3, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("case", uses_odd.CASES)
def test_all_processes_raise_the_same_words(case: str, told: list[dict[str, Tensor]]) -> None:
    first, *others = (bytes(found[case].tolist()).decode() for found in told)
    assert uses_odd.CASES[case][1] in first
    assert first.startswith("the workers disagree on ")
    assert first.endswith("Give every worker the same model, optimiser, method and options, "
                          "and call the same, equally often")  # fmt: skip
    assert others == [first, first]


def test_with_debug_each_step_under_ddp_compares_anew(told: list[dict[str, Tensor]]) -> None:
    first, *others = (bytes(found["a step"].tolist()).decode() for found in told)
    assert (
        "step 1: the workers disagree on lr of group 0: ranks [0, 2] have 0.05; ranks [1] have 0.01" in first
    )
    assert others == [first, first]


@pytest.mark.parametrize("case", [case for case in uses_odd.CASES if case.startswith("distribute")])
def test_so_do_virtual_ranks(case: str) -> None:
    first, *others = virtual.run(3, lambda comm: uses_odd.told(case, comm.rank, comm))
    if case == "distribute overlap":  # which they can't, and refuse by themselves
        return
    assert uses_odd.CASES[case][1] in first
    assert others == [first, first]


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        ("freezes", r"convolution.bias: ranks \[0\] have .*, trained; ranks \[1\] have .* on cpu\. "),
        ("slower", r"on lr of group 0: ranks \[0\] have 0.05; ranks \[1\] have 0.01"),
    ],
)  # fmt: skip
def test_with_debug_each_step_compares_anew(odd: str, sentence: str) -> None:
    def body(comm: virtual.VirtualComm) -> None:
        parts = uses_odd.Parts(options={"debug": True})
        optimiser = parts.wrap("distribute", comm)
        assert isinstance(optimiser, torch.optim.Optimizer)
        for at in range(2):
            optimiser.zero_grad()
            uses.loss_of(parts.model, comm.rank, at).backward()
            optimiser.step()
            if comm.rank == 1 and odd == "freezes":
                uses_odd.frozen(parts)
            if comm.rank == 1 and odd == "slower":
                optimiser.param_groups[0]["lr"] = 0.01

    with pytest.raises(Disagreement, match=sentence):
        virtual.run(2, body)


def test_what_all_refuse_is_refused_as_ever() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        parts = uses_odd.Parts()
        uses_odd.momentum_twice(parts)
        parts.wrap("distribute", comm)

    with pytest.raises(ValueError, match=r"^the method applies momentum itself"):
        virtual.run(2, body)
