"""The time that a SLURM cluster and a container add to a step of fig4's methods, and to the start of a run.

The places are on one machine: processes that are started without SLURM, a job of the development cluster, and
such a job whose workers run in an image. Not a figure of a paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.records import phases
from analysis.records.frames import Frames, cache_by_frames, find_run_keys
from analysis.records.steps import mean_phase_seconds
from analysis.stats import UNBOUNDED, Estimate, phase_time, step_time_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers
from experiments.figures import yoon2022_fig4 as fig4
from experiments.figures._links import mean_over_launches
from experiments.figures._runs import settings_by_variant
from experiments.figures.papers import make_claim, text_template_or_empty

TITLE = "What a SLURM cluster and a container add to a step and to the start of a run"
MODE = fig4.MODE
SHOWN_DIGITS = 12  # of an image's digest


class Place(NamedTuple):
    """A place where the same run is made."""

    label: str  # in pictures and tables
    settings: RunSettings  # of its runs
    columns: Mapping[str, Any]  # values by which its records are found


_DATA = papers.item_settings("survey.scheduler-costs")
PLACES = {name: Place(**fields) for name, fields in _DATA["places"].items()}  # each adds to the one before
HERE, SLURM, IMAGE = PLACES
CLAIMED_METHODS: list[str] = _DATA["claimed"]
METHODS = tuple(settings_by_variant("scheduler-costs"))


def runs(profile: str) -> list[Run]:
    """Return a group of processes at each place."""
    variants = settings_by_variant("scheduler-costs")
    return [
        run
        for place in PLACES.values()
        for run in yoon2022.timing_runs(profile, MODE, variants, place.settings, "scheduler-costs")
    ]


# --- what was measured


@cache_by_frames
def place_run_keys(frames: Frames, place: str, method: str) -> list[str]:
    """Return the launches of a method at a place, in the order of their seeds."""
    keys = find_run_keys(frames, {**PLACES[place].columns, "variant": method})
    return [key for key in yoon2022.method_run_keys(frames, method, MODE) if key in keys]


def measured_places(frames: Frames) -> list[str]:
    """Return the places that have records."""
    return [place for place in PLACES if any(place_run_keys(frames, place, method) for method in METHODS)]


def mean_step_ms(frames: Frames, place: str, method: str) -> Estimate | None:
    """Return the milliseconds of a step of its slowest worker."""
    return phase_time(frames, place_run_keys(frames, place, method), "slowest", units_per_second=1e3)


def step_time_ratio_between_places(frames: Frames, method: str, place: str, baseline: str) -> Estimate | None:
    """Return the time of a step at a place over that at another one, paired by launch."""
    keys, baseline_keys = (place_run_keys(frames, name, method) for name in (place, baseline))
    return step_time_ratio(frames, keys, baseline_keys)


@cache_by_frames
def start_seconds_by_launch(frames: Frames, place: str) -> pd.Series[float]:
    """Return the seconds of each launch from when it was begun or submitted until its first step could begin.

    By seed; empty where records do not have both times.
    """
    keys = [key for method in METHODS for key in place_run_keys(frames, place, method)]
    launches = frames.runs[frames.runs["key"].isin(keys)].reindex(columns=["seed", "created", "started"])
    launches = launches.dropna().drop_duplicates("seed").set_index("seed")
    created, started = (
        pd.to_datetime(launches[name], utc=True, format="ISO8601") for name in ("created", "started")
    )
    seconds: pd.Series[float] = (started - created).dt.total_seconds()
    return seconds


def mean_start_seconds(frames: Frames, place: str) -> Estimate | None:
    """Return the seconds of the start of a run, the mean over launches."""
    return mean_over_launches(start_seconds_by_launch(frames, place))


def extra_start_seconds(frames: Frames, place: str, baseline: str) -> Estimate | None:
    """Return by how many seconds a start takes longer than at another place, paired by launch."""
    extra = start_seconds_by_launch(frames, place) - start_seconds_by_launch(frames, baseline)
    return mean_over_launches(extra, UNBOUNDED)


# --- picture and tables


def draw(frames: Frames, profile: str) -> plots.Figure:
    places = measured_places(frames)
    if not places:
        raise ValueError(plots.NOTHING_TO_DRAW)
    ratios = []
    for method in METHODS:
        for rank, place in enumerate((SLURM, IMAGE)):
            ratio = step_time_ratio_between_places(frames, method, place, HERE)
            x = METHODS.index(method) + (rank - 0.5) * 0.3
            ratios.append(plots.Curve(_look(place), [x] if ratio else [], [ratio]))
    starts = {x: mean_start_seconds(frames, place) for x, place in enumerate(places)}
    start_marks = [
        plots.Curve(_look(places[x])._replace(label=""), [x], [start]) for x, start in starts.items() if start
    ]
    highest = max((start.high or start.value for start in starts.values() if start), default=1.0)
    limit = papers.claim_fields_by_name("survey")["scheduler-costs.slurm"]["tolerance"]
    return plots.compose_figure(
        [
            plots.curves_panel(
                ratios, reference_y=limit, grid="y", ylabel="Time of a step / without SLURM",
                xticks=range(len(METHODS)), xticklabels=[style.method_style(name).label for name in METHODS],
                xlim=(-0.5, len(METHODS) - 0.5),
            ),
            plots.curves_panel(
                start_marks, grid="y", ylabel="Seconds to the first step", xlim=(-0.5, len(places) - 0.5),
                ylim=(0, 1.1 * highest), xticks=range(len(places)),
                xticklabels=[PLACES[place].label.replace(", ", ",\n") for place in places],
            ),
        ],
        2.6,
        width_ratios=(3, 2),
    )  # fmt: skip


def _look(place: str) -> style.MethodStyle:
    return style.MethodStyle(PLACES[place].label, *_DATA["looks"][place])


def table(frames: Frames) -> list[Table]:
    """Return times of steps by place and by phase, starts, and the machine of each launch."""
    places = measured_places(frames)
    step_rows = [
        {
            "method": style.method_style(method).label,
            "place": PLACES[place].label,
            "step": mean_step_ms(frames, place, method),
            **_step_ratio_cells(frames, method, place),
        }
        for method in METHODS
        for place in places
        if place_run_keys(frames, place, method)
    ]
    previous = {place: before for before, place in pairwise(PLACES)}
    start_rows = [
        {
            "place": PLACES[place].label,
            "start": mean_start_seconds(frames, place),
            "longer than at the place above": (
                extra_start_seconds(frames, place, previous[place]) if place in previous else None
            ),
        }
        for place in places
    ]
    seconds = {"start": "s", "longer than at the place above": "s"}
    return [
        Table.from_rows("Time of a step on its slowest worker", step_rows, {"step": "ms"}),
        *(_phase_table(frames, method, places) for method in METHODS),
        Table.from_rows(
            "Start of a run", start_rows, seconds, text_template_or_empty("survey.scheduler-costs.start")
        ),
        Table.from_rows("Launches", _launch_rows(frames, places), {"start": "s"}),
    ]


def _step_ratio_cells(frames: Frames, method: str, place: str) -> dict[str, Estimate | None]:
    """Return the ratio to the place without SLURM, and of the image to SLURM alone."""
    ratios = {"ratio to without SLURM": HERE, "ratio to SLURM without an image": SLURM}
    return {
        name: step_time_ratio_between_places(frames, method, place, baseline)
        if [*PLACES].index(place) > [*PLACES].index(baseline)
        else None
        for name, baseline in ratios.items()
    }


def _phase_table(frames: Frames, method: str, places: list[str]) -> Table:
    """Return milliseconds of each phase, a column for each place."""
    columns = {}
    for place in places:
        keys = place_run_keys(frames, place, method)
        if keys:
            seconds = mean_phase_seconds(frames, keys)
            columns[PLACES[place].label] = 1e3 * seconds.reindex([*fig4.ORDER, "step"])
    frame = pd.DataFrame(columns).dropna(how="all")
    frame = frame.rename(index=lambda phase: phases.find_phase_or_default(phase).label)
    title = f"Time of a step by phase, {style.method_style(method).label}"
    return Table(title, frame.rename_axis("phase").reset_index(), dict.fromkeys(columns, "ms"))


def _launch_rows(frames: Frames, places: list[str]) -> list[dict[str, Any]]:
    """Return where each launch ran, as its record says, in the order of their starts."""
    rows = []
    for place in places:
        starts = start_seconds_by_launch(frames, place)
        keys = [key for method in METHODS for key in place_run_keys(frames, place, method)]
        launches = frames.runs[frames.runs["key"].isin(keys)].drop_duplicates("seed")
        for run in launches.to_dict("records"):
            digest = run.get("provenance.image.sha256")
            rows.append({
                "begun": run.get("created"),
                "launch": run["seed"],
                "place": PLACES[place].label,
                "job": run.get("provenance.slurm.SLURM_JOB_ID"),
                "nodes": run.get("provenance.slurm.SLURM_JOB_NUM_NODES"),
                "tasks": run.get("provenance.slurm.SLURM_NTASKS"),
                "image, SHA-256": digest[:SHOWN_DIGITS] if isinstance(digest, str) else None,
                "runtime": run.get("provenance.image.runtime_version"),
                "start": starts.get(run["seed"]),
            })  # fmt: skip
    return sorted(rows, key=lambda row: str(row["begun"]))


def facts(frames: Frames) -> dict[str, object]:
    return {"launches": len(captions.distinct_values(frames, "seed"))}


def claims() -> list[Claim]:
    compared = [("survey.scheduler-costs.slurm", SLURM, HERE), ("survey.scheduler-costs.image", IMAGE, SLURM)]
    return [
        make_claim(
            name,
            step_time_ratio_between_places,
            method,
            place,
            baseline,
            case=method,
            label=style.method_style(method).label,
        )
        for name, place, baseline in compared
        for method in CLAIMED_METHODS
    ]
