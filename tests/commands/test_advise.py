"""Advice: where its numbers come from, how they add up, and what it asks for."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from analysis.records import parquet
from analysis.records.frames import empty_frames
from analysis.stats import Estimate
from experiments import figures
from experiments.commands import _drawing
from experiments.config.folders import ResultFolders
from experiments.figures import survey_internet_loss
from experiments.figures.survey_local_loss import MethodWithPeriod
from experiments.prediction import known_times, step_times
from experiments.prediction.step_times import Scenario, UncertainTime
from sparsify.cost import Link, Network
from tests.analysis.values import interval
from tests.conftest import Command, fine, refused, there

EXACT = UncertainTime(0.1, 0.1, 0.1, "given")
SLOW = Link(1e-4, 1e-8)


def question(**others: object) -> Scenario:
    known = {
        "elements": 1_000_000, "workers": 4, "density": 0.001, "network": Network(SLOW),
        "compute_time": EXACT, "select_time_by_method": {"topk": UncertainTime.around(0.002, "given")},
    }  # fmt: skip
    return Scenario(**{**known, **others})  # type: ignore[arg-type]  # each test gives its types


def by_method(**others: object) -> dict[str, step_times.StepPrediction]:
    return {advice.method: advice for advice in step_times.rank_methods(question(**others))}


def test_a_step_is_the_sum_of_its_parts_and_the_quickest_comes_first() -> None:
    found = by_method()
    assert [*found] == ["topk", "dense"]
    for advice in found.values():
        assert advice.step.value == pytest.approx(advice.compute_s + advice.select_s + advice.transfer_s)
        low, high = interval(advice.step)
        assert low < advice.step.value < high
        assert advice.speedup.value == pytest.approx(found["dense"].step.value / advice.step.value)
    assert found["dense"].speedup == Estimate(1.0, 1.0, 1.0)  # an exact input adds nothing to its interval
    # 2 (P-1)/P m beta + 2 log P alpha; (P-1) 8 k beta + log P alpha
    assert found["dense"].transfer_s == pytest.approx(6_000_000e-8 + 4e-4)
    assert found["topk"].transfer_s == pytest.approx(24_000e-8 + 2e-4)


def test_local_steps_select_and_communicate_once_a_round_and_are_compared_with_dense_in_every_step() -> None:
    found = {
        (advice.method, advice.every): advice for advice in step_times.rank_methods(question(every=(10,)))
    }
    plain = by_method()
    assert set(found) == {("dense", 1), ("dense", 10), ("topk", 10)}
    assert found["dense", 1] == plain["dense"]
    for name in plain:
        local = found[name, 10]
        assert local.transfer_s == pytest.approx(plain[name].transfer_s / 10)
        assert local.select_s == pytest.approx(plain[name].select_s / 10)
        assert local.speedup.value == pytest.approx(plain["dense"].step.value / local.step.value)


def test_what_matters_most_is_the_widest_input() -> None:
    wide = by_method(compute_time=UncertainTime(0.01, 0.1, 1.0, "given"))
    assert {advice.widest_input for advice in wide.values()} == {"computing time"}
    assert by_method()["topk"].widest_input == "selection time"


def test_overlap_moves_what_is_exchanged_by_regions_alone() -> None:
    exact = {name: UncertainTime(0.001, 0.001, 0.001, "given") for name in ("topk", "sparcml", "oktopk")}
    moved = {}
    for name in exact:
        step = step_times.StepTimeModel(question(select_time_by_method=exact), name)
        moved[name] = step.step_s({step_times.SHARED: 1}) - step.step_s({step_times.SHARED: -1})
    assert moved["topk"] == 0
    assert moved["sparcml"] < 0  # the more they share, the smaller is the union


def test_published_logs_give_computing_and_selecting_on_a100() -> None:
    found = known_times.published_compute_and_select_times("a100")
    assert found["topk"].middle_s == pytest.approx(0.2, abs=0.015)  # 212 ms, of which 12 are BP
    assert found["randomk"].middle_s < 0.01
    assert "published" in found["dense"].source


# --- the command
# --------------------------------------------------------------------------------------

ON_SLURM = (
    "cluster=generic_slurm", "link=ethernet_10g", "workers=16", "parameters=resnet50", "compute_s=0.12..0.15",
    "select_s.topk=0.01", "methods=dense,topk",
)  # fmt: skip
FAR = ("link=internet_100m_50ms", "workers=4")


@pytest.fixture
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no record tell how long methods take, which takes seconds to find."""
    monkeypatch.setattr(known_times.KnownTimes, "serialised_records", empty_frames())


def step_ms(printed: str, label: str = "dense") -> tuple[float, float, float]:
    """Return a method's step time and its interval, as a table has them."""
    (row,) = [line for line in printed.splitlines() if line.startswith(f"| {label} |")]
    value, low, high = re.split(r"[\[,] ?", row.split("|")[2].replace("]", ""))
    return float(value), float(low), float(high)


@pytest.mark.usefixtures("nothing_recorded")
def test_a_table_is_printed_and_nodes_may_have_a_link_of_their_own_inside(here: Command) -> None:
    flat = fine(here("advise", *ON_SLURM)).stdout
    for text in (
        "Predicted step times", "| Top-k |", "25,557,032 parameters, 16 workers",
        "simulated by the alpha-beta model", "resnet50, ",
        "joins all workers alike, also those of one of the 2 nodes",
    ):  # fmt: skip
        assert text in flat
    nested = fine(here("advise", *ON_SLURM, "inside=nvlink3")).stdout
    assert "inside=nvlink3" in nested
    assert "joins all workers alike" not in nested
    assert step_ms(nested) < step_ms(flat)


@pytest.mark.usefixtures("nothing_recorded")
def test_a_table_says_how_often_a_method_averages(here: Command) -> None:
    told = fine(here("advise", *ON_SLURM, "every=30")).stdout
    for label in ("dense, every step", "dense, every 30 steps", "Top-k, every 30 steps"):
        assert f"| {label} |" in told
    words = (*FAR, "parameters=resnet50", "compute_s=0.12", "methods=dense")
    told = fine(here("advise", *words)).stdout  # over a link with distance without being asked
    for often in ("every step", "every 5 steps", "every 15 steps", "every 30 steps"):
        assert f"| dense, {often} |" in told
    assert "Everybody sends to everybody at once" in told
    for wrong in ("0", "1,x", "5,,6"):
        refused(here("advise", *words, f"every={wrong}"))


@pytest.mark.extended
def test_what_it_predicts_over_a_link_with_distance_is_what_was_measured(here: Command) -> None:
    """Local methods exchange as dense does, or as Top-k; nothing is given that the shipped records know."""
    words = (*FAR, "task=gpt_ptbchars", "task.batch_size=8", "methods=dense,topk", "density=0.015625")
    printed = fine(here("advise", "cluster=netns", *words)).stdout
    folders = ResultFolders()
    shipped = there(
        _drawing.find_figure_records(
            figures.load("internet-loss"), "laptop", folders, parquet.read_parquet(folders.shipped)
        )
    )
    for name, every, label in (
        ("dense", None, "dense, every step"),
        ("topk", None, "Top-k, every step"),
        ("diloco", 15, "dense, every 15 steps"),
        ("sparseloco", 5, "Top-k, every 5 steps"),
        ("sparseloco", 30, "Top-k, every 30 steps"),
    ):
        measured = there(survey_internet_loss.mean_step_s(shipped.frames, MethodWithPeriod(name, every)))
        _, low, high = step_ms(printed, label)
        assert low <= 1e3 * measured.value <= high, label


def test_own_runs_come_before_shipped_ones_which_are_named_with_their_machine() -> None:
    table = {
        "run_id": ["a", "b", "c"], "source": ["own", "shipped", "shipped"], "seconds": [1.0, 2.0, 4.0],
        "provenance.cpu": "EPYC", "provenance.cores": 2.0,
    }  # fmt: skip
    runs = pd.DataFrame(table)
    assert known_times.summarize_runs(runs) == UncertainTime.around(1.0, "1 own run")
    of_others = known_times.summarize_runs(runs[1:])
    assert of_others == UncertainTime(2.0, 3.0, 4.0, "2 shipped runs on EPYC (2 cores)", is_shipped=True)


def test_a_fresh_clone_answers_from_the_shipped_runs_and_names_their_machine(here: Command) -> None:
    words = ("task=gpt_ptb", "methods=dense,topk")
    told = fine(here("advise", *FAR, *words)).stdout
    assert "| dense, every step |" in told
    assert "1,681,280 parameters, 4 workers" in told
    computing = there(re.search(r"computing: ([^;]*)", told))[1]
    others = "task=gpt_ptb with 9,677,312 parameters and batch 4"
    assert re.match(rf"\d+ shipped runs of {others} on .* \(\d+ cores?\)", computing)
    assert computing.endswith("in proportion to parameters and batch")
    assert re.search(r"Top-k: \d+ shipped runs on .* cores", told)
    run = "run cluster=local task=gpt_ptb task.batch_size=16 method=dense workers=2 timing.mode=serialised"
    assert f"One run makes it this machine's: python -m experiments {run}" in told
    given = fine(here("advise", *FAR, *words, "compute_s=0.1")).stdout
    assert "One run makes" not in given


@pytest.mark.usefixtures("nothing_recorded")
def test_what_is_not_known_is_asked_for(here: Command) -> None:
    for words, *answers in (
        ("cluster=local compute_s=0.1", "loopback has no alpha and beta", "choose another link="),
        (
            "cluster=neuron_v100 task=cnn_digits",
            "cnn_digits computes on V100", "give compute_s=", "experiments run",
        ),
        ("compute_s=0 link=pcie", "compute_s=0 is out of range"),
        ("compute_s=fast link=pcie", "compute_s='fast' is out of range: it must be a finite"),
        ("compute_s=0.1 methods=topq", "no method 'topq'"),
        ("compute_s=0.1 methods=powersgd", "exchanges no selections"),
        (
            "cluster=neuron_a100 compute_s=0.1 parameters=1000 methods=dgc",
            "how long dgc takes to select on A100", "select_s.dgc=SECONDS",
        ),
        ("compute_s=0.1 parameters=many", "no published model 'many'; there are: resnet50"),
        ("compute_s=0.1 density=0", "density=0 is out of range"),
        ("compute_s=0.1 denisty=0.1", "no key 'denisty'", "advise also takes compute_s"),
        ("task=resnet1_nothing", "no task 'resnet1_nothing'"),
    ):  # fmt: skip
        refused(here("advise", *words.split()), *answers)
