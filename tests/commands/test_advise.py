"""Advice: where its numbers come from, how they add up, and what it asks for."""

from __future__ import annotations

import pytest

from analysis.records import parquet
from analysis.stats import Value
from experiments.commands import _advice, _draw
from experiments.commands._advice import Question, Range
from experiments.config.folders import Folders
from experiments.figures import survey_internet_loss
from sparsify.cost import Link, Network
from tests.analysis.values import interval
from tests.conftest import Command, fine, refused

EXACT = Range(0.1, 0.1, 0.1, "given")
SLOW = Link(1e-4, 1e-8)


def question(**others: object) -> Question:
    known = {
        "elements": 1_000_000, "workers": 4, "density": 0.001, "network": Network(SLOW), "compute_s": EXACT,
        "select_s": {"topk": Range.around(0.002, "given")},
    }  # fmt: skip
    return Question(**{**known, **others})  # type: ignore[arg-type]  # each test gives its types


def test_a_step_is_the_sum_of_its_parts_and_the_quickest_comes_first() -> None:
    found = _advice.ranked(question())
    assert [one.method for one in found] == ["topk", "dense"]
    for one in found:
        assert one.step.value == pytest.approx(one.compute_s + one.select_s + one.transfer_s)
        low, high = interval(one.step)
        assert low < one.step.value < high
        assert one.speedup.value == pytest.approx(found[1].step.value / one.step.value)
    # 2 (P-1)/P m beta + 2 log P alpha; (P-1) 8 k beta + log P alpha
    assert found[1].transfer_s == pytest.approx(6_000_000e-8 + 4e-4)
    assert found[0].transfer_s == pytest.approx(24_000e-8 + 2e-4)


def test_local_steps_select_and_communicate_once_a_round_and_are_compared_with_dense_in_every_step() -> None:
    found = {(one.method, one.every): one for one in _advice.ranked(question(every=(10,)))}
    plain = {one.method: one for one in _advice.ranked(question())}
    assert set(found) == {("dense", 1), ("dense", 10), ("topk", 10)}
    assert found["dense", 1] == plain["dense"]
    for name in ("dense", "topk"):
        local, every_step = found[name, 10], plain[name]
        assert local.transfer_s == pytest.approx(every_step.transfer_s / 10)
        assert local.select_s == pytest.approx(every_step.select_s / 10)
        assert local.speedup.value == pytest.approx(plain["dense"].step.value / local.step.value)


def test_what_matters_most_is_the_widest_input() -> None:
    wide = question(compute_s=Range(0.01, 0.1, 1.0, "given"))
    assert {one.matters for one in _advice.ranked(wide)} == {"computing time"}
    by_name = {one.method: one.matters for one in _advice.ranked(question())}
    assert by_name == {"dense": "bandwidth of the link", "topk": "selection time"}


def test_an_exact_input_adds_nothing_to_the_interval_of_a_ratio() -> None:
    (dense,) = [one for one in _advice.ranked(question()) if one.method == "dense"]
    assert dense.speedup == Value(1.0, 1.0, 1.0)


def test_overlap_moves_what_is_exchanged_by_regions_alone() -> None:
    fixed = {name: Range(0.001, 0.001, 0.001, "given") for name in ("topk", "sparcml", "oktopk")}
    steps = {name: _advice.StepTime(question(select_s=fixed), name) for name in fixed}
    moved = {
        name: step.seconds({_advice.SHARED: 1}) - step.seconds({_advice.SHARED: -1})
        for name, step in steps.items()
    }
    assert moved["topk"] == 0
    assert moved["sparcml"] < 0  # the more they share, the smaller is the union


def test_published_logs_give_computing_and_selecting_on_a100() -> None:
    found = _advice.published("a100")
    assert found["topk"].middle == pytest.approx(0.2, abs=0.015)  # 212 ms, of which 12 are BP
    assert found["randomk"].middle < 0.01
    assert "published" in found["dense"].source


def test_a_table_is_printed_and_written(here: Command) -> None:
    words = ["cluster=generic_slurm", "link=ethernet_10g", "workers=16", "parameters=resnet50"]
    done = fine(here("advise", *words, "compute_s=0.12..0.15", "select_s.topk=0.01", "methods=dense,topk"))
    assert "Predicted step times" in done.stdout
    assert "| Top-k |" in done.stdout
    assert "25,557,032 parameters, 16 workers" in done.stdout
    assert "simulated by the alpha-beta model" in done.stdout
    assert "resnet50, " in done.stdout
    assert "joins all workers alike, also those of one of the 2 nodes" in done.stdout


def test_a_table_says_how_often_a_method_averages(here: Command) -> None:
    words = ["cluster=generic_slurm", "link=ethernet_1g", "workers=16", "parameters=resnet50", "every=30"]
    done = fine(here("advise", *words, "compute_s=0.12", "select_s.topk=0.01", "methods=dense,topk"))
    for label in ("dense, every step", "dense, every 30 steps", "Top-k, every 30 steps"):
        assert f"| {label} |" in done.stdout
    assert "what that does to the model is not predicted" in done.stdout


def test_over_a_link_with_distance_local_steps_are_ranked_as_well(here: Command) -> None:
    words = ["link=internet_100m_50ms", "workers=4", "parameters=resnet50", "compute_s=0.12", "methods=dense"]
    done = fine(here("advise", *words))
    for each in ("every step", "every 5 steps", "every 15 steps", "every 30 steps"):
        assert f"| dense, {each} |" in done.stdout
    assert "Everybody sends to everybody at once" in done.stdout
    few = fine(here("advise", *words, "every=1,100"))
    assert "| dense, every 100 steps |" in few.stdout
    assert "every 30 steps" not in few.stdout
    for wrong in ("0", "1,x", "5,,6"):
        assert here("advise", *words, f"every={wrong}").returncode == 2


def test_what_it_predicts_over_a_link_with_distance_is_what_was_measured(here: Command) -> None:
    """Local methods exchange as dense does, or as Top-k; nothing is given that the shipped records know."""
    words = ["link=internet_100m_50ms", "workers=4", "task=gpt_ptbchars", "task.batch_size=8"]
    methods = ["methods=dense,topk", "density=0.015625"]
    printed = fine(here("advise", "cluster=netns", *words, *methods)).stdout
    folders = Folders()
    shipped = _draw.stored("internet-loss", "laptop", folders, parquet.read_parquet(folders.shipped))
    assert shipped
    for name, every, as_method in (
        ("dense", None, "dense, every step"),
        ("topk", None, "Top-k, every step"),
        ("diloco", 15, "dense, every 15 steps"),
        ("diloco", 30, "dense, every 30 steps"),
        ("sparseloco", 5, "Top-k, every 5 steps"),
        ("sparseloco", 15, "Top-k, every 15 steps"),
        ("sparseloco", 30, "Top-k, every 30 steps"),
    ):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"| {as_method} |")]
        low, high = map(float, row.split("[")[1].split("]")[0].split(", "))
        measured = survey_internet_loss.step_s(shipped.frames, name, every)
        assert measured
        assert low <= 1e3 * measured.value <= high, row


def test_nodes_have_a_link_of_their_own_inside(here: Command) -> None:
    words = [
        "cluster=generic_slurm",
        "link=ethernet_10g",
        "workers=16",
        "parameters=resnet50",
        "compute_s=0.1",
    ]
    flat, nested = (here("advise", *words, *more, "methods=dense") for more in ([], ["inside=nvlink3"]))
    assert nested.returncode == 0, nested.stderr
    assert "inside=nvlink3" in nested.stdout
    assert "joins all workers alike" not in nested.stdout
    assert step_ms(nested.stdout) < step_ms(flat.stdout)


def step_ms(printed: str) -> float:
    """Of dense."""
    (row,) = [line for line in printed.splitlines() if line.startswith("| dense")]
    return float(row.split("|")[2].split("[")[0].replace(",", ""))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster=local", "compute_s=0.1"], ["loopback has no alpha and beta", "choose another link="]),
        (
            ["cluster=neuron_v100", "task=cnn_digits"],
            ["cnn_digits computes on V100", "give compute_s=", "experiments run"],
        ),
        (["compute_s=0", "link=pcie"], ["compute_s=0 is out of range"]),
        (["compute_s=fast", "link=pcie"], ["compute_s='fast' is out of range: it must be a finite"]),
        (["compute_s=0.1", "methods=topq"], ["no method 'topq'"]),
        (["compute_s=0.1", "methods=powersgd"], ["exchanges no selections"]),
        (
            ["cluster=neuron_a100", "compute_s=0.1", "parameters=1000", "methods=dgc"],
            ["how long dgc takes to select on A100", "select_s.dgc=SECONDS"],
        ),
        (["compute_s=0.1", "parameters=many"], ["no published model 'many'; there are: resnet50"]),
        (["compute_s=0.1", "density=0"], ["density=0 is out of range"]),
        (["compute_s=0.1", "denisty=0.1"], ["no key 'denisty'", "advise also takes compute_s"]),
        (["task=resnet1_nothing"], ["no task 'resnet1_nothing'"]),
    ],
)
def test_what_is_not_known_is_asked_for(words: list[str], told: list[str], here: Command) -> None:
    refused(here("advise", *words), *told)
