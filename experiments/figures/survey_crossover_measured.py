"""Up to which bandwidth does Top-k take less than dense training that overlaps? Measured on slow links.

Not a figure of a paper. Two workers with a core each, which carry what is asked of links up to 2 Gbit/s.
Beside what is measured stands what the alpha-beta model predicts from computing and selecting in the same
launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import brief, number
from analysis.records.frames import Frames, cache_by_frames, find_keys, select_runs
from analysis.records.steps import LAUNCHES, mean_phase_seconds
from analysis.stats import POSITIVE, Mixed, Value, over_units, slowdown, taken
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _predicted
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._crossing import ABOVE, BELOW, crossing, mean, outside
from experiments.figures._runs import TIMED, scale, variants
from experiments.figures.papers import claim
from experiments.figures.survey_crossover import break_even

SCALE = yoon2022.TIMING_SCALE
TITLE = "Up to which bandwidth Top-k beats overlapped dense training, measured"
DENSE, SELECTIONS = "dense-buckets-overlapped", ("topk", "topk-fused")
LOOKS = {"topk": style.look("topk")._replace(label="torch.topk"),
         "topk-fused": style.look("topk-fused")._replace(label="fused search")}  # fmt: skip
SERIALISED = tuple(f"{method}-serialised" for method in SELECTIONS)
MODE = "production"
LINKS = ("ethernet_100m", "ethernet_200m", "ethernet_500m", "ethernet_1g", "ethernet_2g")
OF_SMOKE = ("ethernet_500m", "ethernet_2g")
BATCHES = (8, 32)  # of a worker
FOUND = "provenance.machine.link.together_gbit_s"
TICKS = (0.1, 0.2, 0.5, 1, 2)  # Gbit/s, and ratios


class Model(NamedTuple):
    """A network, and how its launches are made."""

    label: str
    bucket_mb: float  # of dense: several, so that there is something to overlap
    limit_min: float  # of the first three launches together


MODELS = {"vgg16_cifar10": Model("VGG-16", 8, 4.5), "slimvgg_cifar10": Model("slim VGG-16", 1, 1.2)}
SMALL = {"cnn_digits": Model("CNN", 0.05, 0.06)}
CELLS = [(task, batch) for task in MODELS for batch in BATCHES]


# --- runs


def runs(profile: str) -> list[Run]:
    """One group of processes for each model, batch and link."""
    shared = {**TIMED, "profile": profile, **scale("crossover-measured", profile), "timing.mode": MODE}
    smoke = profile == "smoke"
    return [
        Run(
            {**shared, "task": task, "task.batch_size": batch, "link": link,
             "alternate.limit_min": model.limit_min},
            in_buckets("crossover-measured", model),
        )
        for task, model in (SMALL if smoke else MODELS).items()
        for batch in (BATCHES[:1] if smoke else BATCHES)
        for link in (OF_SMOKE if smoke else LINKS)
    ]  # fmt: skip


def in_buckets(item: str, model: Model) -> dict[str, RunSettings]:
    """An item's variants, dense with buckets in the size that suits the model."""
    buckets = {"method.scope": model.bucket_mb}
    return {name: {**own, **(buckets if name == DENSE else {})} for name, own in variants(item).items()}


# --- what was measured: of a cell, which is a task and a batch


@cache_by_frames
def cell(frames: Frames, task: str, batch: int) -> Frames:
    return select_runs(frames, find_keys(frames, {"task.name": task, "task.batch_size": batch}))


def cells(frames: Frames) -> list[tuple[str, int]]:
    """The cells that were measured, in the order of the models.

    Raises:
        ValueError: none was.
    """
    found = [
        (task, batch)
        for task in dict.fromkeys((*MODELS, *captions.values(frames, "task.name")))
        for batch in captions.values(frames, "task.batch_size")
        if len(cell(frames, task, batch).runs)
    ]
    if not found:
        raise ValueError(plots.EMPTY)
    return found


@cache_by_frames
def by_link(frames: Frames) -> dict[str, Frames]:
    """The runs over each link, the slowest first."""
    if not len(frames.runs):
        return {}
    names = frames.runs.groupby("cluster.link.name")["cluster.link.beta_s_per_byte"].first()
    ordered = names.sort_values(ascending=False).index
    return {
        str(link): select_runs(frames, find_keys(frames, {"cluster.link.name": link})) for link in ordered
    }


def found_gbit_s(frames: Frames, seed: int | None = None) -> float:
    """The bandwidth of a link while both nodes send: in one launch, or of several the median."""
    found = frames.runs[FOUND] if seed is None else frames.runs[FOUND][frames.runs["seed"] == seed]
    return float(found.astype(float).median())


def _ends(frames: Frames) -> tuple[float, float]:
    """The slowest and the fastest link, as found."""
    gbit_s = [found_gbit_s(of_link) for of_link in by_link(frames).values()]
    return min(gbit_s), max(gbit_s)


def ratio(frames: Frames, task: str, batch: int, link: str, method: str, baseline: str) -> Value | None:
    """Step time of a method over that of another, on a link; None where it was not measured."""
    own = by_link(cell(frames, task, batch)).get(link)
    return own and yoon2022.ratio(own, method, baseline, MODE)


@cache_by_frames
def seeds(frames: Frames, task: str, batch: int) -> list[int]:
    """The launches that went over all links, by their numbers."""
    own = cell(frames, task, batch).runs
    if not len(own):
        return []
    links = own.groupby("seed")["cluster.link.name"].nunique()
    return [int(seed) for seed in links.index[links == own["cluster.link.name"].nunique()]]


def points(frames: Frames, task: str, batch: int, seed: int, method: str) -> tuple[list[float], list[float]]:
    """Bandwidths found in a launch, rising, and there a step of the method over one of overlapped dense."""
    pairs = []
    for of_link in by_link(cell(frames, task, batch)).values():
        launch = set(find_keys(of_link, {"seed": seed}))
        here, there = (
            [key for key in yoon2022.keys(of_link, each, MODE) if key in launch] for each in (method, DENSE)
        )
        if value := slowdown(of_link, here, there):
            pairs.append((found_gbit_s(of_link, seed), value.value))
    gbit_s, ratios = zip(*sorted(pairs), strict=True) if pairs else ((), ())
    return list(gbit_s), list(ratios)


@cache_by_frames
def crossings(frames: Frames, task: str, batch: int, method: str) -> dict[int, float]:
    """The bandwidth up to which a method takes less than overlapped dense, by launch."""
    found = {seed: points(frames, task, batch, seed, method) for seed in seeds(frames, task, batch)}
    return {seed: crossing(*of_launch) for seed, of_launch in found.items() if of_launch[0]}


class Predicted(NamedTuple):
    """What the alpha-beta model takes of a launch."""

    rest_s: float  # of computing, without backward
    backward_s: float
    select_s: float
    elements: int
    workers: int
    density: float


@cache_by_frames
def parts(launch: Frames, method: str) -> Predicted | None:
    """Computing is the same for both selections: the mean of both counts."""
    both = [_predicted.measured(launch, each) for each in SERIALISED]
    own = _predicted.measured(launch, f"{method}-serialised")
    computing = [work.compute_s for work in both if work]
    if own is None or len(computing) < len(SERIALISED):
        return None
    keys = [yoon2022.keys(launch, each) for each in SERIALISED]
    backward_s = float(np.mean([mean_phase_seconds(launch, of_variant)["backward"] for of_variant in keys]))
    run = launch.runs[launch.runs["key"].eq(keys[0][0])].iloc[0]
    size, workers, density = int(run["parameters"]), int(run["workers"]), float(run["method.density"])
    return Predicted(float(np.mean(computing)) - backward_s, backward_s, own.select_s, size, workers, density)


def predicted_crossing(of: Predicted, method: str) -> float:
    """Dense's exchange hides behind backward as far as it can: its step takes what computes before and after,
    and the longer one of backward and exchange. So Top-k is quicker where what dense sends more takes longer
    than backward and selecting together.
    """
    return break_even(method, of.select_s, of.density, of.workers, of.elements, of.backward_s)


def predicted_ratio(of: Predicted, method: str, gbit_s: float) -> float:
    """A step of the method over one of overlapped dense, by the same model."""
    dense, own = (
        _predicted.exchange_s(each, of.elements, of.density, of.workers, _predicted.ethernet(gbit_s))
        for each in ("dense", method)
    )
    return (of.rest_s + of.backward_s + of.select_s + own) / (of.rest_s + max(of.backward_s, dense))


@cache_by_frames
def predictions(frames: Frames, task: str, batch: int, method: str) -> dict[int, float]:
    """The predicted bandwidth, by launch."""
    own = cell(frames, task, batch)
    launches = (
        (seed, select_runs(own, find_keys(own, {"seed": seed}))) for seed in seeds(frames, task, batch)
    )
    found = {seed: parts(launch, method) for seed, launch in launches}
    return {seed: predicted_crossing(of, method) for seed, of in found.items() if of}


# --- claims


def claims() -> list[Claim]:
    slowest, fastest = LINKS[0], LINKS[-1]
    found = []
    for task, batch in CELLS:
        of: dict[str, Any] = {"model": MODELS[task].label, "batch": batch}
        at = f"{task.removesuffix('_cifar10')}-{batch}"
        found += [
            claim(
                "survey.crossover-measured.narrow", ratio, task, batch, slowest, DENSE, method,
                case=f"{at}.{method}", selection=LOOKS[method].label, link=slowest, **of,
            )
            for method in SELECTIONS
        ]  # fmt: skip
        all_links = f"{slowest} to {fastest}"
        found += [
            claim(
                "survey.crossover-measured.as-predicted", off_by, task, batch, method,
                case=f"{at}.{method}", selection=LOOKS[method].label, link=all_links, **of,
            )
            for method in SELECTIONS
        ]  # fmt: skip
        found.append(
            claim("survey.crossover-measured.fused-higher", higher, task, batch, *SELECTIONS,
                  case=at, link=all_links, **of)
        )  # fmt: skip
    return found


def off_by(frames: Frames, task: str, batch: int, method: str) -> Value | None:
    """The factor between the measured crossing and the predicted one, whichever is larger.

    Raises:
        Mixed: in some launch there is no crossing.
    """
    here, there = (of(frames, task, batch, method) for of in (crossings, predictions))
    if not here or not there:
        return None
    if mean(here) is None:
        found, expected = outside(here, _ends(cell(frames, task, batch))), float(np.mean([*there.values()]))
        raise Mixed(f"no crossing to compare: {found}; predicted {brief(expected)} Gbit/s")
    ratios = [here[seed] / there[seed] for seed in here if seed in there]
    value = over_units(ratios, POSITIVE, LAUNCHES)
    factor = max(value.value, 1 / value.value)
    if value.low is None or value.high is None:
        return value._replace(value=factor)
    low, high = max(1.0, value.low, 1 / value.high), max(value.high, 1 / value.low)
    return value._replace(value=factor, low=low, high=high)


def higher(frames: Frames, task: str, batch: int, method: str, faster: str) -> Value | None:
    """The crossing of the faster selection over the other's, paired by launch. Of one that lies outside the
    links the nearest of them counts, which makes less of the ratio.

    Raises:
        Mixed: in some launch both lie outside at the same end.
    """
    slow, fast = (crossings(frames, task, batch, each) for each in (method, faster))
    if not slow or not fast:
        return None
    if any(slow[seed] == fast[seed] in (BELOW, ABOVE) for seed in slow):
        ends = _ends(cell(frames, task, batch))
        raise Mixed(f"no two crossings to compare: {outside(slow, ends)}, {outside(fast, ends)}")
    pairs = []
    for seed in seeds(frames, task, batch):
        gbit_s, _ = points(frames, task, batch, seed, method)
        pairs.append([float(np.clip(of[seed], gbit_s[0], gbit_s[-1])) for of in (fast, slow)])
    return over_units([high / low for high, low in pairs], POSITIVE, LAUNCHES)


# --- picture and table


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(frames, task, batch) for task, batch in cells(frames)]
    rows = 2 if len(panels) == len(CELLS) else 1
    return plots.picture(
        panels, 2.4 * rows + 0.4, rows=rows, sharex=True, ylabel="Step time / overlapped dense"
    )


def _panel(frames: Frames, task: str, batch: int) -> plots.Panel:
    lines = list[plots.Curve]()
    links = by_link(cell(frames, task, batch))
    gbit_s = [found_gbit_s(of) for of in links.values()]
    for height, method in enumerate(SELECTIONS):
        look = LOOKS[method]
        at = {found_gbit_s(of): value for of in links.values()
              if (value := yoon2022.ratio(of, method, DENSE, MODE))}  # fmt: skip
        lines.append(plots.Curve(look, list(at), list(at.values())))
        if of := parts(cell(frames, task, batch), method):
            x = np.geomspace(min(gbit_s), max(gbit_s), 61)
            y = [predicted_ratio(of, method, each) for each in x]
            dashed = {"linestyle": (0, (4, 2)), "marker": "", "label": f"{look.label}, predicted"}
            lines.append(plots.Curve(look, x, y, dashed))
        lines += _crossing(crossings(frames, task, batch, method), look, gbit_s, 1.06 - 0.12 * height)
    title = f"{_label(task)}, batch {batch}"
    xlabel = "Bandwidth found (Gbit/s)"
    return plots.curves(lines, log=TICKS, sizes=TICKS, level=1.0, title=title, xlabel=xlabel)


def _crossing(
    found: Mapping[int, float], look: style.Look, gbit_s: Sequence[float], height: float
) -> list[plots.Curve]:
    """A diamond on the level of 1, with its interval; an arrow at the end where it lies outside."""
    large = {"markersize": 6, "markeredgecolor": "white", "label": None, "zorder": 5, "clip_on": False}
    if value := mean(found):
        both = [] if value.low is None else [value.low, value.high]
        line = plots.Curve(look, both, [1.0] * len(both), {"marker": "|", "linewidth": 2.5, "label": None})
        return [line, plots.Curve(look, [value.value], [1.0], {**large, "marker": "D"})]
    ends = [(min(gbit_s), "<", BELOW), (max(gbit_s), ">", ABOVE)]
    return [
        plots.Curve(look, [x], [height], {**large, "marker": marker})
        for x, marker, end in ends
        if end in found.values()
    ]


def _label(task: str) -> str:
    return MODELS[task].label if task in MODELS else task


def table(frames: Frames) -> list[Table]:
    """The crossings, and the ratios at each link."""
    crossed, at_links = [], []
    for task, batch in cells(frames):
        of = {"model": _label(task), "batch": batch}
        for method in SELECTIONS:
            found, predicted = (each(frames, task, batch, method) for each in (crossings, predictions))
            value = mean(found)
            crossed.append({
                **of, "selection": LOOKS[method].label, "as long as dense at": value,
                "outside": "" if value else outside(found, _ends(cell(frames, task, batch))),
                "predicted": mean(predicted), "launches": len(found),
            })  # fmt: skip
        for own in by_link(cell(frames, task, batch)).values():
            step = taken(own, yoon2022.keys(own, DENSE, MODE), "slowest", unit=1e3)
            ratios = {
                f"{LOOKS[method].label} / dense": yoon2022.ratio(own, method, DENSE, MODE)
                for method in SELECTIONS
            }
            asked = 8e-9 / float(own.runs["cluster.link.beta_s_per_byte"].iloc[0])
            at_links.append({
                **of, "asked": asked, "found": found_gbit_s(own), "dense, overlapped": step, **ratios
            })  # fmt: skip
    gbit_s = dict.fromkeys(("as long as dense at", "predicted"), "Gbit/s")
    units = {"asked": "Gbit/s", "found": "Gbit/s", "dense, overlapped": "ms"}
    return [
        Table.of("Bandwidth up to which Top-k takes less than overlapped dense", crossed, gbit_s),
        Table.of("Time per step at each link", at_links, units),
    ]


def facts(frames: Frames) -> dict[str, object]:
    seeds = captions.values(frames, "seed")
    of_model = [f"{number(model.bucket_mb)} MB for {model.label}" for model in MODELS.values()]
    densities = captions.listed(map(number, captions.values(frames, "method.density")))
    return {"launches": len(seeds), "buckets": captions.listed(of_model), "density": densities}
