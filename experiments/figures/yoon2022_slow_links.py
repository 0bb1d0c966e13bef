"""Yoon and Oh 2022 conclude that sparsification pays where the bandwidth is narrow: measured on slow links.

Nodes of this machine are joined by token buckets of 1 and 10 Gbit/s (cluster=netns); the paper had NVLink and
PCIe only.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis import plots
from analysis.attribution import COMMUNICATION
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import brief, number
from analysis.records.frames import Frames, empty, keys_of, remembered, restrict
from analysis.records.steps import breakdown
from analysis.stats import Value, curve, taken
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _reaching
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig3_slim as slim
from experiments.figures.papers import claim, words

TITLE = "Slow links: who is faster than dense at 1 and 10 Gbit/s, and to the same accuracy"
MODE = "production"
IN_TURNS = {"timing.mode": MODE, "train.validate": "never"}
SCALE = yoon2022.TIMING_SCALE
LINKS = ("ethernet_1g", "ethernet_10g")
# % top-1; the highest one that dense and Top-k reach counts
ACCURACIES = (60.0, 65.0, 70.0, 75.0, 80.0, 85.0)
OVERLAPPED, DENSE_OVERLAPPED = "topk-buckets-fused-overlapped", "dense-buckets-overlapped"
LOOKS = {
    "dense": style.look("dense"),
    DENSE_OVERLAPPED: style.Look("dense, overlapped", "#777777", "o", "++"),
    "topk": style.look("topk")._replace(label="Top-k, torch.topk"),
    "topk-fused": style.look("topk-fused"),
    OVERLAPPED: style.look(OVERLAPPED),
    "randomk-hash": style.look("randomk-hash")._replace(label="Random-k, by hash"),
    "oktopk": style.Look("Ok-Topk", "#44AA99", "p", ""),
    "powersgd": style.Look("PowerSGD, rank 2", "#999933", "d", ""),
    "topk-denser-fused": style.Look("Top-k, fused, 0.01", "#56B4E9", "D", "\\\\"),
}
# How the curves of fig3-slim are called among what takes turns here: another execution, the same numbers.
CURVES = {
    "dense": "dense", "topk": "topk-fused", "topk-denser": "topk-denser-fused", "randomk": "randomk-hash",
}  # fmt: skip


def runs(profile: str) -> list[Run]:
    variants = yoon2022.with_buckets("slow-links", profile)
    found = []
    for link in LINKS:
        found += yoon2022.timing_runs(profile, MODE, variants, {"link": link}, "slow-links")
    return found + (slim_runs(profile) if profile != "smoke" else [])


def slim_runs(profile: str) -> list[Run]:
    """The runs that say what a step of the model of fig3-slim takes over the slowest link."""
    slowest = {"link": LINKS[0]}
    return yoon2022.timing_runs(profile, MODE, None, slowest, "slow-links-slim")


def more_runs(profile: str) -> list[Run]:
    """The trainings behind the time to an accuracy, which fig3-slim shows: hours of them."""
    return [*slim.runs(profile), *slim.more_runs(profile)]


# --- what was measured


@remembered
def links(frames: Frames) -> dict[str, Frames]:
    """The runs of each link that took turns over it, the slowest link first; without the slim model's."""
    slim_ones = set(_slim_steps(frames).runs["key"])
    timed = restrict(frames, [key for key in keys_of(frames, IN_TURNS) if key not in slim_ones])
    if not len(timed.runs):
        return {}
    ordered = timed.runs.sort_values("cluster.link.beta_s_per_byte", ascending=False)
    return {
        str(link): restrict(frames, list(ordered["key"][ordered["cluster.link.name"].eq(link)]))
        for link in ordered["cluster.link.name"].unique()
    }


def _methods(frames: Frames) -> list[str]:
    found = yoon2022.present(frames, MODE)
    return sorted(found, key=[*LOOKS, *found].index)


def look(method: str) -> style.Look:
    """Its look in this item."""
    return LOOKS.get(method, style.look(method))


def ratio(frames: Frames, link: str, method: str, baseline: str = "dense") -> Value | None:
    """Step time of a method over that of another, on a link; None where it was not measured."""
    return yoon2022.ratio(links(frames).get(link, empty()), method, baseline, MODE)


def _step_s(frames: Frames, method: str) -> Value | None:
    return taken(frames, yoon2022.keys(frames, method, MODE), "slowest")


# --- time to an accuracy: steps of fig3-slim's trainings times what a step takes over the slowest link


@remembered
def _slim_steps(frames: Frames) -> Frames:
    return restrict(frames, keys_of(frames, {**IN_TURNS, "task.name": "slimvgg_cifar10"}))


def seconds_to(frames: Frames, name: str, accuracy: float) -> Value | None:
    """Seconds over the slowest link; None where not every seed gets there."""
    step = _step_s(_slim_steps(frames), CURVES[name])
    return step and _reaching.seconds_to(slim.steps_to(frames, name, accuracy), step.value)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (by_link := links(frames)):
        raise ValueError(f"nothing to draw: there is no run in timing mode {MODE}")
    methods = list(dict.fromkeys(method for found in by_link.values() for method in _methods(found)))
    panels = [
        _link(found, methods, _title(found, link), is_first=not at)
        for at, (link, found) in enumerate(by_link.items())
    ]
    lines = [
        plots.Curve(look(CURVES[name]), table["step"] * step.value / 60, table)
        for name, keys in slim.trainings(frames).items()
        if (step := _step_s(_slim_steps(frames), CURVES[name]))
        and len(table := curve(frames, keys, slim.COLUMN))
    ]
    if lines:
        accuracy = plots.curves(
            lines, grid=None, xlabel="Minutes over 1 Gbit/s, derived", title="Slim VGG-16, 8 workers",
            ylabel="Validation top-1 (%)", ylim=(0, None),
        )  # fmt: skip
        panels.append(plots.layered(accuracy, plots.key(loc="lower right", fontsize=6)))
    rest, *others = marks.phase_keys(["forward", *COMMUNICATION])
    rest.set_label("all else; with overlap, all")
    return plots.picture(panels, 2.9, keys=[rest, *others])


def _title(frames: Frames, link: str) -> str:
    """Bandwidth of a link, and in brackets what the workers found."""
    beta = captions.values(frames, "cluster.link.beta_s_per_byte")
    found = captions.values(frames, "provenance.machine.link.together_gbit_s")
    rate = f"{number(8e-9 / beta[0])} Gbit/s" if beta else link
    return f"{rate} (found: {number(min(found))})" if found else rate


def _link(frames: Frames, methods: Sequence[str], title: str, is_first: bool) -> plots.Panel:
    """Milliseconds of a step, a bar for each method from the top, and its ratio to dense."""
    bars = []
    for method in methods:
        parts = _parts_ms(frames, method) if yoon2022.keys(frames, method, MODE) else {}
        against = yoon2022.ratio(frames, method, mode=MODE) if method != "dense" else None
        behind = f" ({brief(against.value, 2)}x)" if against else ""
        text = f"{brief(sum(parts.values()))}{behind}" if parts else ""
        bars.append(plots.Bar(look(method).label if is_first else "", parts, text))
    longest = max(sum(bar.parts.values()) for bar in bars)
    xlabel = f"Time per step (ms{captions.simulated(frames)})"
    return plots.piles(bars, xlabel=xlabel, xlim=(0, 1.45 * longest), title=title)


def _parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Wait and transfer, means over ranks, and the rest of the slowest rank's step; where communication
    overlaps, all in one.
    """
    seconds = breakdown(frames, yoon2022.keys(frames, method, MODE))
    apart = () if method.endswith("-overlapped") else COMMUNICATION
    parts = {phase: 1e3 * float(seconds.get(phase, 0.0)) for phase in apart}
    step = _step_s(frames, method)
    assert step is not None, "what is drawn was timed"
    return {"forward": max(0.0, 1e3 * step.value - sum(parts.values())), **parts}


def table(frames: Frames) -> list[Table]:
    """Times and ratios on each link, and the derived time to an accuracy."""
    tables = []
    for link, found in links(frames).items():
        rows = []
        for method in _methods(found):
            step, parts = _step_s(found, method), _parts_ms(found, method)
            rows.append({
                "method": look(method).label,
                "step": step.times(1e3) if step else None,
                **{phase: parts.get(phase) for phase in COMMUNICATION},
                "step / dense": yoon2022.ratio(found, method, mode=MODE),
                "step / dense, overlapped": yoon2022.ratio(found, method, DENSE_OVERLAPPED, MODE),
            })  # fmt: skip
        units = dict.fromkeys(("step", *COMMUNICATION), f"ms{captions.simulated(found)}")
        title, note = f"Time per step over {_title(found, link)}", words("yoon2022.slow-links.parts")
        tables.append(Table.of(title, rows, units, note))
    columns = {accuracy: f"{number(accuracy)} %" for accuracy in ACCURACIES}
    reached = [
        {"method": look(CURVES[name]).label}
        | {column: seconds_to(frames, name, accuracy) for accuracy, column in columns.items()}
        for name in slim.trainings(frames)
    ]
    if reached and len(_slim_steps(frames).runs):
        title, units = (
            "Time to a validation accuracy over 1 Gbit/s, derived",
            dict.fromkeys(columns.values(), "s"),
        )
        note = f"{words('yoon2022.slow-links.derived')} {words('yoon2022.slow-links.intervals')}"
        tables.append(Table.of(title, reached, units, note))
    return tables


def facts(frames: Frames) -> dict[str, str]:
    """What is drawn at the right, if anything is."""
    derived = f" Right: accuracy against time. {words('yoon2022.slow-links.derived')}"
    return {"derived": derived if len(_slim_steps(frames).runs) and slim.trainings(frames) else ""}


def claims() -> list[Claim]:
    slowest = LINKS[0]
    pairs = [
        *((link, method, "dense") for link in LINKS for method in ("topk", "topk-fused")),
        *((link, OVERLAPPED, DENSE_OVERLAPPED) for link in LINKS),
    ]
    faster = [
        claim(
            "yoon2022.slow-links.faster", ratio, link, baseline, method, case=f"{link}.{method}",
            rate=link.removeprefix("ethernet_").replace("g", " Gbit/s"),
            label=look(method).label, baseline=look(baseline).label,
        )
        for link, method, baseline in pairs
    ]  # fmt: skip
    derived = words("yoon2022.slow-links.derived")
    return [
        *faster,
        claim("yoon2022.slow-links.dense-several-times", ratio, slowest, "dense", "topk-fused"),
        claim("yoon2022.slow-links.accuracy-sooner", _sooner, "dense", "topk", derived=derived),
        claim("yoon2022.slow-links.communication-falls", _falls, slowest, "topk", "topk-fused"),
    ]


def _sooner(frames: Frames, slow: str, fast: str) -> Value | None:
    """Time of one over the other's until the highest of `ACCURACIES` that all seeds of both reach."""
    times = yoon2022.ratio(_slim_steps(frames), CURVES[slow], CURVES[fast], MODE)
    for accuracy in reversed(ACCURACIES):
        here, there = (slim.steps_to(frames, name, accuracy) for name in (slow, fast))
        if times and _reaching.all_reach(here) and _reaching.all_reach(there):
            return _reaching.sooner(here, there, times)
    return None


def _falls(frames: Frames, link: str, method: str, cheaper: str) -> Value | None:
    return yoon2022.more_ms(links(frames).get(link, empty()), method, cheaper, COMMUNICATION, MODE)
