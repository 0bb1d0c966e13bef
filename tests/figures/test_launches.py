"""What takes turns is launched several times: how often, in which order, for how long."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.records.configs import run_id
from experiments.commands import reproduce
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.plan import PlannedRun
from experiments.figures.runs import LAUNCHES, MORE_LAUNCHES, configs_of, more_configs_of
from tests.analysis import synthetic


def test_every_launch_of_one_number_comes_before_those_of_the_next() -> None:
    """So that the launches of one picture are spread over the time that all take."""
    found = configs_of("slow-links", "laptop")
    timed = [config for config in found if config.variants]
    assert [config.seed for config in timed] == [seed for seed in (0, 1, 2) for _ in range(len(timed) // 3)]


def test_launches_share_the_time_that_an_item_gives_to_its_turns() -> None:
    base, more = configs_of("crossover", "laptop"), more_configs_of("crossover", "laptop")
    assert (len(base), len(more)) == (len(LAUNCHES["laptop"]), len(MORE_LAUNCHES["laptop"]))
    assert {config.alternate.limit_min for config in (*base, *more)} == {4 / 3}
    assert len({run_id(config) for config in (*base, *more)}) == 5


def test_who_asks_for_a_seed_gets_one_launch() -> None:
    (only,) = configs_of("crossover", "laptop", ["seed=7"])
    assert only.seed == 7
    assert more_configs_of("crossover", "laptop", ["seed=7"]) == []


def begun(folders: Folders, config: Config, ago_min: float) -> None:
    at = datetime.now(timezone.utc) - timedelta(minutes=ago_min)
    attempt = synthetic.made(folders.store, config.as_dict())
    attempt.update(started=at.strftime("%Y-%m-%dT%H:%M:%SZ"))


@pytest.mark.parametrize(
    ("ago_min", "is_due"),
    [((), True), ((1.0,), True), ((29.0, 28.0), True), ((45.0,), False), ((45.0, 10.0), False)],
)
def test_launches_of_another_occasion_wait_for_it(
    ago_min: tuple[float, ...], is_due: bool, tmp_path: Path
) -> None:
    folders, configs = Folders(tmp_path), configs_of("fig4-fast", "laptop")
    for config, ago in zip(configs, ago_min, strict=False):
        begun(folders, config, ago)
    due = reproduce._due([PlannedRun(config, None) for config in configs], folders)
    assert (due is not None) == is_due
    if due:
        least = 30 - max(ago_min, default=0.0)
        wait = (due - datetime.now().astimezone()).total_seconds() / 60
        assert wait == pytest.approx(least, abs=0.2)


def test_launches_are_drawn_after_each_and_all_else_is_carried_out_together() -> None:
    timed = [PlannedRun(config, None) for config in configs_of("slow-links", "laptop")]
    rounds = reproduce.in_rounds(timed)
    assert [{run.config.seed for run in each} for each in rounds] == [{0}, {1}, {2}]
    assert [run for each in rounds for run in each] == timed
    trained = [PlannedRun(config, None) for config in configs_of("fig3", "laptop")]
    (together,) = reproduce.in_rounds(trained)
    assert [run.config.seed for run in together] == sorted(run.config.seed for run in trained)
    assert reproduce.in_rounds([]) == [[]]


def test_what_is_there_is_drawn_with_the_first_run_and_then_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, drawn = Folders(tmp_path), list[list[str]]()

    def draw_local(item: str, profile: str, names: list[str], _: Folders) -> SimpleNamespace:
        drawn.append(names)
        return SimpleNamespace(picture=f"{item}-{profile}.png")

    monkeypatch.setattr(reproduce, "draw_local", draw_local)
    planned = [PlannedRun(config, None) for config in configs_of("local-loss", "smoke", [])]
    seconds = iter(range(0, 40 * len(planned), 40))  # a run every 40 s, and a picture a minute at most
    monkeypatch.setattr(reproduce, "monotonic", lambda: next(seconds))
    early = reproduce.EarlyPictures("local-loss", "smoke", planned, [], folders)
    for run in planned:
        synthetic.ended(folders.store, run.config.as_dict(), 80.0, 0.5)
        early.draw()
    assert len(planned) > 3
    assert [len(names) for names in drawn] == [*range(1, len(planned), 2)]  # the last is for all


def test_an_early_picture_that_fails_is_told_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("dense")

    monkeypatch.setattr(reproduce, "draw_local", broken)
    planned = [PlannedRun(config, None) for config in configs_of("local-loss", "smoke", [])]
    early = reproduce.EarlyPictures("local-loss", "smoke", planned, [], folders := Folders(tmp_path))
    synthetic.ended(folders.store, planned[0].config.as_dict(), 80.0, 0.5)
    early.draw()
    assert f"no picture of 1 of {len(planned)} runs: 'dense'" in capsys.readouterr().err


def test_nothing_is_drawn_again_of_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders(tmp_path)
    monkeypatch.setattr(reproduce, "draw_local", lambda *_: pytest.fail("drawn"))
    (planned,) = reproduce.in_rounds([PlannedRun(config, None) for config in configs_of("fig3", "laptop")])
    synthetic.ended(folders.store, planned[0].config.as_dict(), 80.0, 0.5)
    reproduce.EarlyPictures("fig3", "laptop", planned, [], folders).draw()


def test_jobs_of_a_cluster_are_submitted_at_once() -> None:
    queued = [PlannedRun(config, None) for config in configs_of("fig4", "laptop", ["cluster=generic_slurm"])]
    assert len(queued) == 3
    assert reproduce.in_rounds(queued) == [queued]
