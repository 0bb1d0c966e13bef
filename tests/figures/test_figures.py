"""Every item draws from records and from Parquet, the same bytes each time, and says what its numbers are."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.pictures import style
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, empty, restrict
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.store import Store
from experiments import figures
from experiments.config.run import Run
from tests.analysis import synthetic
from tests.conftest import Command, loaded_by, refused

ITEMS = sorted(figures.shipped())
# Of runs that these are not like; each has tests of its own.
APART = (
    "crossover", "crossover-measured", "distance", "eghlidi-table1", "internet-loss", "link-model",
    "local-density", "local-loss", "local-why", "shi-bound", "shi-convergence", "shi-distribution",
    "shi-scaling", "shi-selection", "stable-costs", "stable-dgc", "stable-heatmap", "stable-sweep",
    "stable-throughput", "time-to-accuracy", "utilisation",
)  # fmt: skip
MEASURED = [item for item in ITEMS if figures.has_runs(item) and item not in APART]
PROFILES = ("smoke", "laptop", "paper")
MODE = {
    "fig1": "serialised", "fig4": "serialised", "fig4-fast": "serialised", "speed": "production",
    "speed-fast": "production", "speed-protocol": "production", "slow-links": "production",
    "straggler": "serialised", "eghlidi-table2": "serialised",
}  # fmt: skip


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return from_attempts(synthetic.item_store(tmp_path_factory.mktemp("runs"), seeds=3).all_valid())[0]


def of_item(frames: Frames, item: str) -> Frames:
    """The item's own runs, as the caller of an item picks them by key."""
    runs = frames.runs
    mine = (
        runs["timing.mode"].eq(MODE[item]) & runs["workers"].eq(2) if item in MODE else runs["workers"].eq(8)
    )
    if item == "fig1":
        mine &= runs["method.name"].ne("randomk")
    found = restrict(frames, list(runs["key"][mine]))
    if item == "why-gap":  # its Top-k is denser
        found.runs["method.density"] = 0.01
    return with_lateness(found) if item == "straggler" else found


def with_lateness(frames: Frames) -> Frames:
    """With a last rank that is late by another time in each step."""
    steps = frames.steps
    late_s = (steps["rank"] == 1) * (1 + steps["step"] % 7) * 1e-3
    return frames._replace(steps=steps.assign(late_s=late_s))


def page(item: str, frames: Frames, profile: str) -> str:
    """The item's Markdown, with the verdicts on these frames."""
    numbers = figures.tables(item, frames) if len(frames.runs) else []
    return figures.page(item, frames, profile, item, figures.judge(item, frames), numbers)


def test_the_items_of_the_main_paper_are_there() -> None:
    assert {"fig1", "fig2", "fig3", "fig4", "speed"} <= set(ITEMS)


def test_an_unknown_item_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no item 'fig44'.*fig4.*speed"):
        figures.load("fig44")


def test_two_files_of_one_item_are_refused_with_both_paths(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_shared.py", "_yoon2022_part.py", "__init__.py", "yoon2022_fig4.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert list(figures.items()) == ["fig4"]
    (tmp_path / "lin2018_fig4.py").touch()
    both = (str(tmp_path / "lin2018_fig4.py"), str(tmp_path / "yoon2022_fig4.py"))
    refused(here("figures", "fig4"), "item 'fig4'", *both, "ask for lin2018/fig4 or yoon2022/fig4")
    assert list(figures.items()) == ["lin2018/fig4", "fig4"]  # what does not ask for it goes on
    assert (figures.find("yoon2022/fig4"), figures.find("lin2018/fig4")) == ("fig4", "lin2018/fig4")
    assert figures.stem("lin2018/fig4", "laptop") == "lin2018-fig4-laptop"
    assert figures.of_file("lin2018-fig4") == "lin2018/fig4"


def test_listing_and_loading_items_needs_no_torch() -> None:
    load = f"from experiments import figures; [figures.load(item) for item in {ITEMS}]"
    assert "torch" not in loaded_by(load)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("item", ITEMS)
def test_runs_are_distinct_overrides(item: str, profile: str) -> None:
    runs = [Run.of(run).words() for run in figures.load(item).runs(profile)]
    assert len({tuple(run) for run in runs}) == len(runs)
    for run in runs:
        assert f"profile={profile}" in run
        names = [override.partition("=")[0] for override in run]
        assert len(set(names)) == len(names), "an override given twice"
        assert "timing.mode" in names
        assert {"method", "variants"} & set(names)


def test_figures_share_their_runs() -> None:
    assert figures.load("fig2").runs("laptop") == figures.load("fig3").runs("laptop")
    assert figures.load("fig1").runs("laptop") == figures.load("fig4").runs("laptop")


def test_an_unknown_profile_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="no profile 'huge'; there are: smoke, laptop, paper"):
        figures.load("fig4").runs("huge")


@pytest.mark.parametrize("item", MEASURED)
def test_every_item_draws_from_records_and_from_parquet(
    item: str, everything: Frames, tmp_path: Path
) -> None:
    frames = of_item(everything, item)
    write_parquet(frames, tmp_path)
    for source in (frames, read_parquet(tmp_path)):
        figure = figures.load(item).draw(source, "laptop")
        assert all(axes.has_data() for axes in figure.axes)


def test_the_same_records_give_the_same_bytes(everything: Frames, tmp_path: Path) -> None:
    draw, frames = figures.load("fig4").draw, of_item(everything, "fig4")
    drawn = [style.save(draw(frames, "laptop"), tmp_path, name) for name in ("a", "b")]
    for suffix, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        first, second = (path.with_suffix(suffix).read_bytes() for path in drawn)
        assert first == second
        assert first.startswith(magic)
    assert not list(tmp_path.glob(".*"))  # no half-written file stays


@pytest.mark.parametrize("item", MEASURED)
def test_every_page_names_machine_data_workers_versions_and_n(item: str, everything: Frames) -> None:
    text = page(item, of_item(everything, item), "laptop")
    parts = ("synthetic CPU (2 cores)", "synthetic (digest 01234567)", "torch 0.0.0")
    assert all(part in text for part in (*parts, f"![{item}]({item}.png)"))
    if item in MODE:
        assert "n = 16 (first 4 dropped as warm-up)" in text
        assert "imulated" not in text
    else:
        assert "8 virtual workers x batch 16" in text
        assert "3900 optimiser steps" in text
        assert item in ("methods", "why-gap") or "3 seeds per method" in text


@pytest.mark.parametrize("item", [*MEASURED, *APART])
def test_nothing_is_drawn_of_nothing_and_the_page_still_says_so(item: str) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.load(item).draw(empty(), "laptop")
    assert ("not run" if figures.claims(item) else "Nothing here is judged") in page(item, empty(), "laptop")


@pytest.mark.parametrize("item", sorted(MODE))
def test_simulated_times_are_labelled_in_picture_caption_and_tables(item: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method, select in (("dense", "torch"), ("topk", "torch"), ("topk", "fused"), ("randomk", "torch")):
        config = synthetic.config(method, timing={"mode": MODE[item], "warmup_steps": 4, "span_steps": 2})
        virtual = {"cluster": config["cluster"] | {"where": "virtual"}}
        synthetic.timed(store, config | virtual | {"select": select}, gpu="NVIDIA H200")
    frames = with_lateness(from_attempts(store.all_valid())[0])
    figure = figures.load(item).draw(frames, "paper")
    labels = [text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())]
    assert any("simulated" in label for label in labels)
    assert "*Simulated* times" in figures.caption(item, frames, "paper")
    assert ", simulated)" in page(item, frames, "paper") or not figures.claims(item)


def test_a_machine_that_is_not_as_it_was_named_is_told(tmp_path: Path) -> None:
    """launch.on_mismatch=label lets a run go on; whoever reads its figure must hear of it, once."""
    store, why = Store(tmp_path), "link=nvlink was asked for, but workers 0 and 1 are joined by SYS"
    for method in ("dense", "topk", "randomk"):
        config = synthetic.config(method, timing={"mode": MODE["fig4"], "warmup_steps": 4, "span_steps": 2})
        synthetic.timed(store, config, machine={"mismatch": [why]})
    frames, _ = from_attempts(store.all_valid())
    assert figures.caption("fig4", frames, "paper").count(f"*Not the machine that was named*: {why}.") == 1
    assert page("fig4", frames, "paper").count(why) == 1


def test_ranks_with_different_clocks_meet_at_the_end_of_the_wait(everything: Frames) -> None:
    frames = of_item(everything, "fig1")
    topk = frames.runs["key"][frames.runs["method.name"] == "topk"].iloc[0]
    spans = figures.load("fig1").iteration(frames, topk)
    begins = spans.groupby("rank")["start_ms"].min()
    assert begins.max() < 1.0  # though their clocks are 100 s apart
    transfer = spans[spans["phase"] == "transfer"]["start_ms"]
    assert transfer.max() - transfer.min() < 1e-6
