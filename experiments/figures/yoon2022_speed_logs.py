"""The training speeds of Yoon and Oh 2022 from its own job logs: as published, and without validation."""

from __future__ import annotations

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import marks, style
from analysis.pictures.numbers import number
from analysis.published import rederived
from analysis.published.rederived import JOB, estimate
from analysis.records.frames import Frames
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim

TITLE = "Training speed from the authors' logs, with and without validation in the timed loop"
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
LINKED = ("dense", "topk")
COMPUTING = style.Look("", "#E69F00", "", "")
JobName = tuple[str, str]  # a job by its GPU and method


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        plots.ratio_bars(
            {name.partition(", V100 /")[0].replace("/ ", "/\n"): [
                (style.look(slower[1]), origin, value)
                for origin, value in zip(
                    ORIGINS, (Value(as_published(slower, quicker)), corrected(slower, quicker)), strict=True
                )
             ] for name, (slower, quicker, _) in ratios.items()},
            level=1, title=title, ylabel=ylabel,
        )
        for ratios, title, ylabel in (
            (BETWEEN_METHODS, "Between methods, 8 A100 or V100", "Time per iteration, ratio"),
            (BETWEEN_MACHINES, "8 V100 / 8 A100", ""),
        )
    ]  # fmt: skip
    keys, widths = marks.origin_keys(ORIGINS), (4, 2.4, 2.4)
    return plots.picture([*panels, _links], 2.7, keys=keys, loc="outside lower left", width_ratios=widths)


def _links(axes: plots.Axes) -> None:
    """Milliseconds by which an iteration, and computing in it, took longer on the PCIe node."""
    changes = {style.look(method): rederived.link_change(method) for method in LINKED}
    groups = {
        look.label: [
            (look, ORIGINS[0], Value(change.iteration)),
            (COMPUTING, ORIGINS[0], Value(change.computing)),
        ]
        for look, change in changes.items()
    }
    title, ylabel = "PCIe node less NVLink node", "Change per iteration (ms)"
    plots.ratio_bars(groups, title=title, ylabel=ylabel)(axes)
    axes.margins(y=0.4)
    keys = [
        marks.Patch(facecolor=colour, alpha=0.3, edgecolor=colour, label=label)
        for colour, label in (("#555555", "iteration"), (COMPUTING.colour, "FP + BP + compression"))
    ]
    axes.legend(handles=keys, loc="upper left", borderpad=0)


def as_published(slower: JobName, quicker: JobName) -> float:
    """Ratio of the times of an iteration, which is the inverse ratio of the published speeds."""
    return rederived.published_iteration_ms(JOB[slower]) / rederived.published_iteration_ms(JOB[quicker])


def corrected(slower: JobName, quicker: JobName) -> Value:
    """The same of the times without validation."""
    return estimate(rederived.iteration_ms(JOB[slower]) / rederived.iteration_ms(JOB[quicker]))


def table(frames: Frames) -> list[Table]:
    """Speeds per job, then ratios, then the two nodes."""
    speeds = [
        {
            "job": yoon2022.of_job(*of),
            "as published": rederived.speed(rederived.published_iteration_ms(job)),
            "without validation": estimate(rederived.speed(rederived.iteration_ms(job))),
        }
        for of, job in JOB.items()
    ]
    ratios = [
        {
            "jobs": f"{yoon2022.of_job(*slower)} / {yoon2022.of_job(*quicker)}",
            "as published": as_published(slower, quicker),
            "without validation": corrected(slower, quicker),
        }
        for slower, quicker, _ in RATIOS.values()
    ]
    changes = {method: rederived.link_change(method) for method in LINKED}
    links = [
        {
            "method": style.look(method).label,
            "iteration, relative": 100 * (change.slower - 1),
            "iteration": change.iteration,
            "FP + BP + compression": change.computing,
        }
        for method, change in changes.items()
    ]
    per_second = dict.fromkeys(("as published", "without validation"), "samples/s")
    change_units = {"iteration, relative": "%", "iteration": "ms", "FP + BP + compression": "ms"}
    return [
        Table("Training speed", pd.DataFrame(speeds), per_second),
        Table("Time per iteration, ratio", pd.DataFrame(ratios)),
        Table("PCIe node less NVLink node", pd.DataFrame(links), change_units),
    ]


def caption(frames: Frames, profile: str) -> str:
    dense, topk = (rederived.link_change(method) for method in LINKED)
    slower = [number(100 * (change.slower - 1)) for change in (dense, topk)]
    return (
        "Time per iteration, relative: light, of the published speeds; full, with rank 0's validation taken "
        "out of the timed loop, which adds the same time to every method and so pulls them together. Right: "
        "what changed from the node with NVLink to the one with PCIe (links inferred from NCCL's channels, 4 "
        f"workers each, one job each, no interval): Top-k's iteration grew by {number(topk.iteration)} "
        f"ms, but FP + BP + compression, which no link takes part in, by {number(topk.computing)}; so "
        f"the nodes differ by more than the link. Dense grew by {number(dense.iteration)} ms "
        f"({slower[0]} %; the paper's 2 % is Top-k's {slower[1]} %), FP + BP by "
        f"{number(dense.computing)}. These nodes' GPUs are not named; the first one's FP + BP "
        f"are those of the V100's. {yoon2022.LOGS} {yoon2022.INTERVALS} The mean speed is taken as it "
        f"was logged; one window of 48 iterations without validation printed {_free('dense')} (dense), "
        f"{_free('topk')} (Top-k) and {_free('randomk')} ms (Random-k), where "
        f"{_time('dense')}, {_time('topk')} and {_time('randomk')} are derived for the mean of all."
    )


def claims() -> list[Claim]:
    label = {method: style.look(method).label for method in ("dense", "topk", "randomk")}
    ratios = [
        claim(
            "yoon2022.speed-logs.ratio", _ratio, slower, quicker, case=name.replace(" / ", "-"), name=name,
            section="training speed" if name in BETWEEN_METHODS else "GPU capability",
            answers=tuple(f"yoon2022.{answer}" for answer in answers),
            paper=round(as_published(slower, quicker), 3),
        )
        for name, (slower, quicker, answers) in RATIOS.items()
    ]  # fmt: skip
    orders = [
        claim(
            f"yoon2022.speed-logs.faster.{fast}-{slow}", _longer, (gpu, slow), (gpu, fast),
            fast=label[fast], slow=label[slow], gpu=gpu,
            paper=round(100 * (as_published((gpu, slow), (gpu, fast)) - 1)),
        )
        for (gpu, slow), (_, fast), _ in list(BETWEEN_METHODS.values())[:3]
    ]  # fmt: skip
    return [
        *ratios,
        *orders,
        *(
            claim(f"yoon2022.speed-logs.pcie-longer.{method}", _longer_on_pcie, method)
            for method in ("topk", "dense")
        ),
        claim("yoon2022.speed-logs.change-in-the-link", _change_beside_computing, "topk"),
    ]


def _ratio(_: Frames, slower: JobName, quicker: JobName) -> Value:
    return corrected(slower, quicker)


def _longer(_: Frames, slower: JobName, quicker: JobName) -> Value:
    return corrected(slower, quicker).more_in_percent()


def _longer_on_pcie(_: Frames, method: str) -> Value:
    return Value(100 * (rederived.link_change(method).slower - 1))


def _change_beside_computing(_: Frames, method: str) -> Value:
    change = rederived.link_change(method)
    return Value(change.iteration - change.computing)


def _free(method: str) -> str:
    return number(rederived.IN_A_FREE_WINDOW_MS[JOB["A100", method]])


def _time(method: str) -> str:
    return number(float(rederived.iteration_ms(JOB["A100", method])[0]))
