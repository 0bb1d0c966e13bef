"""Who has a loss first over a link with distance: every step's gradients averaged, or local steps?

Not a figure of a paper. Trajectories are those of local-loss; what their steps take is measured by processes
that the link joins. A whole training in real time shows what this composition is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.evidence import Evidence
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_brief, format_number
from analysis.records.frames import Frames, cache_by_frames, find_keys, select_runs
from analysis.records.steps import LAUNCHES
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_value, mean_curve
from analysis.tables import Table
from analysis.times import rounds
from analysis.times.reaching import (
    CrossingBySeed,
    all_seeds_reach,
    crossing_by_seed,
    seconds_to_target,
    speedup_to_target,
)
from analysis.times.rounds import StepSeconds
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures import survey_local_loss as local_loss
from experiments.figures._runs import TIMED, TRAINED, scale
from experiments.figures.papers import claim, words

TITLE = "Loss of a small language model against time, over a link with distance"
SCALE, COLUMN = local_loss.SCALE, local_loss.COLUMN
_DATA = papers.item("survey.internet-loss")
LINK: str = _DATA["link"]
DENSE, RINGS = "dense", "dense-rings"
Compared = tuple[str, int | None]  # a method, and its H
COMPARED: list[Compared] = [(name, every) for name, every in _DATA["compared"]]
WHOLE: Mapping[str, list[Compared]] = _DATA["whole"]  # trained in real time, by profile
SHARE = 10.0  # % above what dense ends at: the loss that is judged
SHARES = (5.0, 10.0, 15.0, 20.0)  # all of them in the table


def runs(profile: str) -> list[Run]:
    own = {"link": LINK, **scale("internet-loss", profile)}
    shared = {**TIMED, "profile": profile, **_shared(profile), **own}
    turns = {_case(each): _turn(each) for each in _planned(profile)}
    in_turns = Run({**shared, "timing.mode": "production"}, turns)
    return [in_turns, *_trajectories(profile, local_loss.SEEDS[profile]), *_whole(profile)]


def more_runs(profile: str) -> list[Run]:
    return _trajectories(profile, local_loss.MORE_SEEDS[profile])


def _planned(profile: str) -> list[Compared]:
    """Those that a profile compares: local steps at the H of local-loss."""
    return [(name, every) for name, every in COMPARED if every in (None, *local_loss.EVERY[profile])]


def _turn(each: Compared) -> RunSettings:
    """In what a method in turns differs; rates don't matter to times, and all take the task's."""
    own = {key: value for key, value in _settings(*each).items() if not key.startswith("task.")}
    return {**own, "collectives": "backend"} if each[0] == RINGS else own


def _shared(profile: str) -> RunSettings:
    """The model and its batches, as local-loss has them."""
    named = ("task", "workers", "task.batch_size")
    own = scale("local-loss", profile)
    return {name: own[name] for name in named if name in own}


def _trajectories(profile: str, seeds: Sequence[int]) -> list[Run]:
    """Those of local-loss that are compared."""
    shared: RunSettings = {**TRAINED, "profile": profile, **scale("local-loss", profile)}
    return [
        Run({**shared, **_settings(name, every), "seed": seed})
        for seed in seeds
        for name, every in _planned(profile)
        if name != RINGS
    ]


def _whole(profile: str) -> list[Run]:
    """Trainings in real time, of the first seed."""
    shared: RunSettings = {**TRAINED, "profile": profile, **scale("local-loss", profile)}
    over: RunSettings = {
        "cluster": "netns", "link": LINK, "launch.on_mismatch": "label", "device": "cpu",
    }  # fmt: skip
    return [Run({**shared, **over, **_settings(*each), "seed": 0}) for each in WHOLE[profile]]


def _settings(name: str, every: int | None) -> RunSettings:
    own = {**local_loss.EVERY_STEP, **local_loss.LOCAL}[DENSE if name == RINGS else name]
    return own if every is None else {**own, "method.every": every}


# --- what the runs are


def trained(frames: Frames, name: str, every: int | None, where: str = "virtual") -> list[str]:
    """The trainings of a method, one a seed; those in real time are on emulated nodes."""
    return find_keys(frames, {**_chosen(name, every), "cluster.where": where, "train.validate": "epoch"})


def _chosen(name: str, every: int | None) -> dict[str, Any]:
    """What tells a method; rings differ from dense in time alone."""
    own: dict[str, Any] = {"method.name": DENSE if name == RINGS else name}
    return own if every is None else {**own, "method.every": every}


def timed(frames: Frames, each: Compared) -> list[str]:
    """The launches in which a method took turns."""
    chosen = {**_chosen(*each), "cluster.where": "netns", "train.validate": "never"}
    return find_keys(frames, {**chosen, "collectives": "backend" if each[0] == RINGS else "auto"})


@cache_by_frames
def taken(frames: Frames, each: Compared) -> dict[int, StepSeconds]:
    """By launch."""
    return rounds.step_seconds_by_launch(frames, timed(frames, each))


def step_s(frames: Frames, name: str, every: int | None) -> Estimate | None:
    """Seconds of a step, over launches."""
    found = [each.step_s(every) for each in taken(frames, (name, every)).values()]
    return estimate_mean(found, POSITIVE, LAUNCHES) if found else None


def times(frames: Frames, slow: Compared, fast: Compared) -> Estimate | None:
    """A step of the slow one over one of the fast one, paired by launch."""
    here, there = taken(frames, slow), taken(frames, fast)
    pairs = [here[seed].step_s(slow[1]) / there[seed].step_s(fast[1]) for seed in here if seed in there]
    return estimate_mean(pairs, POSITIVE, LAUNCHES) if pairs else None


def compared(frames: Frames) -> list[Compared]:
    """Those that were both trained and timed."""
    return [each for each in COMPARED if trained(frames, *each) and taken(frames, each)]


def target(frames: Frames, share: float = SHARE) -> float | None:
    """The loss that lies so many percent above what dense ends at, the mean over its seeds."""
    end = final_value(frames, trained(frames, DENSE, None), COLUMN) if trained(frames, DENSE, None) else None
    return end.value * (1 + share / 100) if end else None


def reaching(frames: Frames, each: Compared, level: float) -> CrossingBySeed:
    """Steps until a validation shows the loss, by seed."""
    return crossing_by_seed(frames, trained(frames, *each), COLUMN, level, falls=True)


def times_as_soon(
    frames: Frames, fast: Compared, share: float = SHARE, slow: Compared = (DENSE, None)
) -> Estimate | None:
    """Dense's time to the loss over a method's, paired by seed; a step's time by launches."""
    level, ratio = target(frames, share), times(frames, slow, fast)
    if level is None or ratio is None:
        return None
    return speedup_to_target(reaching(frames, slow, level), reaching(frames, fast, level), ratio)


# --- composed against real


class Check(NamedTuple):
    """A training in real time beside what was composed for it."""

    real_s: float  # in steps, until its last validation
    composed_s: float

    @property
    def error(self) -> float:
        """Share by which the composed time is off."""
        return abs(self.composed_s / self.real_s - 1)


def checked(frames: Frames) -> dict[Compared, Check]:
    """Of each training in real time."""
    found = dict[Compared, Check]()
    for each in COMPARED:
        real, step = trained(frames, *each, where="netns"), step_s(frames, *each)
        if each[0] == RINGS or not real or step is None:
            continue
        last = frames.epochs[frames.epochs["key"].isin(real)].sort_values("epoch").groupby("key").last()
        found[each] = Check(float(last["wall_s"].mean()), float(last["step"].mean() * step.value))
    return found


def worst(frames: Frames) -> Estimate | None:
    """Percent by which the composed time of a whole training is off, of the worst of those in real time."""
    errors = [100 * check.error for check in checked(frames).values()]
    return Estimate(max(errors), n=len(errors)) if errors else None


# --- picture and table


def label(each: Compared) -> str:
    name, every = each
    return _DATA["rings"] if name == RINGS else local_loss.label(name, every)


def _look(each: Compared) -> style.MethodStyle:
    name, _ = each
    looks = local_loss.LOOKS[DENSE if name == RINGS else name]
    return looks._replace(label=label(each))


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = compared(frames)
    if (DENSE, None) not in found:
        raise ValueError(plots.NOTHING_TO_DRAW)
    lines = list[plots.Curve]()
    longest = sorted({every for _, every in found if every})
    for each in found:
        at, step = mean_curve(frames, trained(frames, *each), COLUMN), step_s(frames, *each)
        assert step is not None, "it was timed"
        rank = longest.index(each[1]) / max(1, len(longest) - 1) if each[1] else 0.0
        how: dict[str, Any] = {"alpha": 1 - 0.6 * rank, "ms": 3}
        how |= {"linestyle": "--"} if each[0] == RINGS else {}
        lines.append(plots.Curve(_look(each), at["step"] * step.value / 60, at, how))
    title = f"over {Evidence(_of_link(frames)).link()}"
    panels = [
        plots.curves_panel(
            lines,
            level=target(frames),
            xlabel="Minutes in steps, composed",
            xscale="log",
            title=title,
            ylabel="Validation loss (nats a character)",
        ),
        _steps(frames, found),
    ]
    return plots.compose_figure(panels, 3.8, width_ratios=(1.6, 1))


def _of_link(frames: Frames) -> Frames:
    """The runs over the link."""
    return select_runs(frames, find_keys(frames, {"cluster.where": "netns"}))


@plots.panel_maker
def _steps(axes: plots.Axes, /, frames: Frames, found: Sequence[Compared]) -> None:
    """A step of each: computing, and what exchanging takes besides."""
    for place, each in enumerate(found):
        step, computing = step_s(frames, *each), computing_s(frames)
        assert step is not None, "it was timed"
        colour = _look(each).colour
        axes.barh(place, 1e3 * computing, color=colour, alpha=0.35)
        axes.barh(place, 1e3 * max(0.0, step.value - computing), left=1e3 * computing, color=colour)
        if step.low is not None and step.high is not None:
            axes.plot([1e3 * step.low, 1e3 * step.high], [place, place], color="#111111", linewidth=1)
    plots.set_row_labels(axes, [label(each) for each in found])
    axes.set(xlabel="Mean step (ms); pale: computing")


@cache_by_frames
def computing_s(frames: Frames) -> float:
    """Seconds of a local step, which exchanges nothing: the mean over launches and methods that have any."""
    found = [own.local_s for each in COMPARED for own in taken(frames, each).values() if own.local_s]
    return float(np.mean(found)) if found else 0.0


def table(frames: Frames) -> list[Table]:
    """Times to each loss, the registered one first; what steps take; what trainings in real time took."""
    found = compared(frames)
    rows = [
        {
            "method": label(each),
            **{f"{format_number(share)} %": _time(frames, each, share) for share in SHARES},
        }
        for each in found
    ]
    gains = [
        {
            "method": label(each),
            **{f"{format_number(share)} %": times_as_soon(frames, each, share) for share in SHARES},
            "over gloo's rings": times_as_soon(frames, each, SHARE, (RINGS, None)),
        }
        for each in found
    ]
    steps = [_step_row(frames, each) for each in found]
    checks = [
        {"training": label(each), "in real time": check.real_s / 60, "composed": check.composed_s / 60,
         "error": 100 * check.error}
        for each, check in checked(frames).items()
    ]  # fmt: skip
    end = format_brief(target(frames, 0.0) or 0.0)
    loss = f"Minutes until the loss is so much above dense's end ({end} nats), composed"
    units = dict.fromkeys((f"{format_number(share)} %" for share in SHARES), "min")
    tables = [
        Table.of(loss, rows, units, words("survey.internet-loss.note")),
        Table.of("Dense's time to that loss over a method's", gains),
        Table.of("Steps", steps, dict.fromkeys(("local step", "exchanging step", "mean step"), "ms")),
    ]
    if checks:
        minutes = dict.fromkeys(("in real time", "composed"), "min")
        tables.append(Table.of("Whole trainings in real time", checks, {**minutes, "error": "%"}))
    return tables


def _time(frames: Frames, each: Compared, share: float) -> Estimate | None:
    level, step = target(frames, share), step_s(frames, *each)
    if level is None or step is None:
        return None
    return seconds_to_target(reaching(frames, each, level), step.value / 60)


def _step_row(frames: Frames, each: Compared) -> dict[str, object]:
    own, step = taken(frames, each).values(), step_s(frames, *each)
    assert step is not None, "it was timed"
    local, exchanging = ([getattr(one, name) for one in own] for name in ("local_s", "exchanging_s"))
    return {
        "method": label(each),
        "local step": estimate_mean(local, POSITIVE, LAUNCHES).times(1e3) if all(local) else None,
        "exchanging step": estimate_mean(exchanging, POSITIVE, LAUNCHES).times(1e3),
        "mean step": step.times(1e3), "computing": 100 * min(1.0, computing_s(frames) / step.value),
        "launches": len(own),
    }  # fmt: skip


def facts(frames: Frames) -> dict[str, object]:
    level = target(frames)
    never = [
        label(each)
        for each in compared(frames)
        if level and not all_seeds_reach(reaching(frames, each, level))
    ]
    return {
        "link": Evidence(_of_link(frames)).link(), "share": format_number(SHARE),
        "target": format_brief(level or 0.0),
        "never": f" Not in all seeds: {captions.join_words(never)}." * bool(never),
        "launches": len(taken(frames, (DENSE, None))),
        "seeds": captions.join_words(captions.distinct_values(frames, "seed")),
    }  # fmt: skip


def claims() -> list[Claim]:
    found, share = list[Claim](), format_number(SHARE)
    for each in COMPARED:
        if each[0] not in (DENSE, RINGS):
            named = {"method": label(each), "link": LINK, "share": share}
            found.append(claim("survey.internet-loss.sooner", times_as_soon, each, case=_case(each), **named))
    rings = claim("survey.internet-loss.rings", times, (RINGS, None), (DENSE, None), link=LINK)
    return [*found, rings, claim("survey.internet-loss.composed", worst, link=LINK)]


def _case(each: Compared) -> str:
    return f"{each[0]}-{each[1]}" if each[1] else each[0]
