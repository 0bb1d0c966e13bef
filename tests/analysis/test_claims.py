"""Verdicts: each word is reached by data for which it is right, and a flip of the data flips the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest

from analysis import claims, verdicts
from analysis.claims import Claim, Verdict, judge_claims
from analysis.evidence import EXAMPLES_COLUMN, SCALE_NAMES, describe_scale_differences
from analysis.records.attempts import load_valid_attempts
from analysis.records.configs import flatten
from analysis.records.frames import Frames, empty_frames, note_read_run_keys
from analysis.records.store import Store
from analysis.stats import Estimate, IncomparableRunsError
from experiments import figures
from experiments.config import compose
from experiments.figures import _yoon2022 as yoon2022
from tests.analysis import synthetic


def claim(
    kind: Any, paper: float | str | None, tolerance: float, ours: Estimate | None, **more: Any
) -> Claim:
    return Claim("text", paper, "ms", "source", kind, tolerance, "reason.", lambda frames: ours, **more)


def verdict(
    judged: Claim, frames: Frames | None = None, declared: Mapping[str, Any] = MappingProxyType({})
) -> Verdict:
    return judge_claims([judged], frames or empty_frames(), declared)[0]


def word_and_reason(judged: Verdict) -> str:
    """Return the word and what must be read with it."""
    return f"{judged.word} ({judged.explanation})" if judged.explanation else judged.word


def three(value: float, half: float = 0.0) -> Estimate:
    """Return a value with an interval over three runs."""
    return Estimate(value, value - half, value + half, 3)


# kind, published number, tolerance; our value, the half-width of its interval, and the word
WORDS = """
absolute  92.99    0.6   92.5   0.1  reproduced
absolute  92.99    0.6   92.5   0.3  inconclusive
absolute  92.99    0.6   94.0   0.5  inconclusive
absolute  92.99    0.6   92.0   0.1  partly
absolute  92.99    0.6   92.0   0.3  not reproduced
absolute  92.99    0.6   80.0   1.0  not reproduced
absolute  92.99    0.6   99.0   1.0  not reproduced
ratio       4.0    1.0    2.2   0.1  reproduced
ratio       4.0    1.0    7.8   0.1  reproduced
ratio       4.0    1.0    2.0   0.1  inconclusive
ratio       4.0    1.0    8.2   0.1  partly
ratio       4.0    1.0    1.2   0.1  not reproduced
ordering  20.54    5.0   12.0   1.0  same direction
ordering  20.54    5.0    5.5   1.5  inconclusive
ordering  20.54    5.0    3.0   1.0  partly
ordering  20.54    5.0   -6.6   1.0  other direction
ordering  20.54    0.0    0.0   0.0  inconclusive
ordering      -    0.0    1.0   0.5  holds
ordering      -    0.0   -1.0   0.5  does not hold
ordering      -    0.0    0.1   0.5  inconclusive
ordering      -    0.0    nan   0.0  inconclusive
ordering      -    5.0    3.0   0.5  does not hold
shape      1.47    2.0    1.5   1.0  reproduced
shape      1.47    2.0   -9.0   1.0  not reproduced
shape      1.47    2.0   12.0   1.0  not reproduced
limit         -    3.0    2.0   0.5  holds
limit         -    3.0    4.0   0.5  does not hold
"""


def test_each_word_is_reached_by_the_data_that_deserve_it() -> None:
    for row in WORDS.strip().splitlines():
        kind, paper, *numbers, word = re.split("  +", row)
        tolerance, ours, half = map(float, numbers)
        published = None if paper == "-" else float(paper)
        assert verdict(claim(kind, published, tolerance, three(ours, half))).word == word, row
    assert verdict(claim("ordering", "stated", 0.0, three(1.0, 0.5))).word == "holds"
    assert verdict(claim("absolute", 92.99, 0.6, None)).word == "not run"


def test_without_enough_independent_runs_it_is_indicated_and_where() -> None:
    for kind, paper, number, side in (
        ("absolute", 92.99, 92.5, "within the band"),
        ("absolute", 92.99, 99.0, "outside the band"),
        ("ordering", 1.0, 2.0, "in this direction"),
        ("ordering", 1.0, -2.0, "not in this direction"),
        ("limit", None, 7.0, "outside the band"),
    ):
        for ours in (Estimate(number), three(number)._replace(n=2), Estimate(number, n=5)):
            judged = verdict(claim(kind, paper, 1.0, ours))
            assert word_and_reason(judged) == f"indicated (n = {ours.n}; {side})"


def test_a_verdict_needs_three_runs_or_five_launches_and_what_one_launch_has_many_of_never_decides() -> None:
    for of, n, word in (
        ("runs", 2, "indicated"), ("runs", 3, "same direction"),
        ("launches", 4, "indicated"), ("launches", 5, "same direction"),
        ("steps", 10_000, "indicated"), ("blocks", 10_000, "indicated"),
    ):  # fmt: skip
        assert verdict(claim("ordering", 1.0, 0.0, Estimate(1.0, 0.9, 1.1, n, of))).word == word, (of, n)


SMALL = {"workers": 99}  # of a paper whose scale nothing here has


def test_the_scale_is_that_of_the_runs_that_a_claim_reads() -> None:
    def of_key(frames: Frames, key: str) -> Estimate:
        note_read_run_keys([key])
        return three(1.0)

    frames = empty_frames()._replace(runs=pd.DataFrame({"key": ["a", "b"], "group": None, "workers": [2, 3]}))
    reading = replace(claim("ordering", 1.0, 0.0, None), compute=of_key)
    judged = [verdict(replace(reading, arguments=(key,)), frames, SMALL).scale for key in "ab"]
    assert judged == [f"reduced scale: workers {workers} instead of 99" for workers in (2, 3)]


A100, H200 = "NVIDIA A100-SXM4-40GB", "NVIDIA H200"


def on(
    folder: Path, gpu: str | None = None, where: str = "local", link: str = "nvlink", **more: Any
) -> Frames:
    """Return a run on this machine."""
    config = synthetic.config()
    config["cluster"] |= {"where": where, "link": config["cluster"]["link"] | {"name": link}}
    return load_valid_attempts([synthetic.timed(Store(folder), config, gpu=gpu, **more)])[0]


RATIO = claim("ratio", 16.86, 0.1, three(16.0), accelerator="A100", timed=True)
SLOWER = claim("ordering", 70.9, 0.0, three(-50.0, 1.0), accelerator=claims.ANY_GPU, timed=True)
LONGER = claim("ordering", 15.62, 0.0, three(3.0), link="NVLink", timed=True)
MACHINES: dict[str, tuple[Claim, Any, str]] = {
    "on the accelerator": (RATIO, {"gpu": A100}, "reproduced"),
    "on another": (RATIO, {"gpu": H200}, "not comparable (about A100; measured on NVIDIA H200)"),
    "simulated": (
        RATIO, {"gpu": A100, "where": "virtual"}, "not comparable (about A100; these times are simulated)",
    ),
    "a CPU never refutes": (SLOWER, {}, "not comparable (about GPUs; measured on a CPU)"),
    "any GPU": (SLOWER, {"gpu": H200}, "other direction"),
    "a simulated ordering": (SLOWER, {"gpu": H200, "where": "virtual"}, "other direction"),
    "over the link": (LONGER, {"gpu": A100}, "same direction"),
    "over another": (
        LONGER, {"gpu": A100, "link": "pcie"}, "not comparable (about NVLink; measured over PCIe 4.0)",
    ),
    "a simulated link": (
        LONGER, {"gpu": A100, "where": "virtual"}, "not comparable (about NVLink; these times are simulated)",
    ),
    "mislabelled": (
        LONGER, {"gpu": A100, "machine": {"mismatch": ["joined by SYS"]}},
        "not comparable (about NVLink; the machine is not the one that was named)",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("one_launch_decides")
def test_a_claim_about_a_machine_is_judged_on_that_machine_only(tmp_path: Path) -> None:
    for name, (stated, machine, word) in MACHINES.items():
        assert word_and_reason(verdict(stated, on(tmp_path / name, **machine))) == word, name
    reduced_scale = verdict(RATIO, on(tmp_path, A100), SMALL)
    reason = "about the paper's scale, and this one is reduced"
    assert word_and_reason(reduced_scale) == f"not comparable ({reason})"
    assert "16 ms" in verdicts.our_value_text(reduced_scale)  # ours is shown


@pytest.mark.usefixtures("one_launch_decides")
def test_times_of_virtual_ranks_are_called_simulated(tmp_path: Path) -> None:
    frames = on(tmp_path, H200, "virtual")
    for timed in (True, False):
        judged = verdict(claim("ordering", 1.0, 0.0, three(1.0), timed=timed), frames)
        assert (", simulated)" in verdicts.our_value_text(judged)) == timed


def test_what_follows_from_the_authors_logs_is_re_derived_or_not() -> None:
    """Whatever runs we have, which it does not use."""
    windows = Estimate(7.2, 7.1, 7.3, 130, "windows")
    for kind, paper, tolerance, ours, word in (
        ("ratio", 7.25, 0.05, windows, "re-derived"),
        ("ordering", "stated", 50.0, three(94.0, 1.0), "re-derived"),
        ("ratio", 4.67, 0.05, windows, "corrected"),
        ("ratio", 7.25, 0.05, windows._replace(n=29), "indicated"),
    ):
        follows = claim(kind, paper, tolerance, ours, accelerator="A100", rederived=True)
        assert verdict(follows, declared=SMALL).word == word


def test_records_that_must_not_be_compared_are_refused_with_the_reason() -> None:
    def ours(frames: Frames) -> Estimate:
        raise IncomparableRunsError("they differ in precision (fp32, tf32)")

    mixed = replace(claim("ordering", 1.0, 0.0, None), compute=ours)
    assert word_and_reason(verdict(mixed)) == "not comparable (they differ in precision (fp32, tf32))"


def test_an_ordering_that_depends_on_the_horizon_says_from_which_on(tmp_path: Path) -> None:
    frames = synthetic.frames_with(tmp_path, synthetic.learning_config())
    for settles_at, text in (
        (Estimate(391.0, n=3), "same direction (so from step 391 of 3,900 on)"),
        (Estimate(math.inf, n=3), "same direction (not so at the end of every run)"),
        (None, "same direction"),
    ):
        ordering = claim("ordering", 1.0, 0.0, three(1.0), settles_at=lambda frames, at=settles_at: at)
        assert word_and_reason(verdict(ordering, frames)) == text


PAPER: dict[str, Any] = {
    "task.name": "vgg16_cifar10", "task.batch_size": 128, "workers": 8, "steps_total": 7800,
    "method.density": 0.001, "method.density_warmup": "[0.015625, 0.004]",
    "task.lr_milestones": "[81, 122, 155]", "precision": {"cpu": "fp32", "cuda": "tf32"},
}  # fmt: skip


def test_the_scale_is_told_from_the_records_and_each_declared_field_counts() -> None:
    def difference(**changes: Any) -> str:
        runs = pd.DataFrame([PAPER | {"device": "cpu", "precision": "fp32"} | changes])
        return describe_scale_differences(empty_frames()._replace(runs=runs), PAPER)

    assert difference() == describe_scale_differences(empty_frames(), PAPER) == ""
    for column in PAPER:
        other = {"task.name": "x", "precision": "fp64"}.get(column, 7)
        assert SCALE_NAMES[column] in difference(**{column: other})
    assert difference(steps_total=98, precision="fp64") == (
        "reduced scale: steps 98 instead of 7,800, precision fp64 instead of fp32"
    )


def test_the_declared_scale_is_what_the_recipe_resolves_to() -> None:
    for device in ("cpu", "cuda"):
        recipe = compose.resolve(["recipe=yoon2022", "method=topk", f"device={device}"])
        row = flatten(recipe)
        row["steps_total"] = row["train.epochs"] * yoon2022.STEPS_PER_EPOCH
        frames = empty_frames()._replace(runs=pd.DataFrame([row]))
        for declared in (yoon2022.TIMING_SCALE, yoon2022.TRAINING_SCALE):
            assert {*declared} - {EXAMPLES_COLUMN, "task.smoothing"} <= set(row)  # which this task has not
            assert describe_scale_differences(frames, declared) == ""


def test_every_claim_says_where_its_number_is_from_and_without_runs_it_is_not_run() -> None:
    for item in figures.repository_items():
        judged = figures.load(item).judge(empty_frames())
        assert {each.word for each in judged if not each.claim.rederived} <= {"not run"}, item
        assert all(each.claim.source and each.claim.reason.endswith(".") for each in judged), item
        assert len({each.claim.text for each in judged}) == len(judged), item


def check_flip(claim: str, frames: Frames, other: Frames) -> None:
    """Check that the claim on a figure goes in the paper's direction, and on the other data does not."""
    for found, word in ((frames, "same direction"), (other, "other direction")):
        judged = figures.load(claim.partition(".")[0]).judge(found)
        assert [each.word for each in judged if each.claim.id == claim] == [word]


def test_the_verdict_on_random_k_flips_when_the_curves_flip(tmp_path: Path) -> None:
    configs = (
        synthetic.learning_config(method, seed)
        for method in ("dense", "topk", "randomk")
        for seed in range(3)
    )
    frames = synthetic.frames_with(tmp_path, *configs)
    swap = {"topk": "randomk", "randomk": "topk"}
    swapped = frames.runs.replace({"method.name": swap})
    check_flip("fig3.randomk-ends-below", frames, frames._replace(runs=swapped))
