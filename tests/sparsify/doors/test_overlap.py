"""Aggregation while backpropagation goes on: the same weights, begun with earlier."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import virtual
from sparsify.comm.torch import TorchComm
from sparsify.doors.aggregator import Aggregator
from sparsify.doors.engine import Engine, StepReport
from sparsify.doors.optimiser import DistributedOptimiser
from sparsify.doors.overlap import Overlap
from tests.conftest import there
from tests.sparsify import laws, worker_functions
from tests.sparsify.doors import uses, uses_overlap
from tests.sparsify.doors.uses_ddp import MANY_BUCKETS, found_in
from tests.sparsify.doors.uses_overlap import METHODS, USES
from tests.sparsify.worker_functions import on_processes


def test_overlapped_processes_train_to_the_same_weights(tmp_path: Path) -> None:
    ranks = on_processes(worker_functions.overlapped_and_not, 2, tmp_path)
    for found in ranks:
        for name, overlapped in found.items():
            if name.endswith("True"):
                assert torch.equal(overlapped, found[name.replace("True", "False")]), name
                assert torch.equal(overlapped, ranks[0][name]), name


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Where two gloo processes ended in each use, with overlap and without, by rank."""
    return on_processes(worker_functions.uses_of_overlap, 2, tmp_path_factory.mktemp("overlap"))


@pytest.mark.parametrize("name", [*USES, *(f"ddp {method}" for method in METHODS)])
def test_overlap_changes_no_bit(name: str, used: list[dict[str, Tensor]]) -> None:
    for rank in used:
        ends: list[dict[str, Tensor]] = [{}, {}]
        for key, tensor in rank.items():
            if key.startswith(f"{name}|"):
                _, overlap, what = key.split("|")
                ends[overlap == "True"][what] = tensor
        assert ends[0]
        for what, end in ends[0].items():
            assert torch.equal(end, ends[1][what]), what


def test_a_nan_on_one_worker_stops_all_before_it_reaches_a_residual(used: list[dict[str, Tensor]]) -> None:
    """It is in the bucket that gets full last; what came before was delivered, and the error says so."""
    for found in used:
        for entry in ("ddp", "distribute"):
            words = bytes(found[f"{entry} error"].tolist()).decode()
            assert "rank 1, step" in words
            assert "were delivered already" in words
            assert words.endswith("go on from a checkpoint")
            changed = found[f"{entry} changed"].tolist()
            assert changed[0]  # the output layer's, which came first
            assert not changed[-1]  # the first layer's
            assert found[f"{entry} finite"].all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", uses_overlap.FAILURES)
def test_a_batch_that_fails_on_one_worker_is_skipped_and_nothing_is_lost(
    where: str, overlap: bool, used: list[dict[str, Tensor]]
) -> None:
    uses.check_balanced([found_in(f"skipped {where} {overlap}", found) for found in used])


@pytest.mark.parametrize("entry", ["ddp", "distribute"])
def test_the_loss_of_a_worker_reaches_the_others_as_such(entry: str, tmp_path: Path) -> None:
    (folder := tmp_path / entry).mkdir()
    first, _ = on_processes(worker_functions.loss_of_a_worker_while_overlapping, 2, folder)
    assert first["advised"] == (entry == "distribute")  # DDP has no skip()


class Alone(TorchComm):
    """A group of one, without processes."""

    rank, size = 0, 1

    def __init__(self) -> None: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def model_and_overlap(**choices: object) -> tuple[nn.Sequential, Overlap]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    method = sparsify.build("topk", **{"density": 0.5, "scope": "layer", **choices})
    return model, Overlap(Aggregator(method, model.named_parameters(), Alone()))


def test_a_bucket_is_begun_with_while_others_are_still_to_come() -> None:
    model, overlap = model_and_overlap()
    seen: list[int] = []
    first = model[0].weight
    assert isinstance(first, nn.Parameter)
    first.register_hook(lambda grad: seen.append(len(overlap.background.futures)))
    overlap.begin()
    model(torch.ones(2, 4)).sum().backward()
    assert 0 < seen[0] < 6  # of six buckets, when the first layer's turn comes
    report = overlap.finish()
    assert isinstance(report, StepReport)
    assert report.selected == sum(p.numel() // 2 for p in model.parameters())
    overlap.close()


def test_what_the_thread_writes_does_not_count_as_changed() -> None:
    model, overlap = model_and_overlap()
    overlap.begin()
    model(torch.ones(2, 4)).sum().backward()
    for future in overlap.background.futures:
        future.result()  # all are averages by now
    overlap.finish()
    overlap.close()


def test_parameters_without_a_gradient_are_aggregated_at_the_end() -> None:
    model, overlap = model_and_overlap()
    overlap.begin()
    model[2](torch.ones(2, 3)).sum().backward()
    assert len(overlap.background.futures) == 2
    assert overlap.finish().selected == sum(p.numel() // 2 for p in model.parameters())
    overlap.close()


def test_backward_passes_that_were_not_announced_are_left_alone() -> None:
    model, overlap = model_and_overlap()
    model(torch.ones(2, 4)).sum().backward()
    assert overlap.background.futures == []
    overlap.close()


def test_an_error_in_the_other_thread_reaches_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, overlap = model_and_overlap()
    begun = []

    def broken(group: list[int], steps: object) -> None:
        begun.extend(group)
        raise OSError("the network is down")

    monkeypatch.setattr(overlap, "aggregate", broken)
    overlap.begin()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OSError, match="network is down"):
        overlap.finish()
    overlap.close()
    assert begun == [0]  # the others would exchange what nobody else does


def test_what_can_not_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="take scope=layer"):
        model_and_overlap(scope="global")
    model = nn.Linear(4, 5)
    for dense_vectors in (False, True):
        method = sparsify.build("dgc", density=0.5, clip_norm=1.0, dense_vectors=dense_vectors)
        with pytest.raises(ValueError, match="clip_norm"):
            Overlap(Aggregator(method, model.named_parameters(), Alone()))


def backward_that_waits(model: uses.Net, called: nn.Module, first: threading.Event) -> list[bool]:
    """Compute gradients, but the first layer's only when `first` is set, or after a while; was it set?"""
    is_set: list[bool] = []
    model.convolution.weight.register_hook(lambda grad: is_set.append(first.wait(20)))
    uses.loss_of(called, 0, 0).backward()
    return is_set


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("entry", ["ddp", "distribute"])
def test_a_bucket_is_delivered_while_backpropagation_goes_on(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's gradient is not computed before the output layer's has been averaged."""
    delivered = threading.Event()

    def average(engine: Engine, *those: Any) -> StepReport:
        report = original(engine, *those)
        delivered.set()
        return report

    original = Engine.average
    monkeypatch.setattr(Engine, "average", average)
    model, method = uses.net(), sparsify.build("topk", density=0.1, scope="layer")
    if entry == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS)
        sparsify.register(ddp, method, overlap=True)
        uses.loss_of(ddp, 0, 0).backward()  # in one bucket; from the next step on DDP makes more
        delivered.clear()
        assert backward_that_waits(model, ddp, delivered) == [True]
        return
    optimiser = sparsify.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, method, overlap=True)
    assert backward_that_waits(model, model, delivered) == [True]
    optimiser.step()


def stepping(**options: Any) -> tuple[uses.Net, DistributedOptimiser]:
    """After backward, and before step."""
    model = uses.net()
    choices = {key: options.pop(key) for key in ("scope", "clip_norm", "name") if key in options}
    method = laws.build(choices.pop("name", "topk"), 0.1, **choices)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimiser = sparsify.distribute(inner, model, method, overlap=True, **options)
    uses.loss_of(model, 0, 0).backward()
    return model, optimiser


def clipped() -> None:
    model, optimiser = stepping()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimiser.step()


def replaced() -> None:
    model, optimiser = stepping()
    uses.replace_gradients(model)
    optimiser.step()


def changed_past_autograd() -> None:
    model, optimiser = stepping()
    for p in model.parameters():
        there(p.grad).data.clamp_(-1e-3, 1e-3)
    optimiser.step()


def looked_at() -> None:
    """Half of it would be this worker's, and half the average."""
    model, _ = stepping()
    there(model.output.bias.grad).norm()


def moved() -> None:
    model, optimiser = stepping()
    uses.move_gradients(model)
    optimiser.step()


def cleared_by_the_model() -> None:
    model, optimiser = stepping()
    model.zero_grad()
    optimiser.step()


def twice() -> None:
    model, _ = stepping()
    uses.loss_of(model, 0, 1).backward()


def virtual_ranks() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        _, optimiser = stepping(comm=comm)
        optimiser.step()

    virtual.run(2, body)


def of_ddps_own_group() -> None:
    ddp = nn.parallel.DistributedDataParallel(uses.net())
    method = sparsify.build("topk", density=0.1, scope="layer")
    sparsify.register(ddp, method, overlap=True, group=ddp.process_group)


def scaled_under_ddp() -> None:
    ddp = nn.parallel.DistributedDataParallel(uses.net())
    method = sparsify.build("topk", density=0.1, scope="layer")
    sparsify.register(ddp, method, overlap=True, scaler=torch.amp.GradScaler("cpu"))


CHANGED = "changed between backward and step.*change .or clip. their average, after optimiser.aggregate"
HALFWAY = r"came between backward and step, when gradients are on their way already; call it after step"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (clipped, CHANGED),
    (replaced, CHANGED),
    (changed_past_autograd, CHANGED),
    (looked_at, CHANGED),
    (moved, CHANGED),
    (cleared_by_the_model, CHANGED),
    (twice, r"a second gradient of output\.\w+ came before the step.*with optimiser.no_sync"),
    (lambda: stepping()[1].zero_grad(), HALFWAY),
    (lambda: stepping()[1].state_dict(), HALFWAY),
    (lambda: stepping()[1].load_state_dict({}), HALFWAY),
    (lambda: stepping()[1].aggregate(8.0), r"before aggregate\(scale\) can divide them"),
    (
        lambda: stepping(scaler=torch.amp.GradScaler("cpu")),
        "GradScaler would then skip the step; train in bfloat16",
    ),
    (scaled_under_ddp, "GradScaler would then skip the step; train in bfloat16"),
    (lambda: stepping(scope="global"), "there is one bucket"),
    (lambda: stepping(name="dgc", clip_norm=1.0), "which clip_norm needs"),
    (virtual_ranks, "virtual ranks take turns in one thread, so nothing of theirs overlaps"),
    (of_ddps_own_group, r"workers \[0\] is DDP's own; make another one of them"),
]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(("use", "sentence"), REFUSED, ids=lambda use: getattr(use, "__name__", ""))
def test_what_overlap_can_not_do_is_refused_in_a_sentence(use: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        use()
    assert len(str(caught.value)) < 350


@pytest.mark.usefixtures("group_of_one")
def test_what_is_wrapped_around_a_model_goes_before_it() -> None:
    """Neither its hooks nor its thread keep residuals alive."""
    model, optimiser = stepping()
    optimiser.step()
    alive: list[Callable[[], object]] = [ref(optimiser), ref(there(optimiser._overlap))]
    del optimiser
    gc.collect()
    assert [one() for one in alive] == [None, None]
    uses.loss_of(model, 0, 1).backward()


def test_gradients_that_lie_elsewhere_are_aggregated_too() -> None:
    """Cleared to None, the gradient is a new tensor; and where none comes, it is zero."""
    model, overlap = model_and_overlap(density=1.0, feedback="none")
    overlap.aggregator.gradients.flat.fill_(7.0)
    model.zero_grad()  # to None
    overlap.begin()
    model[2](torch.ones(2, 3)).sum().backward()
    overlap.finish()
    found = torch.cat(overlap.aggregator.gradients.views)
    assert found[:8].tolist() == [2.0] * 8
    assert not found[8:].any()
    overlap.close()
