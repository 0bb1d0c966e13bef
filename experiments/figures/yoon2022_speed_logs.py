"""The training speeds of Yoon and Oh 2022 from its own job logs: as published, and without validation."""

from __future__ import annotations

from collections.abc import Mapping

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import marks, style
from analysis.pictures.numbers import format_number
from analysis.published import rederived
from analysis.published.block_intervals import combine_independent_estimates
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD
from analysis.published.validation_free import (
    fit_job_stall_regression,
    validation_free_step_ms,
    validation_free_windows_ms,
)
from analysis.records.frames import Frames
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._published import JobName, exact_estimate, no_runs, validation_free_step_ratio
from experiments.figures.papers import make_claim, published_value

TITLE = "Training speed from the authors' logs, with and without validation in the timed loop"
SCALE = yoon2022.TIMING_SCALE
ORIGINS = ("as published", "without validation")
# Slower over quicker: (GPU, method) each, and the statements that the ratio answers.
BETWEEN_METHODS = {
    "Top-k / dense": (("A100", "topk"), ("A100", "dense"), (6,)),
    "Top-k / Random-k": (("A100", "topk"), ("A100", "randomk"), (6,)),
    "Random-k / dense": (("A100", "randomk"), ("A100", "dense"), (6,)),
    "Top-k / dense, V100": (("V100", "topk"), ("V100", "dense"), (6, 15)),
}
BETWEEN_MACHINES = {
    "dense, V100 / A100": (("V100", "dense"), ("A100", "dense"), (15,)),
    "Top-k, V100 / A100": (("V100", "topk"), ("A100", "topk"), (16,)),
}
RATIOS = BETWEEN_METHODS | BETWEEN_MACHINES
# What the paper's text says of them, validation inside; of the others it prints the speeds alone.
PAPERS = {
    "Top-k / dense": published_value("yoon2022.ratio")["topk"],
    "Random-k / dense": published_value("yoon2022.ratio")["randomk"],
    "Top-k / dense, V100": published_value("yoon2022.ratio-v100")["topk"],
    "dense, V100 / A100": published_value("yoon2022.a100-over-v100"),
}
LINKED = ("dense", "topk")
COMPUTING = style.MethodStyle("", "#E69F00", "", "")
runs = no_runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        _ratios_panel(BETWEEN_METHODS, "Between methods, 8 A100 or V100", "Time per iteration, ratio"),
        _ratios_panel(BETWEEN_MACHINES, "8 V100 / 8 A100"),
        _links_panel,
    ]
    keys = marks.origin_legend_handles(ORIGINS)
    widths = (4, 2.4, 2.4)
    return plots.compose_figure(
        panels, 2.7, first_legend_entries=keys, legend_loc="outside lower left", width_ratios=widths
    )


def _ratios_panel(
    ratios: Mapping[str, tuple[JobName, JobName, tuple[int, ...]]], title: str, ylabel: str = ""
) -> plots.Panel:
    groups = {}
    for name, (slower, quicker, _) in ratios.items():
        look = style.method_style(slower[1])
        values = (
            Estimate(published_step_ratio(slower, quicker)),
            validation_free_step_ratio(slower, quicker),
        )
        place = name.partition(", V100 /")[0].replace("/ ", "/\n")
        groups[place] = [(look, origin, ratio) for origin, ratio in zip(ORIGINS, values, strict=True)]
    return plots.grouped_bars_panel(groups, reference_y=1, title=title, ylabel=ylabel)


def _links_panel(axes: plots.Axes) -> None:
    """Draw the milliseconds by which an iteration, and computing in it, took longer on the PCIe node."""
    groups = {}
    for method in LINKED:
        look = style.method_style(method)
        change = rederived.nvlink_to_pcie_change(method)
        values = ((look, change.iteration_ms), (COMPUTING, change.computing_ms))
        groups[look.label] = [(bar_look, ORIGINS[0], Estimate(ms)) for bar_look, ms in values]
    title = "PCIe node less NVLink node"
    ylabel = "Change per iteration (ms)"
    plots.grouped_bars_panel(groups, title=title, ylabel=ylabel)(axes)
    axes.margins(y=0.4)
    keys = [
        marks.Patch(facecolor=colour, alpha=0.3, edgecolor=colour, label=label)
        for colour, label in (("#555555", "iteration"), (COMPUTING.colour, "FP + BP + compression"))
    ]
    axes.legend(handles=keys, loc="upper left", borderpad=0)


def published_step_ratio(slower: JobName, quicker: JobName) -> float:
    """Return the ratio of the times of an iteration, which is the inverse ratio of the published speeds."""
    slow_ms, quick_ms = (
        rederived.published_iteration_ms(JOB_BY_GPU_AND_METHOD[job]) for job in (slower, quicker)
    )
    return slow_ms / quick_ms


def table(frames: Frames) -> list[Table]:
    """Return speeds per job, then ratios, then the lines behind them, then the two nodes."""
    speeds = [
        {
            "job": yoon2022.job_label(*name),
            "as published": rederived.samples_per_s_of_8_workers(rederived.published_iteration_ms(job)),
            "without validation": combine_independent_estimates(
                rederived.samples_per_s_of_8_workers, validation_free_step_ms(job)
            ),
        }
        for name, job in JOB_BY_GPU_AND_METHOD.items()
    ]
    ratios = [
        {
            "jobs": f"{yoon2022.job_label(*slower)} / {yoon2022.job_label(*quicker)}",
            "as published": published_step_ratio(slower, quicker),
            "without validation": validation_free_step_ratio(slower, quicker),
        }
        for slower, quicker, _ in RATIOS.values()
    ]
    lines = [
        {
            "job": yoon2022.job_label(*name),
            "without validation": fit_job_stall_regression(job).intercept_ms,
            "per ms of stall": fit_job_stall_regression(job).slope,
            "correlation of neighbours": fit_job_stall_regression(job).correlation,
            "windows without validation": ", ".join(map(format_number, validation_free_windows_ms(job))),
        }
        for name, job in JOB_BY_GPU_AND_METHOD.items()
    ]
    links = [
        {
            "method": style.method_style(method).label,
            "iteration, relative": 100 * (change.iteration_factor - 1),
            "iteration": change.iteration_ms,
            "FP + BP + compression": change.computing_ms,
        }
        for method in LINKED
        for change in [rederived.nvlink_to_pcie_change(method)]
    ]
    change_units = {"iteration, relative": "%", "iteration": "ms", "FP + BP + compression": "ms"}
    line_units = {"without validation": "ms", "windows without validation": "ms"}
    return [
        Table.from_rows("Training speed", speeds, dict.fromkeys(ORIGINS, "samples/s")),
        Table.from_rows("Time per iteration, ratio", ratios),
        Table.from_rows("A window's time over its stall", lines, line_units),
        Table.from_rows("PCIe node less NVLink node", links, change_units),
    ]


def facts(frames: Frames) -> dict[str, object]:
    """Return what changed between the nodes, and iterations without validation, logged and on the line."""
    correlations = [fit_job_stall_regression(job).correlation for job in JOB_BY_GPU_AND_METHOD.values()]
    numbers = {"least_alike": min(correlations), "most_alike": max(correlations)}
    windows = {}
    for method in LINKED:
        change = rederived.nvlink_to_pcie_change(method)
        job = JOB_BY_GPU_AND_METHOD["A100", method]
        numbers |= {
            f"{method}_slower": 100 * (change.iteration_factor - 1),
            f"{method}_iteration": change.iteration_ms,
            f"{method}_computing": change.computing_ms, f"{method}_line": validation_free_step_ms(job).value,
        }  # fmt: skip
        ends = sorted(validation_free_windows_ms(job))[::2]
        windows[f"{method}_free"] = " to ".join(map(format_number, ends))
    texts = {name: format_number(number) for name, number in numbers.items()}
    return {**yoon2022.BLOCK_FACTS, **texts, **windows}


def claims() -> list[Claim]:
    ratios = [
        make_claim(
            "yoon2022.speed-logs.ratio",
            _validation_free_ratio,
            slower,
            quicker,
            case=name.replace(" / ", "-"),
            name=name,
            section="training speed" if name in BETWEEN_METHODS else "GPU capability",
            answers=tuple(f"yoon2022.{answer}" for answer in answers),
            paper=round(published_step_ratio(slower, quicker), 3),
        )
        for name, (slower, quicker, answers) in RATIOS.items()
    ]
    published = [
        make_claim(
            "yoon2022.speed-logs.published", _published_ratio, slower, quicker, case=name.replace(" / ", "-"),
            name=name, section="training speed" if name in BETWEEN_METHODS else "GPU capability",
            answers=tuple(f"yoon2022.{answer}" for answer in answers), paper=PAPERS[name],
        )
        for name, (slower, quicker, answers) in RATIOS.items() if name in PAPERS
    ]  # fmt: skip
    return [
        *ratios,
        *published,
        make_claim("yoon2022.speed-logs.pcie-longer.topk", _percent_longer_on_pcie, "topk"),
        make_claim("yoon2022.speed-logs.pcie-longer.dense", _percent_longer_on_pcie, "dense"),
        make_claim("yoon2022.speed-logs.change-in-the-link", _change_beside_computing_ms, "topk"),
    ]


def _validation_free_ratio(_: Frames, slower: JobName, quicker: JobName) -> Estimate:
    return validation_free_step_ratio(slower, quicker)


def _published_ratio(frames: Frames, slower: JobName, quicker: JobName) -> Estimate:
    return exact_estimate(frames, published_step_ratio(slower, quicker), 2)


def _percent_longer_on_pcie(_: Frames, method: str) -> Estimate:
    return Estimate(100 * (rederived.nvlink_to_pcie_change(method).iteration_factor - 1))


def _change_beside_computing_ms(_: Frames, method: str) -> Estimate:
    change = rederived.nvlink_to_pcie_change(method)
    return Estimate(change.iteration_ms - change.computing_ms)
