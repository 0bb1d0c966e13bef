"""Yoon and Oh 2022 conclude that sparsification pays where the bandwidth is narrow: measured on slow links.

Nodes of this machine are joined by token buckets of 1 and 10 Gbit/s (cluster=netns), which four workers on
two cores do not carry in full: titles and claims tell what was found. The paper had NVLink and PCIe only.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis import plots
from analysis.claims import Claim
from analysis.evidence import Evidence
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_brief, format_number
from analysis.records.frames import Frames, cache_by_frames, empty_frames, find_keys, select_runs
from analysis.records.steps import mean_phase_seconds
from analysis.stats import Estimate, phase_time
from analysis.tables import Table
from analysis.times.attribution import COMMUNICATION
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._runs import scale
from experiments.figures.papers import claim, words

TITLE = "Slow links: who is faster than dense, asked for 1 and 10 Gbit/s"
MODE = "production"
SCALE = yoon2022.TIMING_SCALE
LINKS = ("ethernet_1g", "ethernet_10g")
OVERLAPPED, DENSE_OVERLAPPED = "topk-buckets-fused-overlapped", "dense-buckets-overlapped"
LOOKS = {
    "dense": style.method_style("dense"),
    DENSE_OVERLAPPED: style.MethodStyle("dense, overlapped", "#777777", "o", "++"),
    "topk": style.method_style("topk")._replace(label="Top-k, torch.topk"),
    "topk-fused": style.method_style("topk-fused"),
    OVERLAPPED: style.method_style(OVERLAPPED),
    "randomk-hash": style.method_style("randomk-hash")._replace(label="Random-k, by hash"),
    "oktopk": style.MethodStyle("Ok-Topk", "#44AA99", "p", ""),
    "powersgd": style.MethodStyle("PowerSGD, rank 2", "#999933", "d", ""),
}


def runs(profile: str) -> list[Run]:
    variants = yoon2022.with_buckets("slow-links", profile)
    found = []
    for link in LINKS:
        found += yoon2022.timing_runs(profile, MODE, variants, {"link": link}, "slow-links")
    return found


# --- what was measured


@cache_by_frames
def links(frames: Frames) -> dict[str, Frames]:
    """The runs of each link that took turns over it, the slowest link first."""
    timed = select_runs(frames, find_keys(frames, {"timing.mode": MODE, "train.validate": "never"}))
    if not len(timed.runs):
        return {}
    ordered = timed.runs.sort_values("cluster.link.beta_s_per_byte", ascending=False)
    return {
        str(link): select_runs(frames, list(ordered["key"][ordered["cluster.link.name"].eq(link)]))
        for link in ordered["cluster.link.name"].unique()
    }


def _methods(frames: Frames) -> list[str]:
    found = yoon2022.present(frames, MODE)
    return sorted(found, key=[*LOOKS, *found].index)


def look(method: str) -> style.MethodStyle:
    """Its look in this item."""
    return LOOKS.get(method, style.method_style(method))


def ratio(frames: Frames, link: str, method: str, baseline: str = "dense") -> Estimate | None:
    """Step time of a method over that of another, on a link; None where it was not measured."""
    return yoon2022.ratio(links(frames).get(link, empty_frames()), method, baseline, MODE)


def _step_s(frames: Frames, method: str) -> Estimate | None:
    return phase_time(frames, yoon2022.keys(frames, method, MODE), "slowest")


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (by_link := links(frames)):
        raise ValueError(f"nothing to draw: there is no run in timing mode {MODE}")
    methods = list(dict.fromkeys(method for found in by_link.values() for method in _methods(found)))
    panels = [_link(found, methods, is_first=not at) for at, found in enumerate(by_link.values())]
    rest, *others = marks.phase_legend_handles(["forward", *COMMUNICATION])
    rest.set_label("all else; with overlap, all")
    return plots.compose_figure(panels, 2.9, keys=[rest, *others])


def _title(frames: Frames) -> str:
    """The link as it was found, batch and density: '0.86 Gbit/s (asked: 1), batch 2, density 0.001'."""
    batches, densities = (
        captions.distinct_values(frames, name) for name in ("task.batch_size", "method.density")
    )
    told = [("batch", batches), ("density", list(map(format_number, densities)))]
    parts = [f"{name} {captions.join_words(found)}" for name, found in told if found]
    return ", ".join([Evidence(frames).link(), *parts])


def _link(frames: Frames, methods: Sequence[str], is_first: bool) -> plots.Panel:
    """Milliseconds of a step, a bar for each method from the top, and its ratio to dense."""
    bars = []
    for method in methods:
        parts = _parts_ms(frames, method) if yoon2022.keys(frames, method, MODE) else {}
        against = yoon2022.ratio(frames, method, mode=MODE) if method != "dense" else None
        behind = f" ({format_brief(against.value, 2)}x)" if against else ""
        text = f"{format_brief(sum(parts.values()))}{behind}" if parts else ""
        bars.append(plots.StackedBar(look(method).label if is_first else "", parts, text))
    longest = max(sum(bar.parts.values()) for bar in bars)
    xlabel = f"Time per step (ms{captions.simulated_suffix(frames)})"
    return plots.horizontal_stacks_panel(bars, xlabel=xlabel, xlim=(0, 1.45 * longest), title=_title(frames))


def _parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Wait and transfer, means over ranks, and the rest of the slowest rank's step; where communication
    overlaps, all in one.
    """
    seconds = mean_phase_seconds(frames, yoon2022.keys(frames, method, MODE))
    apart = () if method.endswith("-overlapped") else COMMUNICATION
    parts = {phase: 1e3 * float(seconds.get(phase, 0.0)) for phase in apart}
    step = _step_s(frames, method)
    assert step is not None, "what is drawn was timed"
    return {"forward": max(0.0, 1e3 * step.value - sum(parts.values())), **parts}


def table(frames: Frames) -> list[Table]:
    """Times and ratios on each link."""
    tables = []
    for found in links(frames).values():
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
        units = dict.fromkeys(("step", *COMMUNICATION), f"ms{captions.simulated_suffix(found)}")
        title, note = f"Time per step over {_title(found)}", words("yoon2022.slow-links.parts")
        tables.append(Table.of(title, rows, units, note))
    return tables


def claims() -> list[Claim]:
    slowest, batch = LINKS[0], scale("slow-links", "laptop")["task.batch_size"]
    how = f"VGG-16, batch {batch}, density 0.001"
    pairs = [
        *((link, method, "dense") for link in LINKS for method in ("topk", "topk-fused")),
        *((link, OVERLAPPED, DENSE_OVERLAPPED) for link in LINKS),
    ]
    faster = [
        claim(
            "yoon2022.slow-links.faster", ratio, link, baseline, method, case=f"{link}.{method}",
            link=link, how=how, label=look(method).label, baseline=look(baseline).label,
        )
        for link, method, baseline in pairs
    ]  # fmt: skip
    of = {"link": slowest, "how": how}
    return [
        *faster,
        claim("yoon2022.slow-links.dense-several-times", ratio, slowest, "dense", "topk-fused", **of),
        claim("yoon2022.slow-links.communication-falls", _less_ms, slowest, "dense", "topk-fused", **of),
    ]


def _less_ms(frames: Frames, link: str, method: str, other: str) -> Estimate | None:
    """Milliseconds by which the other communicates for less time."""
    return yoon2022.more_ms(links(frames).get(link, empty_frames()), method, other, COMMUNICATION, MODE)
