"""Runs with local steps: the same whoever carries them, validated at the anchor.

Settings that mean nothing to them are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analysis.records.store import Attempt, Store
from experiments.config import compose
from experiments.training.task import Metrics, Task
from experiments.worker.build import build_run
from tests.worker.runs import carry_out, orders, recorded

WORDS = (
    "task=cnn_digits", "method=diloco", "method.every=5", "workers=2", "train.steps=13", "task.lr=0.05",
)  # fmt: skip


def lived(folder: Path, *words: str) -> Attempt:
    told, attempt = orders(Store(folder / "runs"), *WORDS, *words)
    carry_out(told, attempt, folder / "start")
    return attempt


def test_bytes_are_sent_in_the_steps_that_exchange_and_all_end_at_one_anchor(tmp_path: Path) -> None:
    attempt = lived(tmp_path, "cluster=virtual")
    for rank in range(2):
        lines = recorded(attempt, rank)
        assert [bool(line["wire_bytes"]) for line in lines] == [step % 5 == 4 for step in range(13)]
        assert [line["update_density"] > 0.9 for line in lines] == [step % 5 == 4 for step in range(13)]
    assert attempt.manifest["agreed"]


def test_the_end_is_what_was_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends in mid-round validates, and ends at, the anchor of its last round."""
    validated, evaluate = list[torch.Tensor](), Task.evaluate

    def noted(task: Task, model: nn.Module, *rest: Any) -> Metrics:
        validated.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return evaluate(task, model, *rest)

    monkeypatch.setattr(Task, "evaluate", noted)
    at_13, at_10 = (
        lived(tmp_path / str(steps), "cluster=virtual", f"train.steps={steps}") for steps in (13, 10)
    )
    assert at_13.manifest["weights"] == at_10.manifest["weights"]
    assert len(validated) == 2
    assert torch.equal(*validated)


def test_the_outer_momentum_is_not_the_inner_one() -> None:
    config = compose.resolve([*WORDS, "task.momentum=0.5"])
    assert (config["task"]["momentum"], config["method"]["momentum"]) == (0.5, 0.9)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("overlap=true", "timing.mode=production", "cluster=local"),
            "overlap=true averages gradients during",
        ),
        (
            ("timing.mode=as_published",),
            "timing.mode=as_published times a system that averages in every step",
        ),
        (("train.look_every=2",), "train.look_every looks at the gradients"),
    ],
)
def test_settings_that_say_nothing_to_local_steps_are_refused(words: tuple[str, ...], told: str) -> None:
    config = compose.resolve([*WORDS, "cluster=virtual", *words])
    with pytest.raises(ValueError, match=rf"{told}.* method=diloco averages every 5 steps"):
        build_run(config, None, torch.device("cpu"))
