"""Verdicts: each word is reached by data for which it is right, and a flip of the data flips the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest

from analysis import claims, stats, verdicts
from analysis.claims import Claim, ClaimKind, Verdict, judge
from analysis.evidence import EXAMPLES, SCALE_NAMES, reduced
from analysis.records.attempts import from_attempts
from analysis.records.configs import flatten
from analysis.records.frames import Frames, empty, reads, restrict
from analysis.records.store import Store
from analysis.stats import Mixed, Value
from experiments import figures
from experiments.config import compose
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import value
from tests.analysis import synthetic


def claim(
    kind: ClaimKind, paper: float | str | None, tolerance: float, ours: Value | None, **more: Any
) -> Claim:
    return Claim("text", paper, "ms", "source", kind, tolerance, "reason.", lambda frames: ours, **more)


def verdict(
    judged: Claim, frames: Frames | None = None, declared: Mapping[str, Any] = MappingProxyType({})
) -> Verdict:
    return judge([judged], frames or empty(), declared)[0]


def told(judged: Verdict) -> str:
    """The word and what must be read with it."""
    return f"{judged.word} ({judged.because})" if judged.because else judged.word


def three(value: float, half: float = 0.0) -> Value:
    """A value with an interval over three runs."""
    return Value(value, value - half, value + half, 3)


@pytest.mark.parametrize(
    ("kind", "paper", "tolerance", "ours", "expected"),
    [
        ("absolute", 92.99, 0.6, three(92.5, 0.1), "reproduced"),
        ("absolute", 92.99, 0.6, three(92.5, 0.3), "inconclusive"),
        ("absolute", 92.99, 0.6, three(94.0, 0.5), "inconclusive"),
        ("absolute", 92.99, 0.6, three(92.0, 0.1), "partly"),
        ("absolute", 92.99, 0.6, three(92.0, 0.3), "not reproduced"),
        ("absolute", 92.99, 0.6, three(80.0, 1.0), "not reproduced"),
        ("absolute", 92.99, 0.6, three(99.0, 1.0), "not reproduced"),
        ("ratio", 4.67, 0.1, three(4.5, 0.1), "reproduced"),
        ("ratio", 4.67, 0.1, three(5.3, 0.1), "partly"),
        ("ratio", 4.67, 0.1, three(1.2, 0.1), "not reproduced"),
        ("ordering", 20.54, 5.0, three(12.0, 1.0), "same direction"),
        ("ordering", 20.54, 5.0, three(5.5, 1.5), "inconclusive"),
        ("ordering", 20.54, 5.0, three(3.0, 1.0), "partly"),
        ("ordering", 20.54, 5.0, three(-6.6, 1.0), "other direction"),
        ("ordering", 20.54, 0.0, three(0.0), "inconclusive"),
        ("ordering", None, 0.0, three(1.0, 0.5), "holds"),
        ("ordering", "stated", 0.0, three(1.0, 0.5), "holds"),
        ("ordering", None, 0.0, three(-1.0, 0.5), "does not hold"),
        ("ordering", None, 5.0, three(3.0, 0.5), "does not hold"),
        ("ordering", None, 0.0, three(0.1, 0.5), "inconclusive"),
        ("ordering", None, 0.0, Value(math.nan, n=3), "inconclusive"),
        ("shape", 1.47, 2.0, three(1.5, 1.0), "reproduced"),
        ("shape", 1.47, 2.0, three(-9.0, 1.0), "not reproduced"),
        ("shape", 1.47, 2.0, three(12.0, 1.0), "not reproduced"),
        ("limit", None, 3.0, three(2.0, 0.5), "holds"),
        ("limit", None, 3.0, three(4.0, 0.5), "does not hold"),
        ("absolute", 92.99, 0.6, None, "not run"),
    ],
)
def test_each_word_is_reached_by_the_data_that_deserve_it(
    kind: ClaimKind, paper: float | str | None, tolerance: float, ours: Value | None, expected: str
) -> None:
    assert verdict(claim(kind, paper, tolerance, ours)).word == expected


@pytest.mark.parametrize(
    ("kind", "paper", "value", "side"),
    [
        ("absolute", 92.99, 92.5, "within the band"),
        ("absolute", 92.99, 99.0, "outside the band"),
        ("ordering", 1.0, 2.0, "in this direction"),
        ("ordering", 1.0, -2.0, "not in this direction"),
        ("limit", None, 7.0, "outside the band"),
    ],
)
def test_without_enough_independent_runs_it_is_indicated_and_where(
    kind: ClaimKind, paper: float | None, value: float, side: str
) -> None:
    for ours in (Value(value), Value(value, n=2), Value(value, value, value, 2), Value(value, n=5)):
        assert told(verdict(claim(kind, paper, 1.0, ours))) == f"indicated (n = {ours.n}; {side})"


@pytest.mark.parametrize(("of", "least"), [("runs", 3), ("launches", 5)])
def test_a_verdict_needs_so_many_runs_or_launches(
    of: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (claim("ordering", 1.0, 0.0, Value(1.0, 0.9, 1.1, n, of)) for n in (least - 1, least))
    assert (verdict(few).word, verdict(many).word) == ("indicated", "same direction")
    monkeypatch.setitem(stats.ENOUGH, of, least - 1)
    assert verdict(few).word == "same direction"


@pytest.mark.parametrize("of", ["steps", "blocks"])
def test_what_one_launch_has_many_of_never_decides(of: str) -> None:
    assert verdict(claim("ordering", 1.0, 0.0, Value(1.0, 0.9, 1.1, 10_000, of))).word == "indicated"


def test_partly_is_up_to_a_stated_multiple_of_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = claim("absolute", 10.0, 1.0, three(11.5, 0.1))
    assert verdict(outside).word == "partly"
    monkeypatch.setattr(claims, "PARTLY", 1.0)
    assert verdict(outside).word == "not reproduced"


def test_a_ratio_is_as_far_off_when_it_is_half_as_when_it_is_double() -> None:
    low, high = claim("ratio", 4.0, 1.0, None).band()
    assert (low, high) == (2.0, 8.0)


SMALL = {"workers": 99}  # of a paper whose scale nothing here has


def test_a_reduced_scale_stands_above_every_table(tmp_path: Path) -> None:
    for ours in (three(1.0), Value(1.0), None):
        judged = verdict(claim("ordering", 1.0, 0.0, ours), on(tmp_path, None), SMALL)
        table = verdicts.as_table([("fig3", judged)])
        assert table.title == "a: reduced scale: workers 2 instead of 99"
        assert table.texts()[0][-1] == "a"


def test_the_scale_is_that_of_the_runs_that_a_claim_reads(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config())
    synthetic.timed(store, synthetic.config(workers=3))
    frames, _ = from_attempts(store.all_valid())

    def of_workers(frames: Frames, workers: int) -> Value:
        reads(frames.runs["key"][frames.runs["workers"] == workers])
        return three(1.0)

    scales = [
        verdict(replace(claim("ordering", 1.0, 0.0, None), ours=of_workers, of=of), frames, SMALL).scale
        for of in ((2,), (3,))
    ]
    assert scales == [f"reduced scale: workers {each} instead of 99" for each in (2, 3)]


@pytest.mark.parametrize("kind", ["absolute", "ratio"])
def test_a_number_is_not_comparable_at_a_reduced_scale_but_ours_is_shown(
    kind: ClaimKind, tmp_path: Path
) -> None:
    accuracy = claim(kind, 92.99, 0.6, three(92.9, 0.1))
    assert verdict(accuracy, on(tmp_path, None)).word == "reproduced"
    reduced_ = verdict(accuracy, on(tmp_path / "small", None), SMALL)
    assert told(reduced_) == ("not comparable (about the paper's scale, and this one is reduced)")
    assert "92.9 ms" in verdicts.ours_text(reduced_)


def on(tmp_path: Path, gpu: str | None, where: str = "local", link: str = "nvlink", **more: Any) -> Frames:
    config = synthetic.config()
    link_to = config["cluster"]["link"] | {"name": link}
    config["cluster"] = config["cluster"] | {"where": where, "link": link_to}
    attempt = synthetic.timed(
        Store(tmp_path / str(gpu) / where / link / str(len(more))), config, gpu=gpu, **more
    )
    return from_attempts([attempt])[0]


A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.usefixtures("one_launch_decides")
def test_a_claim_about_an_accelerator_is_judged_on_that_accelerator_only(tmp_path: Path) -> None:
    speed = claim("ratio", 16.86, 0.1, three(16.0), accelerator="A100", timed=True)
    assert verdict(speed, on(tmp_path, A100)).word == "reproduced"
    assert told(verdict(speed, on(tmp_path, "NVIDIA H200"))) == (
        "not comparable (about A100; measured on NVIDIA H200)"
    )
    assert verdict(speed, on(tmp_path, A100, "virtual")).word == "not comparable"
    assert verdict(speed, on(tmp_path, A100), SMALL).word == "not comparable"


@pytest.mark.usefixtures("one_launch_decides")
def test_a_cpu_never_refutes_a_claim_about_gpus(tmp_path: Path) -> None:
    dominates = claim("ordering", 70.9, 0.0, three(-50.0, 1.0), accelerator=claims.ANY_GPU, timed=True)
    assert told(verdict(dominates, on(tmp_path, None))) == "not comparable (about GPUs; measured on a CPU)"
    assert verdict(dominates, on(tmp_path, "NVIDIA H200")).word == "other direction"
    assert told(verdict(dominates, on(tmp_path, "NVIDIA H200", "virtual"))) == "other direction"


@pytest.mark.usefixtures("one_launch_decides")
def test_a_claim_about_a_link_is_judged_over_that_link_only(tmp_path: Path) -> None:
    longer = claim("ordering", 15.62, 0.0, three(3.0), link="NVLink", timed=True)
    assert verdict(longer, on(tmp_path, A100)).word == "same direction"
    assert told(verdict(longer, on(tmp_path, A100, link="pcie"))) == (
        "not comparable (about NVLink; measured over pcie)"
    )
    assert verdict(longer, on(tmp_path, A100, "virtual")).word == "not comparable"
    mislabelled = on(tmp_path, A100, machine={"mismatch": ["joined by SYS"]})
    assert verdict(longer, mislabelled).word == "not comparable"


@pytest.mark.usefixtures("one_launch_decides")
def test_times_of_virtual_ranks_are_called_simulated(tmp_path: Path) -> None:
    frames = on(tmp_path, "NVIDIA H200", "virtual")
    timed = claim("ordering", 1.0, 0.0, three(1.0), timed=True)
    accuracy = claim("ordering", 1.0, 0.0, three(1.0))
    assert "simulated" not in verdicts.ours_text(verdict(accuracy, frames))
    assert ", simulated)" in verdicts.ours_text(verdict(timed, frames))


def test_what_follows_from_the_authors_logs_is_re_derived_or_not() -> None:
    """Whatever runs we have, which it does not use."""
    windows = Value(7.2, 7.1, 7.3, 130, "windows")
    held = claim("ratio", 7.25, 0.05, windows, accelerator="A100", rederived=True)
    assert told(verdict(held, declared=SMALL)) == "re-derived"
    stated = claim("ordering", "stated", 50.0, three(94.0, 1.0), rederived=True)
    assert told(verdict(stated)) == "re-derived"
    assert verdict(claim("ratio", 4.67, 0.05, windows, rederived=True)).word == "corrected"
    few = windows._replace(n=29)
    assert verdict(claim("ratio", 7.25, 0.05, few, rederived=True)).word == "indicated"


def test_records_that_must_not_be_compared_are_refused_with_the_reason() -> None:
    def ours(frames: Frames) -> Value:
        raise Mixed("they differ in precision (fp32, tf32)")

    mixed = Claim("text", 1.0, "ms", "source", "ordering", 0.0, "reason.", ours)
    assert told(verdict(mixed)) == "not comparable (they differ in precision (fp32, tf32))"


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (Value(391.0, n=3), "same direction (so from step 391 of 3,900 on)"),
        (Value(math.inf, n=3), "same direction (not so at the end of every run)"),
        (None, "same direction"),
    ],
)
def test_an_ordering_that_depends_on_the_horizon_says_from_which_on(
    at: Value | None, text: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    synthetic.learned(store, synthetic.learning_config())
    frames, _ = from_attempts(store.all_valid())
    ordering = claim("ordering", 1.0, 0.0, three(1.0), flips_at=lambda frames: at)
    assert told(verdict(ordering, frames)) == text


def learned(tmp_path: Path, **changes: Any) -> Frames:
    store = Store(tmp_path)
    for method in ("dense", "topk"):
        base = synthetic.config(method)
        task = base["task"] | {"batch_size": 128, "lr_milestones": [81, 122, 155]}
        synthetic.learned(store, base | {"workers": 8, "task": task} | changes)
    return from_attempts(store.all_valid())[0]


PAPER: dict[str, Any] = {
    "task.name": "vgg16_cifar10", "task.batch_size": 128, "workers": 8, "steps_total": 7800,
    "method.density": 0.001, "method.density_warmup": "[0.015625, 0.004]",
    "task.lr_milestones": "[81, 122, 155]", "precision": {"cpu": "fp32", "cuda": "tf32"},
}  # fmt: skip


def test_the_scale_is_told_from_the_records_and_not_from_the_profile(tmp_path: Path) -> None:
    train = {"epochs": 20, "steps": 7800, "validate": "epoch"}
    assert reduced(learned(tmp_path / "a", train=train), PAPER) == ""
    short = learned(tmp_path / "b", train=train | {"epochs": 2, "steps": 98}, precision="fp64")
    assert reduced(short, PAPER) == (
        "reduced scale: steps 98 instead of 7,800, precision fp64 instead of fp32"
    )
    assert reduced(empty(), PAPER) == ""


@pytest.mark.parametrize("column", sorted(PAPER))
def test_each_declared_field_counts(tmp_path: Path, column: str) -> None:
    frames = learned(tmp_path, train={"epochs": 20, "steps": 7800, "validate": "epoch"})
    other = {"task.name": "x", "precision": "fp64"}.get(column, 7)
    runs = frames.runs.assign(**{column: pd.Series([other] * 2, dtype=object)})
    assert SCALE_NAMES[column] in reduced(frames._replace(runs=runs), PAPER)


def test_the_declared_scale_is_what_the_recipe_resolves_to() -> None:
    for device in ("cpu", "cuda"):
        recipe = compose.resolve(["recipe=yoon2022", "method=topk", f"device={device}"])
        row = flatten(recipe)
        row["steps_total"] = row["train.epochs"] * yoon2022.STEPS_PER_EPOCH
        frames = empty()._replace(runs=pd.DataFrame([row]))
        for declared in (yoon2022.TIMING_SCALE, yoon2022.TRAINING_SCALE):
            assert {*declared} - {EXAMPLES, "task.smoothing"} <= set(row)  # which this task has not
            assert reduced(frames, declared) == ""


def test_the_tolerance_follows_from_the_authors_replicates() -> None:
    """Two pairs: t of 2 degrees of freedom is 4.303, and a pair's deviation is its difference / sqrt(2)."""
    ends = {"val_top1": ("yoon2022.top1", 0.005), "val_loss": ("yoon2022.val-loss", 0.0005)}
    for column, (published, rounding) in ends.items():
        pairs = value("yoon2022.replicates")[column][8]
        squares = sum((a - b) ** 2 for a, b in pairs.values()) / 4
        assert yoon2022.spread(column) == pytest.approx(4.302653 * math.sqrt(squares), rel=1e-6)
        assert yoon2022.gap_spread(column) == pytest.approx(math.sqrt(2) * yoon2022.spread(column))
        for method, (first, _) in pairs.items():  # the published run is the first of its pair
            assert first == pytest.approx(value(published)[method], abs=rounding)


@pytest.mark.parametrize("item", sorted(figures.shipped()))
def test_every_claim_says_where_its_number_is_from_and_without_runs_it_is_not_run(item: str) -> None:
    judged = figures.judge(item, empty())
    assert {each.word for each in judged if not each.claim.rederived} <= {"not run"}
    assert all(each.claim.source and each.claim.reason.endswith(".") for each in judged)
    assert len({each.claim.text for each in judged}) == len(judged)


def test_what_is_measured_is_a_function_of_frames_and_its_arguments() -> None:
    stated = claim("ordering", None, 0.0, None)
    measured = replace(stated, ours=lambda frames, low, high: Value(5.0, low, high, 3), of=(4.0, 6.0))
    assert verdict(measured).word == "holds"


def words(item: str, frames: Frames) -> dict[str, str]:
    return {judged.claim.id: judged.word for judged in figures.judge(item, frames)}


def test_the_verdict_on_random_k_flips_when_the_curves_flip(tmp_path: Path) -> None:
    frames, _ = from_attempts(synthetic.item_store(tmp_path, seeds=3).all_valid())
    frames = restrict(frames, list(frames.runs["key"][frames.runs["workers"] == 8]))
    claim = "fig3.randomk-ends-below"
    assert words("fig3", frames)[claim] == "same direction"
    swap = {"topk": "randomk", "randomk": "topk", "dense": "dense"}
    swapped = frames.runs.assign(**{"method.name": frames.runs["method.name"].map(swap)})
    assert words("fig3", frames._replace(runs=swapped))[claim] == "other direction"


@pytest.mark.usefixtures("one_launch_decides")
def test_the_verdict_on_speed_flips_when_top_k_gets_faster(tmp_path: Path) -> None:
    claim = "speed.faster.dense-topk"
    for slow, expected in ((1.0, "same direction"), (0.5, "other direction")):
        store = Store(tmp_path / expected)
        timing = {"mode": "production", "warmup_steps": 4, "span_steps": 0}
        for seed in range(3):
            for method, factor in (("dense", 1.0), ("topk", slow)):
                config = synthetic.config(method, timing=timing, seed=seed)
                synthetic.timed(store, config, slow=factor, gpu=A100)
        frames, _ = from_attempts(store.all_valid())
        assert words("speed", frames)[claim] == expected


@pytest.mark.usefixtures("one_launch_decides")
def test_the_verdict_on_compression_flips_when_selection_dominates(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        synthetic.timed(store, synthetic.config("topk", seed=seed), gpu=A100)
    frames, _ = from_attempts(store.all_valid())
    claim = "fig4.compression-dominates"
    assert words("fig4", frames)[claim] == "other direction"
    more = 10 * frames.steps["select_s"]
    steps = frames.steps.assign(select_s=more, step_s=frames.steps["step_s"] + 0.9 * more)
    assert words("fig4", frames._replace(steps=steps))[claim] == "same direction"
