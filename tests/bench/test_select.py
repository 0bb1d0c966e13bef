"""The benchmark of selections: its options, records, picture and page.

Also the steps side by side, and the gradients that they are taken on. No test asserts a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.bench import _gradients as gradients
from experiments.bench import _select_steps, _timing, select
from experiments.bench._compared_rows import STANDARD_SELECTION_CASE, SelectionCase
from experiments.bench._pages import SELECT_PAGE
from experiments.bench._select_comparison import RowSamples, SelectionComparison, mark_rows_beyond_memory
from experiments.bench._select_steps import (
    FollowerProcess,
    SelectionStep,
    SelectionStepSetup,
    StepUnavailableError,
)
from experiments.training.networks import small_cnn
from sparsify.types import SparseVector
from tests.bench.conftest import ROWS, Benched, last_of
from tests.conftest import ROOT, loaded_by

CPU = torch.device("cpu")


def test_the_last_line_is_one_object_with_the_ratios(benched: Benched) -> None:
    line = last_of(benched.printed)
    for above, below in select.RATIOS:
        name = f"{above}_over_{below}"
        if line[name] is None:  # where nothing can be compiled
            assert "not run" in line["why"][name]
        else:
            assert line[name]["n"] == 2


def test_every_row_is_recorded_with_what_a_reader_needs(benched: Benched) -> None:
    rows, (start,) = SELECT_PAGE.read_rows_and_invocations(benched.store)
    of = {row["row"]: row for row in rows}
    assert set(of) == set(ROWS)
    assert "host" not in start["provenance"]
    assert of["paper_kernel"]["why"] == "needs a GPU"
    assert {of["sort"][name]["n"] for name in ("over_add", "over_copy", "cpu_ms")} == {2}
    followed = of["eager_hugepages"]  # in a process of its own, where the system has huge pages
    assert followed["selected_over_k"] == 1 if "median_ms" in followed else "needs" in followed["why"]
    assert of["threshold"]["selected_over_k"] == 1  # no ties here, so the k-th magnitude has k
    assert of["copy"]["bytes_per_element"] == 12
    assert (of["eager"]["host_syncs"], of["threshold"]["host_syncs"]) == (0, 1)
    assert str(ROOT) not in benched.store.read_text()


def test_targets_are_judged_by_medians() -> None:
    ratio = {"low": 0.1, "high": 99.0, "n": 11}
    line = STANDARD_SELECTION_CASE._asdict() | {
        "eager_over_fused": {"median": 29.9, **ratio},
        "eager_hugepages_over_fused": None,
        "fused_over_add": {"median": 1.2, **ratio},
    }
    speed, tuned, floor = (target.verdict_sentence(line) for target in select.TARGETS["cpu"])
    assert speed == "eager_over_fused: at least 30 wanted, 29.9 [0.1, 99.0], n = 11 measured: MISSED"
    assert tuned.endswith("not measured")
    assert floor.endswith("met")


def test_a_process_that_cannot_follow_says_why() -> None:
    with pytest.raises(StepUnavailableError, match=r"code 1: \w+: "):
        FollowerProcess(['["many", 0.001, "normal", 1, 0, "."]'], "").take_step(0)


def test_every_size_density_and_distribution_is_planned_and_words_are_combined() -> None:
    cases = select.plan_cases((), (), ())
    assert len(set(cases)) == 16
    assert {case.distribution for case in cases} == {*gradients.DISTRIBUTIONS} - {gradients.DECODER}
    assert STANDARD_SELECTION_CASE in cases
    combined = select.plan_cases((100, 200), (0.1,), ("ties", "real"))  # real gradients keep their size
    assert [tuple(case) for case in combined] == [
        (100, 0.1, "ties"), (14_728_266, 0.1, "vgg16"), (11_173_962, 0.1, "resnet18"), (200, 0.1, "ties"),
    ]  # fmt: skip


# The picture and the page.


def test_pages_are_drawn_without_torch() -> None:
    assert "torch" not in loaded_by("from experiments.bench import _pages")


# The steps.


def beside(
    n: int, distribution: str, rows: tuple[str, ...], repeats: int, seconds: float = 60.0
) -> tuple[dict[str, RowSamples], dict[str, str]]:
    """Return what rows took, and a sentence for each that chose others."""
    lines = {name: RowSamples() for name in rows}
    case = SelectionCase(n, 0.01, distribution)
    return lines, SelectionComparison(case, lines, set(), 2**12, Path(), CPU).time_rows_and_find_faults(
        repeats, seconds
    )


def test_exact_rows_agree_on_every_distribution() -> None:
    for distribution in (*gradients.SYNTHETIC, gradients.FIRST_TIED):
        lines, differ = beside(30_011, distribution, ("fused", "fallback", "eager", "sort"), 3)
        assert differ == {}, distribution
        for timed in lines.values():
            assert timed.why_not_run or timed.selected_counts == [300] * 3


def test_a_row_that_selects_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(setup: SelectionStepSetup) -> SelectionStep:
        chosen = torch.arange(setup.k)
        return SelectionStep(lambda acc, grad: SparseVector(chosen, acc.add_(grad)[chosen]))

    monkeypatch.setitem(
        _select_steps.STEP_KINDS, "sort", replace(_select_steps.STEP_KINDS["sort"], make=first)
    )
    _, differ = beside(30_011, "normal", ("eager", "sort"), 1)
    assert set(differ) == {"sort"}


def test_what_does_not_fit_into_memory_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SelectionCase(10_000_000, 0.001, "normal")
    lines = {name: RowSamples() for name in _select_steps.STEP_KINDS}
    monkeypatch.setattr(_timing, "free_memory_bytes", lambda device: 0.5 * 2**30)
    mark_rows_beyond_memory(case, lines, CPU, 0)
    assert "GiB" in str(lines["sort"].why_not_run)
    assert not lines["fused"].why_not_run
    monkeypatch.setattr(_timing, "free_memory_bytes", lambda device: 0.1 * 2**30)
    mark_rows_beyond_memory(case, lines, CPU, 0)
    assert all(timed.why_not_run for timed in lines.values())


# The gradients.


def test_real_gradients_come_from_training_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in small_cnn(3, 32, 10).parameters())
    make_task = partial(gradients.make_image_task, small_cnn)
    small = gradients.TrainedNetwork(make_task, size, gradients.IMAGE_DATASETS)
    monkeypatch.setitem(gradients.NETWORKS, "small", small)
    monkeypatch.setitem(gradients.TRAINING_STEPS, "cpu", 6)
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))  # no CIFAR-10 there
    made = gradients.load_or_train_inputs("small", tmp_path, CPU)
    assert made.gradients_by_turn.shape == (gradients.NUM_KEPT_GRADIENTS, size)
    assert (made.initial_residual == 0).sum() >= int(
        gradients.DENSITY * size
    )  # what was sent in the step before
    monkeypatch.setattr(gradients, "record_training_gradients", None)
    again = gradients.load_or_train_inputs("small", tmp_path, CPU)
    assert torch.equal(again.gradients_by_turn, made.gradients_by_turn)
