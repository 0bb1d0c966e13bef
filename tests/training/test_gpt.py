"""GPT: what it may look at, how large it is, and the optimisers and the schedule that it is trained with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.config import compose
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.language.networks import GPT
from experiments.training.replicas.shared import set_learning_rate
from experiments.training.task import Task
from experiments.worker.memory import iterate_held_tensors, predict_optimizer_state_bytes
from tests.conftest import there
from tests.training.tasks import backward, batches_of, learn, model_of, rhyme
from tests.worker.runs import stopped_and_straight

SMALL = {"width": 16, "layers": 2, "heads": 2, "batch_size": 10, "lr_warmup_epochs": 0}
LEARNS = {"adamw": 0.01, "muon": 0.02, "sgd": 0.1}  # learning rates


def built(name: str = "gpt_text", **values: Any) -> Task:
    task: Task = TASKS.build(name, {**SMALL, **values})
    return task


def network(classes: int = 30, length: int = 12) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(classes, length, 16, 2, 4).double()


def words(model: GPT, rows: int = 3) -> Tensor:
    shape = (rows, len(model.places.weight))
    return torch.randint(len(model.words.weight), shape, generator=torch.Generator().manual_seed(1))


def test_a_later_word_changes_no_earlier_output() -> None:
    model = network()
    asked = words(model)
    before = model(asked)
    for place in range(asked.shape[1]):
        other = asked.clone()
        other[:, place] = (other[:, place] + 1) % 30
        after = model(other)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(-1).all()  # and all that follow see it


def test_a_new_one_knows_nothing_and_its_stream_does_not_grow_with_its_layers() -> None:
    """Guessing all words alike costs ln(classes); the branches' last matrices are the smaller, the deeper."""
    task = TASKS.build("gpt_ptbchars", {"layers": 8})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = task.network(0, 64, 51)
    asked = words(model, 20)
    with torch.no_grad():
        assert task.loss(model(asked), asked.roll(1, 1)).item() == pytest.approx(math.log(51), rel=0.05)
    for block in model.blocks:
        for part in (block.attention, block.further):
            assert part.onto.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # sqrt(2 x 8)
        assert block.further.wide.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("optimiser", LEARNS)
def test_each_optimiser_learns_a_rhyme(optimiser: str, tmp_path: Path) -> None:
    before, after = learn(built(optimiser=optimiser, lr=LEARNS[optimiser]), rhyme(tmp_path), steps=60)
    assert after.loss < before.loss / 2
    assert there(after.top1_percent) > 90


def test_the_rate_rises_and_falls_along_a_cosine_to_its_end() -> None:
    task = built(lr=2.0, lr_warmup_epochs=1, lr_cosine_epochs=11, lr_end=0.1)
    rate = [task.learning_rate(at, 100) for at in range(1301)]
    # The end of its warm-up is at 100, and at 600 it is halfway down.
    quarter = 0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2
    expected = {0: 0.02, 50: 0.02 + 0.5 * 1.98, 100: 2.0, 350: quarter, 600: 1.1, 1100: 0.2, 1300: 0.2}
    assert {at: rate[at] for at in expected} == pytest.approx(expected)
    assert sorted(rate[100:], reverse=True) == rate[100:]


def test_matrices_of_layers_are_muon_s_and_all_else_adamw_s() -> None:
    model = network()
    optimiser = built(optimiser="muon", muon_factor=3.0, momentum=0.8, beta2=0.95).make_optimizer(model)
    set_learning_rate(optimiser, 0.5)
    muon, decayed, spared = optimiser.param_groups
    assert [group["lr"] for group in optimiser.param_groups] == [1.5, 0.5, 0.5]
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.1, 0.0]
    assert (muon["momentum"], decayed["betas"]) == (0.8, (0.9, 0.95))
    of_blocks = {*model.blocks.parameters()}
    assert {*muon["params"]} == {p for p in of_blocks if p.ndim == 2}
    assert {*decayed["params"]} == {model.words.weight, model.places.weight}
    assert {*spared["params"]} == {p for p in model.parameters() if p.ndim == 1}


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(
    optimiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rhyme(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda *_: data)
    stopped_and_straight(
        tmp_path, 6, "task=gpt_text", f"task.optimiser={optimiser}", "task.width=16", "task.batch_size=4",
        "method=topk", "method.density=0.1", "cluster=virtual", "workers=2", "train.steps=6",
    )  # fmt: skip


def test_what_can_t_be_trained_is_refused() -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"heads": 3}, r"width=16 can't be divided among heads=3; take a multiple of it"),
        (
            {"lr_warmup_epochs": 2, "lr_cosine_epochs": 2},
            "lr_cosine_epochs=2 is not after lr_warmup_epochs=2",
        ),
        (
            {"optimiser": "adam"},
            r"no optimiser 'adam' \(did you mean 'adamw'\?\); there are: adamw, muon, sgd",
        ),
        ({"muon_factor": 2}, r"muon_factor=2 has no effect with optimiser=adamw.*take optimiser=muon$"),
        ({"optimiser": "sgd", "beta2": 0.9}, r"beta2=0.9 has no effect with optimiser=sgd.*adamw or muon$"),
        ({"lr_end": 1.5}, r"lr_end=1.5 is out of range: it must be a number in \[0, 1\]"),
    ]
    for values, why in refusals:
        with pytest.raises(ValueError, match=why):
            built(**values)


def test_a_method_with_momentum_inside_takes_sgd_and_no_other() -> None:
    words = ["task=gpt_ptbchars", "method=dgc"]
    with pytest.raises(ValueError, match=r"and so does task.optimiser=adamw; take task.optimiser=sgd, or"):
        compose.resolve(words)
    resolved = compose.resolve([*words, "task.optimiser=sgd"])
    assert resolved["task"]["momentum"] == 0
    assert compose.resolve([*words, "method.momentum=0"])["task"]["optimiser"] == "adamw"


def test_memory_counts_what_an_optimiser_holds_after_a_step(tmp_path: Path) -> None:
    data = rhyme(tmp_path)
    for optimiser in LEARNS:
        task = built(optimiser=optimiser)
        model = model_of(task, data)
        inner = task.make_optimizer(model)
        backward(task, model, next(batches_of(task, data)))
        inner.step()
        held = iterate_held_tensors(dict(inner.state))
        assert predict_optimizer_state_bytes(inner) == sum(
            tensor.nbytes for tensor in held if tensor.numel() > 1
        )
