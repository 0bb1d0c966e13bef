"""Yoon and Oh 2022 conclude that sparsification pays where the bandwidth is narrow: measured on slow links.

Nodes of this machine are joined by token buckets of 1 and 10 Gbit/s (cluster=netns), which four workers on
two cores do not carry in full: titles and claims tell what was found. The paper had NVLink and PCIe only.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis import plots
from analysis.claims import Claim
from analysis.evidence import ClaimEvidence
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, empty_frames, find_run_keys, select_runs
from analysis.records.steps import mean_phase_seconds
from analysis.stats import Estimate, phase_time
from analysis.tables import Table
from analysis.times.attribution import COMMUNICATION
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._links import split_by_link
from experiments.figures._runs import profile_settings, setting_values_text
from experiments.figures.papers import make_claim, text_template_or_empty

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
    variants = yoon2022.bucketed_settings_by_variant("slow-links", profile)
    return [
        run
        for link in LINKS
        for run in yoon2022.timing_runs(profile, MODE, variants, {"link": link}, "slow-links")
    ]


# --- what was measured


@cache_by_frames
def timed_runs_by_link(frames: Frames) -> dict[str, Frames]:
    """Return the runs of each link that took turns over it, the slowest link first."""
    columns = {"timing.mode": MODE, "train.validate": "never"}
    return split_by_link(select_runs(frames, find_run_keys(frames, columns)))


def _methods(frames: Frames) -> list[str]:
    methods = yoon2022.measured_methods(frames, MODE)
    return sorted(methods, key=[*LOOKS, *methods].index)


def method_look(method: str) -> style.MethodStyle:
    """Return how the method looks in this item."""
    return LOOKS.get(method, style.method_style(method))


def link_step_ratio(frames: Frames, link: str, method: str, baseline: str = "dense") -> Estimate | None:
    """Return the step time of a method over that of another on a link; None where it was not measured."""
    return yoon2022.step_time_ratio_to_baseline(
        timed_runs_by_link(frames).get(link, empty_frames()), method, baseline, MODE
    )


def _step_ms(frames: Frames, method: str) -> Estimate | None:
    return phase_time(frames, yoon2022.method_run_keys(frames, method, MODE), "slowest", units_per_second=1e3)


def draw(frames: Frames, profile: str) -> plots.Figure:
    runs_by_link = timed_runs_by_link(frames)
    if not runs_by_link:
        raise ValueError(f"nothing to draw: there is no run in timing mode {MODE}")
    methods = list(dict.fromkeys(method for runs in runs_by_link.values() for method in _methods(runs)))
    panels = [
        _link_panel(runs, methods, is_first=not place) for place, runs in enumerate(runs_by_link.values())
    ]
    rest, *communication = marks.phase_legend_handles(["forward", *COMMUNICATION])
    rest.set_label("all else; with overlap, all")
    return plots.compose_figure(panels, 2.9, first_legend_entries=[rest, *communication])


def _title(frames: Frames) -> str:
    """Return link as found, batch and density: '0.86 Gbit/s (asked: 1), batch 2, density 0.001'."""
    columns = {"batch": "task.batch_size", "density": "method.density"}
    parts = [
        f"{name} {setting_values_text(frames, column)}"
        for name, column in columns.items()
        if captions.distinct_values(frames, column)
    ]
    return ", ".join([ClaimEvidence(frames).link_text(), *parts])


def _link_panel(frames: Frames, methods: Sequence[str], is_first: bool) -> plots.Panel:
    """Return milliseconds of a step, a bar for each method from the top, and its ratio to dense."""
    bars = []
    for method in methods:
        parts = _mean_ms_by_phase(frames, method) if yoon2022.method_run_keys(frames, method, MODE) else {}
        ratio = (
            yoon2022.step_time_ratio_to_baseline(frames, method, timing_mode=MODE)
            if method != "dense"
            else None
        )
        suffix = f" ({format_number(ratio.value, 2)}x)" if ratio else ""
        text = f"{format_number(sum(parts.values()))}{suffix}" if parts else ""
        bars.append(plots.StackedBar(method_look(method).label if is_first else "", parts, text))
    longest = max(sum(bar.value_by_phase.values()) for bar in bars)
    xlabel = f"Time per step (ms{captions.simulated_suffix(frames)})"
    return plots.horizontal_stacks_panel(bars, xlabel=xlabel, xlim=(0, 1.45 * longest), title=_title(frames))


def _mean_ms_by_phase(frames: Frames, method: str) -> dict[str, float]:
    """Return wait and transfer, means over ranks, and the rest of the slowest rank's step.

    Where communication overlaps, all in one.
    """
    seconds = mean_phase_seconds(frames, yoon2022.method_run_keys(frames, method, MODE))
    apart = () if method.endswith("-overlapped") else COMMUNICATION
    parts = {phase: 1e3 * float(seconds.get(phase, 0.0)) for phase in apart}
    step = _step_ms(frames, method)
    assert step is not None, "what is drawn was timed"
    return {"forward": max(0.0, step.value - sum(parts.values())), **parts}


def table(frames: Frames) -> list[Table]:
    """Return times and ratios on each link."""
    tables = []
    for runs in timed_runs_by_link(frames).values():
        rows = []
        for method in _methods(runs):
            parts = _mean_ms_by_phase(runs, method)
            rows.append(
                {
                    "method": method_look(method).label,
                    "step": _step_ms(runs, method),
                    **{phase: parts.get(phase) for phase in COMMUNICATION},
                    "step / dense": yoon2022.step_time_ratio_to_baseline(runs, method, timing_mode=MODE),
                    "step / dense, overlapped": yoon2022.step_time_ratio_to_baseline(
                        runs, method, DENSE_OVERLAPPED, MODE
                    ),
                }
            )
        units = dict.fromkeys(("step", *COMMUNICATION), f"ms{captions.simulated_suffix(runs)}")
        title = f"Time per step over {_title(runs)}"
        note = text_template_or_empty("yoon2022.slow-links.parts")
        tables.append(Table.from_rows(title, rows, units, note))
    return tables


def claims() -> list[Claim]:
    slowest = LINKS[0]
    batch = profile_settings("slow-links", "laptop")["task.batch_size"]
    family = "yoon2022.slow-links"
    how = f"VGG-16, batch {batch}, density 0.001"
    pairs = [
        *((link, method, "dense") for link in LINKS for method in ("topk", "topk-fused")),
        *((link, OVERLAPPED, DENSE_OVERLAPPED) for link in LINKS),
    ]
    faster = [
        make_claim(
            f"{family}.faster", link_step_ratio, link, baseline, method, case=f"{link}.{method}",
            link=link, how=how, label=method_look(method).label, baseline=method_look(baseline).label,
        )
        for link, method, baseline in pairs
    ]  # fmt: skip
    fields = {"link": slowest, "how": how}
    return [
        *faster,
        make_claim(
            f"{family}.dense-several-times", link_step_ratio, slowest, "dense", "topk-fused", **fields
        ),
        make_claim(
            f"{family}.communication-falls", saved_communication_ms, slowest, "dense", "topk-fused", **fields
        ),
    ]


def saved_communication_ms(frames: Frames, link: str, slow: str, fast: str) -> Estimate | None:
    """Return the milliseconds of communication that the fast method saves in a step."""
    runs = timed_runs_by_link(frames).get(link, empty_frames())
    return yoon2022.extra_phase_ms(runs, slow, fast, COMMUNICATION, MODE)
