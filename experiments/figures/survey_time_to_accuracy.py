"""Which method has an accuracy first? The trainings of fig3-slim against time, by link.

Not a figure of a paper. A training's steps are those of fig3-slim; what a step takes is measured on this
machine, and for other links put together from measured computing and selecting and a simulated exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records.frames import Frames, keys_of, remembered, restrict
from analysis.stats import Value, curve, final, slowdown, taken
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _predicted, papers
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig3_slim as slim
from experiments.figures import yoon2022_slow_links as slow_links
from experiments.figures._predicted import FAST, LINKS
from experiments.figures._reaching import all_reach, seconds_to, sooner
from experiments.figures._runs import variants
from experiments.figures.papers import claim

TITLE = "Validation accuracy against time, by link"
MODE = "serialised"  # which tells computing from selecting
# Name in fig3-slim -> the scheme by which it exchanges (`_predicted.SCHEMES`).
SCHEMES = {"dense": "dense", "topk": "topk", "topk-denser": "topk", "randomk": "randomk-hash"}
LOOPBACK, EMULATED = "loopback, measured", "1 Gbit/s, emulated, measured"
LEVELS = tuple(range(10, 100, 10))  # % top-1
SHOWN = 3  # of them, the highest that are reached
JUDGED = 70  # % top-1
JUDGED_ON = (  # link, and who is there before whom
    ("1 Gbit/s, simulated", "topk", "dense"), ("1 Gbit/s, simulated", "topk-denser", "dense"),
    (EMULATED, "topk", "dense"), (LOOPBACK, "dense", "topk"), (f"{FAST}, simulated", "dense", "topk"),
)  # fmt: skip


def runs(profile: str) -> list[Run]:
    """The trainings of fig3-slim, and one group of processes in which their steps take turns."""
    timed = yoon2022.timing_runs(profile, MODE, variants("slow-links-slim"), at="time-to-accuracy")
    return [*slim.runs(profile), *timed]


def more_runs(profile: str) -> list[Run]:
    """More seeds, and the step over a link that is really slow, which slow-links measures."""
    emulated = slow_links.slim_runs(profile) if profile != "smoke" else []
    return [*slim.more_runs(profile), *emulated]


class Parts(NamedTuple):
    """The runs by what they are for."""

    trained: Frames
    timed: Frames  # without an emulated link
    loopback: Frames
    emulated: Frames


@remembered
def parts_of(frames: Frames) -> Parts:
    of_steps = keys_of(frames, {"train.validate": "never"})
    emulated = keys_of(frames, {"cluster.where": "netns"})
    found = (
        keys_of(frames, {"train.validate": "epoch"}), set(of_steps) - set(emulated),
        set(of_steps) & set(keys_of(frames, {"cluster.where": "local"})), emulated,
    )  # fmt: skip
    return Parts(*(restrict(frames, keys) for keys in found))


@remembered
def step_s(frames: Frames, name: str) -> dict[str, float]:
    """Seconds of a step by link, the slowest simulated link first; then as it was measured."""
    of, found, method = parts_of(frames), dict[str, float](), slow_links.CURVES[name]
    own, dense = (_predicted.measured(of.timed, each) for each in (method, "dense"))
    if own and dense and (keys := slim.trainings(frames).get(name)):
        run = frames.runs.set_index("key").loc[keys[0]]
        elements, workers = int(run["parameters"]), int(run["workers"])
        density = 1.0 if name == "dense" else float(run["method.density"])
        for link, joined in LINKS.items():
            exchange = _predicted.exchange_s(SCHEMES[name], elements, density, workers, joined)
            # Computing is the same for all: dense's counts, else its noise would be the methods'.
            found[f"{link}, simulated"] = dense.compute_s + own.select_s + exchange
    for where, timed in ((LOOPBACK, of.loopback), (EMULATED, of.emulated)):
        if measured := taken(timed, yoon2022.keys(timed, method), "slowest"):
            found[where] = measured.value
    return found


def by_link(frames: Frames) -> dict[str, dict[str, float]]:
    """Link -> name -> seconds of a step; of what was trained and timed.

    Raises:
        ValueError: nothing was both.
    """
    found: dict[str, dict[str, float]] = {}
    for name in slim.trainings(frames):
        for link, seconds in step_s(frames, name).items():
            found.setdefault(link, {})[name] = seconds
    if not found:
        raise ValueError("nothing to draw: there is no training whose step was timed as well")
    return found


def shown(frames: Frames) -> list[int]:
    """The highest of LEVELS that a training of each seed of some method reaches."""
    reached = [
        level
        for level in LEVELS
        if any(all_reach(slim.steps_to(frames, name, level)) for name in slim.trainings(frames))
    ]
    return reached[-SHOWN:]


def look(name: str) -> style.Look:
    return slim.LOOKS.get(name, style.look(name))


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(frames, link, steps) for link, steps in by_link(frames).items()]
    return plots.picture(panels, 2.9, ylabel="Validation top-1 (%)", sharey=True)


def _panel(frames: Frames, link: str, steps: Mapping[str, float]) -> plots.Panel:
    curves = {name: curve(frames, slim.trainings(frames)[name], slim.COLUMN) for name in steps}
    lines = [plots.Curve(look(name), at["step"] * steps[name] / 60, at) for name, at in curves.items()]
    return plots.curves(lines, title=link.replace(", ", "\n", 1), xlabel="Minutes", xlim=(0, None))


def table(frames: Frames) -> Table:
    levels = shown(frames)
    rows = [
        {
            "link": link,
            "method": look(name).label,
            "step": 1e3 * seconds,
            **{f"{level} %": seconds_to(slim.steps_to(frames, name, level), seconds) for level in levels},
            "at the end": final(frames, slim.trainings(frames)[name], slim.COLUMN),
        }
        for link, steps in by_link(frames).items()
        for name, seconds in steps.items()
    ]
    units = {"step": "ms", "at the end": "%"} | {f"{level} %": "s" for level in levels}
    note = papers.words("survey.time-to-accuracy.note")
    return Table.of("Time until a validation first shows an accuracy", rows, units, note)


def facts(frames: Frames) -> dict[str, object]:
    trained, timed, _, emulated = parts_of(frames)

    def listed(column: str, of: Frames = trained) -> str:
        return captions.listed(captions.values(of, column))

    falls = [each.strip("[]") for each in captions.values(trained, "task.lr_milestones") if each != "[]"]
    told, workers = "survey.time-to-accuracy", listed("workers")
    fallen = papers.words(f"{told}.falls").format(epochs=captions.listed(falls))
    limited = papers.words(f"{told}.emulated").format(link=EMULATED, workers=workers)
    return {
        "workers": workers, "timed": listed("workers", timed), "every": listed("train.validate_every"),
        "loopback": LOOPBACK, "falls": fallen * bool(falls), "emulated": limited * bool(len(emulated.runs)),
        "of_trainings": captions.training(trained), "of_timed": captions.timing(timed),
    }  # fmt: skip


def claims() -> list[Claim]:
    return [
        claim(
            "survey.sooner", _sooner, link, fast, slow, case=f"{link}.{fast}", fast=look(fast).label,
            slow=look(slow).label, where=link if link in (LOOPBACK, EMULATED) else f"over {link}",
        )
        for link, fast, slow in JUDGED_ON
    ]  # fmt: skip


def _sooner(frames: Frames, link: str, fast: str, slow: str) -> Value | None:
    times = _times(frames, link, slow, fast) if len(frames.runs) else None
    return times and sooner(slim.steps_to(frames, slow, JUDGED), slim.steps_to(frames, fast, JUDGED), times)


def _times(frames: Frames, link: str, slow: str, fast: str) -> Value | None:
    """A step of the slow one over one of the fast one; of simulated ones without an interval."""
    of = parts_of(frames)
    if timed := {LOOPBACK: of.loopback, EMULATED: of.emulated}.get(link):
        return slowdown(timed, *(yoon2022.keys(timed, slow_links.CURVES[name]) for name in (slow, fast)))
    long, short = (step_s(frames, name).get(link) for name in (slow, fast))
    return Value(long / short) if long and short else None
