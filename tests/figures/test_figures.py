"""Every item draws from records and from Parquet, the same bytes each time, and says what its numbers are.

`make figures` draws all of them from the shipped records (tests/commands/test_redraw.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.pictures import style
from analysis.records.frames import Frames, empty_frames, query_runs
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.store import Store
from experiments import figures
from experiments.config.run import Run
from experiments.figures.figure import file_prefix
from tests.analysis import synthetic
from tests.conftest import Command, loaded_by, refused
from tests.figures.made_up import PROFILES, page

ITEMS = sorted(figures.repository_items())
PUBLISHED = [item for item in ITEMS if not figures.load(item).needs_runs]
TIMED = {  # the mode of the runs that show what a step takes
    "serialised": ("fig1", "fig4", "fig4-fast", "straggler", "eghlidi-table2"),
    "production": ("speed", "speed-fast", "speed-protocol", "slow-links"),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return synthetic.frames_of(synthetic.item_store(tmp_path_factory.mktemp("runs"), seeds=3))


def own_runs(frames: Frames, item: str) -> Frames:
    """Return the runs of fig3 or fig4, as the caller of an item picks them by key."""
    return query_runs(frames, f"`timing.mode` == 'serialised' and workers == {8 if item == 'fig3' else 2}")


def with_lateness(frames: Frames) -> Frames:
    """Return the frames with a last rank that is late by another time in each step."""
    steps = frames.steps
    late_s = (steps["rank"] == 1) * (1 + steps["step"] % 7) * 1e-3
    return frames._replace(steps=steps.assign(late_s=late_s))


@pytest.mark.parametrize("item", ["fig3", "fig4", "speed-logs"])
def test_an_item_draws_from_parquet_and_the_same_records_give_the_same_bytes(
    item: str, everything: Frames, tmp_path: Path
) -> None:
    draw = figures.load(item).draw
    frames = empty_frames() if item in PUBLISHED else own_runs(everything, item)
    write_parquet(frames, tmp_path)
    assert all(axes.has_data() for axes in draw(read_parquet(tmp_path), "laptop").axes)
    pictures = [style.save_png_pdf_svg(draw(frames, "laptop"), tmp_path, name) for name in ("a", "b")]
    for suffix in (".png", ".pdf", ".svg"):
        first, second = (path.with_suffix(suffix).read_bytes() for path in pictures)
        assert first == second
    assert not list(tmp_path.glob(".*")), "a half-written file stays"


def test_an_unknown_item_or_profile_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no item 'fig44'.*fig4.*speed"):
        figures.load("fig44")
    with pytest.raises(ValueError, match="no profile 'huge'; there are: smoke, laptop, paper"):
        figures.load("fig4").runs("huge")


def test_two_files_of_one_item_are_refused_with_both_paths(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_shared", "_yoon2022_part", "__init__", "yoon2022_fig4"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert list(figures.files_by_item()) == ["fig4"]
    (tmp_path / "lin2018_fig4.py").touch()
    both = (f"{tmp_path}/lin2018_fig4.py", f"{tmp_path}/yoon2022_fig4.py")
    refused(here("figures", "fig4"), "item 'fig4'", *both, "ask for lin2018/fig4 or yoon2022/fig4")
    assert list(figures.files_by_item()) == ["lin2018/fig4", "fig4"]  # what does not ask for it goes on
    assert (figures.find_item("yoon2022/fig4"), figures.find_item("lin2018/fig4")) == ("fig4", "lin2018/fig4")
    assert figures.item_of_file_prefix_or_itself(file_prefix("lin2018/fig4")) == "lin2018/fig4"


def test_listing_and_loading_items_needs_no_torch() -> None:
    load = f"from experiments import figures; [figures.load(item) for item in {ITEMS}]"
    assert "torch" not in loaded_by(load)


@pytest.mark.parametrize("profile", PROFILES)
def test_runs_of_every_item_are_distinct_overrides(profile: str) -> None:
    for item in ITEMS:
        runs = [Run.coerce(run).to_words() for run in figures.load(item).runs(profile)]
        assert len({tuple(run) for run in runs}) == len(runs), item
        for run in runs:
            assert f"profile={profile}" in run
            names = [override.partition("=")[0] for override in run]
            assert len(set(names)) == len(names), (item, "an override given twice")
            assert "timing.mode" in names


def test_nothing_is_drawn_of_nothing_and_the_page_still_says_so() -> None:
    for item in ITEMS:
        if item not in PUBLISHED:
            with pytest.raises(ValueError, match="nothing to draw"):
                figures.load(item).draw(empty_frames(), "laptop")
            note = "not run" if figures.load(item).claims() else "Nothing here is judged"
            assert note in page(item, empty_frames()), item
            assert {verdict.word for verdict in figures.load(item).judge(empty_frames())} <= {"not run"}, item


def test_simulated_times_are_labelled_in_picture_caption_and_tables(tmp_path: Path) -> None:
    for mode, items in TIMED.items():
        store = Store(tmp_path / mode)
        for method in ("dense", "topk", "topk fused", "randomk"):
            name, _, select = method.partition(" ")
            timing = {"mode": mode, "warmup_steps": 4, "span_steps": 2}
            config = synthetic.config(name, timing=timing, select=select or "torch")
            config["cluster"]["where"] = "virtual"
            synthetic.timed(store, config, gpu="NVIDIA H200")
        frames = with_lateness(synthetic.frames_of(store))
        for item in items:
            axes = figures.load(item).draw(frames, "paper").axes
            assert any("simulated" in panel.get_xlabel() + panel.get_ylabel() for panel in axes), item
            text = page(item, frames, "paper")
            assert "*Simulated* times" in text
            assert ", simulated)" in text or not figures.load(item).claims()


def test_a_machine_that_is_not_as_it_was_named_is_told_once(tmp_path: Path) -> None:
    """launch.on_mismatch=label lets a run go on; whoever reads its figure must hear of it."""
    store, why = Store(tmp_path), "link=nvlink was asked for, but workers 0 and 1 are joined by SYS"
    for method in ("dense", "topk", "randomk"):
        synthetic.timed(store, synthetic.config(method), machine={"mismatch": [why]})
    text = page("fig4", synthetic.frames_of(store), "paper")
    told = why.replace("link=nvlink", "NVLink")
    assert text.count(f"*Not the machine that was named*: {told}.") == text.count(told) == 1
