"""Variants that take turns are launched several times: how often, in which order, for how long."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.records.configs import run_id
from experiments import figures
from experiments.commands import reproduce
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.figures.figure import Figure
from experiments.figures.runs import LAUNCH_SEEDS, MORE_LAUNCH_SEEDS, additional_configs, required_configs
from tests.analysis import synthetic


def planned(item: str, profile: str = "laptop", *words: str) -> list[PlannedRun]:
    """Return the runs of an item."""
    return [PlannedRun(config, None) for config in required_configs(figures.load(item), profile, words)]


def seeds(runs: list[PlannedRun]) -> list[int]:
    """Return the number of the launch of each run."""
    return [run.config.seed for run in runs]


def test_launches_share_the_time_that_an_item_gives_to_its_turns() -> None:
    figure = figures.load("shi-scaling")
    base = required_configs(figure, "laptop")
    more = additional_configs(figure, "laptop")
    assert (len(base), len(more)) == (len(LAUNCH_SEEDS["laptop"]), len(MORE_LAUNCH_SEEDS["laptop"]))
    assert {config.alternate.limit_min for config in (*base, *more)} == {5 / 3}
    assert len({run_id(config) for config in (*base, *more)}) == 5
    (config,) = required_configs(figure, "laptop", ["seed=7"])  # who asks for one gets one
    assert config.seed == 7
    assert additional_configs(figure, "laptop", ["seed=7"]) == []


@pytest.mark.parametrize(
    ("ago_min", "is_due"),
    [((), True), ((1.0,), True), ((29.0, 28.0), True), ((45.0,), False), ((45.0, 10.0), False)],
)
def test_launches_of_another_occasion_wait_for_it(
    ago_min: tuple[float, ...], is_due: bool, tmp_path: Path
) -> None:
    folders, runs = ResultFolders(tmp_path), planned("fig4-fast")
    for run, ago in zip(runs, ago_min, strict=False):
        attempt = synthetic.made(folders.store, run.config.as_dict())
        attempt.update_manifest(started=f"{pd.Timestamp.now('UTC') - pd.Timedelta(minutes=ago):%FT%TZ}")
    due = reproduce.find_next_occasion(runs, folders)
    assert (due is not None) == is_due
    if due:
        wait = (due - datetime.now().astimezone()).total_seconds() / 60
        assert wait == pytest.approx(30 - max(ago_min, default=0.0), abs=0.2)


def test_launches_are_spread_and_drawn_after_each_and_all_else_is_carried_out_together() -> None:
    timed = planned("slow-links")
    rounds = reproduce.split_into_rounds(timed)
    assert [set(seeds(round_runs)) for round_runs in rounds] == [{0}, {1}, {2}]
    assert [run for round_runs in rounds for run in round_runs] == timed
    queued = planned("fig4", "laptop", "cluster=generic_slurm")  # jobs are submitted at once
    trained = planned("fig3")
    for runs in (trained, queued, []):
        assert reproduce.split_into_rounds(runs) == [runs]
    assert seeds(trained) == sorted(seeds(trained))


def test_what_is_there_is_drawn_with_the_first_run_and_then_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = list[int]()

    def draw_and_index_own_runs(
        figure: Figure, profile: str, names: list[str], _: ResultFolders
    ) -> SimpleNamespace:
        drawn.append(len(names))
        if len(names) == 4:
            raise KeyError("dense")
        return SimpleNamespace(picture=f"{figure.file_stem(profile)}.png")

    monkeypatch.setattr(reproduce, "draw_and_index_own_runs", draw_and_index_own_runs)
    folders, runs = ResultFolders(tmp_path), planned("local-loss", "smoke")
    seconds = count(0, 40)  # a run every 40 s, and a picture a minute at most
    monkeypatch.setattr(reproduce, "monotonic", lambda: next(seconds))
    early = None
    for run in runs:
        synthetic.ended(folders.store, run.config.as_dict(), 80.0, 0.5)
        early = early or reproduce.EarlyPictureDrawer(figures.load("local-loss"), "smoke", runs, [], folders)
        early.draw_if_more_runs()
    assert drawn == [*range(2, len(runs), 2)]  # not of the run that was there before; the last is for all
    assert f"no picture of 4 of {len(runs)} runs: 'dense'" in capsys.readouterr().err  # and ends no run
