"""time-to-accuracy: when whole trainings reach a share of what dense ends at, in seconds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from analysis.claims import Verdict
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.times.time_to_target import (
    TargetCrossing,
    find_target_crossing,
    seconds_to_target,
    speedup_to_target,
)
from experiments import figures
from experiments.figures import survey_time_to_accuracy as item
from tests.conftest import there
from tests.figures.made_up import RecordBuilder, settings_of

EVERY, EPOCHS = 49, 12
SEEDS = (0, 1, 2)
STEP_S = {item.DENSE: 0.4, item.TOPK: 0.1}
# % of top-1 that an epoch adds, up to the end
GAINS, ENDS = {item.DENSE: 10.0, item.TOPK: 8.0}, {item.DENSE: 80.0, item.TOPK: 90.0}
OF_METHOD = {
    item.DENSE: settings_of("method.name=dense method.scope=1.0 overlap=true select=auto"),
    item.TOPK: settings_of("""
        method.name=topk method.scope=global method.density=0.01 overlap=false select=fused
    """),
}
EVERYWHERE = """
task.name=slimvgg_cifar10 task.batch_size=32 workers=2 cluster.where=netns cluster.link.beta_s_per_byte=4e-8
train.validate_every=1 provenance.machine.link.together_gbit_s=0.15 task.lr_milestones='[35,53]'
train.validate=epoch timing.mode=production
"""


def frames(topk_ends: float = ENDS[item.TOPK], topk_step_s: float = STEP_S[item.TOPK]) -> Frames:
    """Return trainings of both methods, validated every epoch; seeds end 1 % apart."""
    link_and_length = {"cluster.link.name": item.LINK, "steps_total": EPOCHS * EVERY}
    records = RecordBuilder(settings_of(EVERYWHERE), link_and_length)
    ends = ENDS | {item.TOPK: topk_ends}
    step_s = STEP_S | {item.TOPK: topk_step_s}
    for (name, settings), seed in product(OF_METHOD.items(), SEEDS):
        epochs = [
            {
                "epoch": epoch, "step": epoch * EVERY, "wall_s": epoch * EVERY * step_s[name],
                "val_loss": 1.0, "val_top1": min(ends[name] + seed, GAINS[name] * epoch),
            }
            for epoch in range(1, EPOCHS + 1)
        ]  # fmt: skip
        records.add_run(f"{name}-{seed}", {**settings, "seed": seed}, epochs=epochs)
    return records.frames()


def judged(records: Frames) -> Verdict:
    """Return the verdict on the only claim."""
    (verdict,) = figures.load("time-to-accuracy").judge(records)
    return verdict


@pytest.mark.usefixtures("one_launch_decides")
def test_times_are_seconds_paired_by_seed_over_the_link_that_was_found() -> None:
    """79.4 % is there after 8 epochs of dense and 10 of Top-k, which are four times as short."""
    verdict = judged(frames())
    value = there(verdict.ours)
    assert value.value == pytest.approx(8 * 0.4 / (10 * 0.1))
    assert [value.low, value.high] == pytest.approx([7 * 0.4 / (10 * 0.1), 8 * 0.4 / (9 * 0.1)])
    assert there(judged(frames(topk_step_s=0.8)).ours).value == pytest.approx(8 * 0.4 / (10 * 0.8))
    assert verdict.claim.text.startswith("over 0.15 Gbit/s (asked: 0.2), Top-k")


def test_who_never_gets_there_is_not_sooner_and_is_named() -> None:
    never = frames(topk_ends=70.0)
    assert there(judged(never).ours).value == 0
    caption = figures.load("time-to-accuracy").caption(never, "laptop")
    assert "*Not all get there*: Top-k 0.01, fused with seed 0, Top-k 0.01, fused with seed 1 and" in caption
    assert "Not all" not in figures.load("time-to-accuracy").caption(frames(), "laptop")
    first = item.table(never)[0].frame.iloc[0]
    assert first[["Top-k 0.01, fused", "seeds that get there"]].to_list() == [None, "3 of 3 and 0 of 3"]


# --- when a curve gets somewhere


def test_the_first_step_that_is_there_counts_and_the_one_before_is_told() -> None:
    for curve, target, falls, expected in (
        ([50.0, 61.0, 59.0], 60, False, (10, 20)),
        ([3.0, 2.0, 2.5], 2.0, True, (10, 20)),
        ([5.0, 1.0, 1.0], 3, False, (0, 10)),
        ([1.0, 2.0, 2.0], 3, False, (30, np.inf)),
    ):
        assert find_target_crossing([10, 20, 30], curve, target, falls=falls) == expected


CERTAIN = Estimate(2.0, 1.9, 2.1, 50, "blocks")  # of step times
NEVER = TargetCrossing(900, np.inf)
LATE, EARLY = TargetCrossing(200, 300), TargetCrossing(100, 200)


def test_ratios_are_paired_by_seed() -> None:
    slow = {seed: TargetCrossing(200 * 2**seed - 10, 200 * 2**seed) for seed in SEEDS}
    fast = {seed: TargetCrossing(50 * 2**seed - 5, 50 * 2**seed) for seed in reversed(SEEDS)}
    value = there(speedup_to_target(slow, fast, CERTAIN))
    assert (value.value, value.n) == pytest.approx((8, 3))
    assert (
        there(speedup_to_target(slow, fast, Estimate(2.0))).low is None
    )  # of steps with an unknown interval
    for others in ({0: NEVER}, {1: TargetCrossing(0, 10)}):
        assert speedup_to_target({0: NEVER}, others, CERTAIN) is None


@pytest.mark.parametrize(
    ("slow", "fast", "expected"),
    [
        (LATE, EARLY, [3, 1.9 * 200 / 200, 2.1 * 300 / 100]),  # at the same validation of all seeds
        (LATE, TargetCrossing(0, 100), [6, 1.9 * 2, np.inf]),  # at the first validation: perhaps at once
        (LATE, NEVER, [0, 0, 2.1 * 300 / 900]),  # not there: perhaps after the last validation
        (NEVER, LATE, [np.inf, 1.9 * 900 / 300, np.inf]),
    ],
)
def test_seeds_are_uncertain_by_what_lies_between_validations(
    slow: TargetCrossing, fast: TargetCrossing, expected: list[float]
) -> None:
    value = there(speedup_to_target(dict.fromkeys(SEEDS, slow), dict.fromkeys(SEEDS, fast), CERTAIN))
    assert [value.value, value.low, value.high] == pytest.approx(expected)


def test_a_mean_time_needs_every_seed() -> None:
    seconds = there(seconds_to_target(dict.fromkeys(SEEDS, LATE), 0.5))
    assert seconds[:3] == pytest.approx((150, 100, 150))
    assert there(seconds_to_target({0: LATE}, 0.5)).low is None
    for incomplete in ({0: LATE, 1: NEVER}, {}):
        assert seconds_to_target(incomplete, 0.5) is None
