"""scheduler-costs: steps and starts at three places, paired by launch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from analysis.records.frames import Frames
from experiments import figures
from experiments.commands import reproduce
from experiments.config.plan import PlannedRun
from experiments.figures import survey_scheduler_costs as item
from experiments.figures.runs import required_configs
from tests.conftest import Command, fine, refused, there
from tests.figures.made_up import TURNS, RecordBuilder, page, verdict

STEP_S = {item.HERE: 0.5, item.SLURM: 0.505, item.IMAGE: 0.53}  # in a SLURM job 1 % longer, in an image 5 %
START_S = {item.HERE: 6, item.SLURM: 9, item.IMAGE: 11}
LAUNCHES = 5


def frames(step_s: Mapping[str, float] = STEP_S) -> Frames:
    """Return five launches at each place, half an hour apart; later ones take longer at all places alike."""
    records = RecordBuilder(TURNS, {"workers": 2, "timing.mode": item.MODE, "cluster.link.name": "loopback"})
    for seed, (place, seconds), method in product(range(LAUNCHES), step_s.items(), item.METHODS):
        minute = f"2026-12-0{seed + 1}T10:00"
        settings = {
            **item.PLACES[place].columns, "seed": seed, "method.name": method, "variant": method,
            "group": f"{place}-{seed}", "run_id": f"{place}-{seed}",
            "created": f"{minute}:00Z", "started": f"{minute}:{START_S[place]:02d}Z",
            "provenance.slurm.SLURM_JOB_ID": None if place == item.HERE else str(100 + seed),
        }  # fmt: skip
        steps = 12 * [{"forward_s": seconds * (1 + 0.1 * seed)}]
        records.add_run(f"{place}-{seed}/{method}", settings, steps, steps, block_steps=3)
    return records.frames()


def test_places_are_compared_launch_by_launch() -> None:
    records = frames()
    assert item.measured_places(records) == [*item.PLACES]
    ratio = there(item.step_time_ratio_between_places(records, "topk", item.SLURM, item.HERE))
    assert ratio[:5] == pytest.approx((1.01, 1.01, 1.01, LAUNCHES, "launches"))  # a drift falls on all alike
    assert there(item.mean_step_ms(records, item.HERE, "dense")).value == pytest.approx(600)
    assert there(item.mean_start_seconds(records, item.SLURM)).value == pytest.approx(9)
    assert there(item.extra_start_seconds(records, item.IMAGE, item.SLURM)).value == pytest.approx(2)


def test_the_claims_are_about_what_slurm_adds_and_what_the_image_adds_to_that() -> None:
    records = frames()
    assert (
        verdict("scheduler-costs", records, "a step of dense takes as long in a SLURM job as").word == "holds"
    )
    of_image = verdict("scheduler-costs", records, "a step of Top-k takes as long in a SLURM job whose")
    assert (of_image.word, round(there(of_image.ours).value, 3)) == ("does not hold", round(0.53 / 0.505, 3))


def test_what_was_measured_so_far_is_drawn_and_told() -> None:
    text = page("scheduler-costs", frames())
    assert "in SLURM, in an image" in text
    assert "| 104 |" in text  # the job of the last launch
    partial = frames({item.IMAGE: 0.5})
    assert len(item.draw(partial, "laptop").axes) == 2
    assert "without SLURM (ms)" not in page("scheduler-costs", partial)


def test_runs_follow_each_other_in_an_order_that_the_seed_draws() -> None:
    planned = [
        PlannedRun(config, None) for config in required_configs(figures.load("scheduler-costs"), "laptop")
    ]
    assert reproduce.has_runs_here_and_on_slurm(planned)
    rounds = reproduce.split_into_single_runs(planned)
    assert {len(runs) for runs in rounds} == {1}
    assert [runs[0].config.seed for runs in rounds] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    orders = {
        seed: [
            (run.config.cluster.name, run.config.container.name)
            for (run,) in rounds
            if run.config.seed == seed
        ]
        for seed in range(3)
    }
    assert len({*map(frozenset, orders.values())}) == 1
    assert len({*map(tuple, orders.values())}) > 1
    assert reproduce.split_into_single_runs(planned[3:]) == [
        runs for runs in rounds if runs[0] in planned[3:]
    ]


def test_without_slurm_it_is_planned_and_neither_made_nor_submitted(here: Command, tmp_path: Path) -> None:
    words = ("scheduler-costs", "profile=smoke")
    planned = fine(here("plan", *words, PATH=str(tmp_path)))
    assert "on this machine: 2 runs" in planned.stdout
    assert "on devcluster: 4 runs" in planned.stdout
    assert "there is none on this machine" in planned.stderr
    said = here("reproduce", *words, PATH=str(tmp_path))
    refused(said, "4 of the runs can't be made here", "make slurm-up", "figures")
    assert not [*tmp_path.rglob("run.json")]  # nor is any of the others
    refused(here("submit", *words), "`reproduce` makes all")
