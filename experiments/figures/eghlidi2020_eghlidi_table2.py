"""Table 2 of Eghlidi and Jaggi 2020: a layer-wise step, split, over 10 Gbit/s.

Theirs is a picture without numbers, of ResNet-18 on 8 K80 joined by 10 Gbit/s; the sentences are those of
section 4.2.2. Here VGG-16 stands in for ResNet-18 (14.7 instead of 11.2 million parameters).
"""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.records.steps import mean_phase_seconds
from analysis.stats import PERCENT, Estimate, phase_seconds_difference, phase_time
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import papers
from experiments.figures.papers import make_claim, make_claims_by_case

TITLE = "Breakdown of a layer-wise step over a link asked for 10 Gbit/s: who beats dense?"
MODE = "serialised"
SCALE = {"task.name": "resnet18_cifar10", "task.batch_size": 128, "workers": 8, "method.density": 0.01}
_DATA = papers.item_settings("eghlidi2020.eghlidi-table2")
VARIANTS: dict[str, RunSettings] = _DATA["methods"]
LABELS: dict[str, str] = _DATA["labels"]
# Their parts, each by the look of one of our phases: what of ours belongs to it, and what the picture says.
CODING, EXCHANGE = ("select", "exchange", "scatter"), ("wait", "transfer")
PARTS = {
    "forward": (("forward",), "forward pass"),
    "backward": (("backward",), "backward pass"),
    "transfer": (EXCHANGE, "gradient exchange"),
    "select": (CODING, "coding and decoding"),
    "unaccounted": (("io", "check", "update", "unaccounted"), "not in theirs: input, update, rest"),
}


def runs(profile: str) -> list[Run]:
    return yoon2022.timing_runs(profile, MODE, VARIANTS, scale_item="eghlidi-table2")


def _measured_variants(frames: Frames) -> list[str]:
    """Return the methods that have runs."""
    return [method for method in VARIANTS if method in yoon2022.measured_methods(frames, MODE)]


def draw(frames: Frames, profile: str) -> plots.Figure:
    bars = [
        plots.StackedBar(LABELS[method], _mean_ms_by_part(frames, method), _bar_text(frames, method))
        for method in _measured_variants(frames)
    ]
    keys = marks.phase_legend_handles(PARTS, {part: label for part, (_, label) in PARTS.items()})
    panel = plots.horizontal_stacks_panel(
        bars, xlabel=f"Time per step (ms{captions.simulated_suffix(frames)})", xmargin=0.14
    )
    return plots.compose_figure([panel], 2.4, first_legend_entries=keys, legend_columns=5)


def _bar_text(frames: Frames, method: str) -> str:
    """Return the whole step, and its ratio to dense."""
    text = f"{format_number(round(sum(_mean_ms_by_part(frames, method).values())))} ms"
    ratio = None if method == "dense" else _method_over_dense_step(frames, method)
    return f"{text} ({format_number(ratio.value)}x)" if ratio else text


def table(frames: Frames) -> Table:
    """Return the milliseconds of each part, and the ratio to standard SGD."""
    rows = [
        {
            "method": LABELS[method],
            **{PARTS[part][1]: took for part, took in _mean_ms_by_part(frames, method).items()},
            "step": phase_time(frames, _method_run_keys(frames, method), "slowest", units_per_second=1e3),
            "step / standard SGD": _method_over_dense_step(frames, method),
        }
        for method in _measured_variants(frames)
    ]
    units = dict.fromkeys(
        ("step", *(label for _, label in PARTS.values())), f"ms{captions.simulated_suffix(frames)}"
    )
    note = "Means over ranks; a step on its slowest rank."
    return Table.from_rows("Time per layer-wise step, by part", rows, units, note)


def claims() -> list[Claim]:
    quicker = {name: LABELS[name] for name in ("blockrandomk", "blockrandomk-allreduce")}
    sparse = {name: label for name, label in LABELS.items() if name != "dense"}
    slower = {name: label for name, label in sparse.items() if name not in quicker}
    return [
        *make_claims_by_case("eghlidi2020.dense-longer", _dense_over_method_step, quicker),
        *make_claims_by_case("eghlidi2020.longer", _method_over_dense_step, slower),
        *make_claims_by_case("eghlidi2020.passes", _extra_passes_percent, sparse),
        make_claim("eghlidi2020.topk-exchanges-sooner", yoon2022.extra_phase_ms, "dense", "topk", EXCHANGE),
        make_claim(
            "eghlidi2020.randomk-codes-longer", yoon2022.extra_phase_ms, "randomk", "blockrandomk", CODING
        ),
        make_claim("eghlidi2020.topk-mostly-codes", _coding_points_above_half),
    ]


def _method_run_keys(frames: Frames, method: str) -> list[str]:
    return yoon2022.method_run_keys(frames, method, MODE)


def _method_over_dense_step(frames: Frames, method: str) -> Estimate | None:
    """Return the time of a step over that of standard SGD."""
    return yoon2022.step_time_ratio_to_baseline(frames, method, timing_mode=MODE)


def _dense_over_method_step(frames: Frames, method: str) -> Estimate | None:
    return yoon2022.step_time_ratio_to_baseline(frames, "dense", method, MODE)


def _extra_passes_percent(frames: Frames, method: str) -> Estimate | None:
    """Return the time of FP and BP beyond dense's, in percent of these."""
    passes = ("forward", "backward")
    dense = _method_run_keys(frames, "dense")
    more = phase_seconds_difference(frames, _method_run_keys(frames, method), dense, passes)
    return more and more.scale_by(100 / float(mean_phase_seconds(frames, dense)[[*passes]].sum()))


def _coding_points_above_half(frames: Frames) -> Estimate | None:
    """Return the points by which the share of coding in a step of Top-k exceeds a half."""
    phases = [phase for phase in CODING if f"{phase}_s" in frames.steps]
    share = yoon2022.estimate_phase_statistic(
        frames, "topk", ("step", *phases), lambda step, *coding: 100 * sum(coding) / step, PERCENT, MODE
    )
    return share and yoon2022.subtract_exact(share, 50)


def _mean_ms_by_part(frames: Frames, method: str) -> dict[str, float]:
    """Return mean milliseconds of their parts; what two clocks share by microseconds is no negative bar."""
    seconds = mean_phase_seconds(frames, _method_run_keys(frames, method))
    return {
        part: max(0.0, 1e3 * sum(float(seconds.get(phase, 0.0)) for phase in phases))
        for part, (phases, _) in PARTS.items()
    }
