"""Yoon and Oh 2022 conclude that sparsification pays where the bandwidth is narrow: measured on slow links.

Nodes of this machine are joined by token buckets of 1 and 10 Gbit/s (cluster=netns); the paper had NVLink and
PCIe only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames, empty, restrict
from analysis.numbers import brief, number
from analysis.remembered import remembered
from analysis.stats import POSITIVE, Value, curve, of_phases, phase_difference, slowdown
from analysis.steps import breakdown
from analysis.tables import Table
from experiments.figures import _reaching
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig3_slim as slim

TITLE = "Slow links: who is faster than dense at 1 and 10 Gbit/s, and to the same accuracy"
MODE = "production"
SCALE = yoon2022.TIMING_SCALE
LINKS = ("ethernet_1g", "ethernet_10g")
# Two cores compute for four workers. The smallest batch comes nearest to the share that communication would
# have beside GPUs: the paper's A100 computed 29 ms for 128 images, and 59 MB take half a second at 1 Gbit/s.
EMULATED = [
    "cluster=netns", "workers=4", "task.batch_size=2", "timing.warmup_steps=2", "alternate.block_steps=2",
    "launch.on_mismatch=label",
]  # fmt: skip
SCALES = {
    "smoke": [
        "task=cnn_digits", "cluster=netns", "workers=2", "task.batch_size=16", "timing.warmup_steps=2",
        "launch.on_mismatch=label",
    ],
    "laptop": ["task=vgg16_cifar10", *EMULATED, "alternate.limit_min=9"],
    # Of this item every profile is this machine's: no GPU takes part in an emulated link.
    "paper": ["task=vgg16_cifar10", "device=cpu", *EMULATED, "alternate.limit_min=30"],
}  # fmt: skip
REPEATS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
# The model whose learning curves are shipped (fig3-slim), with as many workers: its steps times these times.
SLIM = {
    "task": "slimvgg_cifar10", "task.batch_size": "8", "workers": "8", "alternate.limit_min": "3",
}  # fmt: skip
ACCURACIES = (
    60.0,
    65.0,
    70.0,
    75.0,
    80.0,
    85.0,
)  # % top-1; the highest one that dense and Top-k reach counts
FUSED = [*yoon2022.TOPK, "select=fused"]
FACTOR = 3.0  # the aim of this project at 1 Gbit/s, against dense that does not overlap
LOOKS = {
    "dense": style.look("dense"),
    "dense-buckets-overlapped": style.Look("dense, overlapped", "#777777", "o", "++"),
    "topk": style.look("topk")._replace(label="Top-k, torch.topk"),
    "topk-fused": style.look("topk-fused"),
    "topk-buckets-fused-overlapped": style.look("topk-buckets-fused-overlapped"),
    "randomk-hash": style.look("randomk-hash")._replace(label="Random-k, by hash"),
    "oktopk": style.Look("Ok-Topk", "#44AA99", "p", ""),
    "powersgd": style.Look("PowerSGD, rank 2", "#999933", "d", ""),
    "topk-denser-fused": style.Look("Top-k, fused, 0.01", "#56B4E9", "D", "\\\\"),
}
# How the curves of fig3-slim are called among what takes turns here: another execution, the same numbers.
CURVES = {
    "dense": "dense",
    "topk": "topk-fused",
    "topk-denser": "topk-denser-fused",
    "randomk": "randomk-hash",
}
SLIM_VARIANTS = {
    "dense": ["method=dense"],
    "topk-fused": FUSED,
    "topk-denser-fused": [*FUSED, f"method.density={slim.DENSER}"],
    "randomk-hash": yoon2022.TIMED["randomk-hash"],
}
COMMUNICATION = ("wait", "transfer")


def runs(profile: str) -> list[list[str]]:
    buckets = _buckets(profile)
    variants = {
        "dense": ["method=dense"],
        "dense-buckets-overlapped": ["method=dense", buckets, "overlap=true"],
        "topk": yoon2022.TOPK,
        "topk-fused": FUSED,
        "topk-buckets-fused-overlapped": [*FUSED, buckets, "overlap=true"],
        "randomk-hash": yoon2022.TIMED["randomk-hash"],
        "oktopk": ["method=oktopk", "method.density_warmup=[]"],
        "powersgd": ["method=powersgd"],
    }
    found = [
        run
        for link in LINKS
        for run in yoon2022.timing_runs(
            profile, MODE, variants, f"link={link}", scales=SCALES, repeats=REPEATS
        )
    ]
    return found + (slim_runs(profile) if profile != "smoke" else [])


def slim_runs(profile: str) -> list[list[str]]:
    """What a step of the model of fig3-slim takes over the slowest link."""
    names = [word.partition("=")[0] for word in SCALES[profile]]
    words = [
        f"{name}={SLIM[name]}" if name in SLIM else word
        for name, word in zip(names, SCALES[profile], strict=True)
    ]
    return yoon2022.timing_runs(
        profile, MODE, SLIM_VARIANTS, f"link={LINKS[0]}", scales={profile: words}, repeats=REPEATS
    )


def _buckets(profile: str) -> str:
    """MB: of VGG-16's 59, the most that leaves several; the small CNN of smoke has 0.13."""
    return "method.scope=0.05" if profile == "smoke" else "method.scope=8"


def more_runs(profile: str) -> list[list[str]]:
    """The trainings behind the time to an accuracy, which fig3-slim shows: hours of them."""
    return [*slim.runs(profile), *slim.more_runs(profile)]


# --- what was measured
# ------------------------------------------------------------------------------------


@remembered
def _part(frames: Frames, validate: str, is_slim: bool) -> Frames:
    """The runs that took turns (validate: `never`) or trained (`epoch`), of the slim model or of others."""
    runs = frames.runs
    if not len(runs):
        return frames
    mine = runs["timing.mode"].eq(MODE) & runs["train.validate"].eq(validate)
    return restrict(frames, list(runs["key"][mine & (runs["task.name"].eq("slimvgg_cifar10") == is_slim)]))


@remembered
def links(frames: Frames) -> dict[str, Frames]:
    """The runs of each link that took turns over it, the slowest link first; without the slim model's."""
    timed = _part(frames, "never", is_slim=False)
    if not len(timed.runs):
        return {}
    ordered = timed.runs.sort_values("cluster.link.beta_s_per_byte", ascending=False)
    return {
        str(link): restrict(frames, list(ordered["key"][ordered["cluster.link.name"].eq(link)]))
        for link in dict.fromkeys(ordered["cluster.link.name"])
    }


def _methods(frames: Frames) -> list[str]:
    order = [*LOOKS, *yoon2022.present(frames, MODE)]
    found = yoon2022.present(frames, MODE)
    return sorted(found, key=order.index)


def look(method: str) -> style.Look:
    return LOOKS.get(method, style.look(method))


def ratio(frames: Frames, link: str, method: str, baseline: str = "dense") -> Value | None:
    """Step time of a method over that of another, on a link; None where it was not measured."""
    found = links(frames).get(link, empty())
    return slowdown(found, *(yoon2022.keys(found, each, MODE) for each in (method, baseline)))


def _step_s(frames: Frames, method: str) -> Value | None:
    return of_phases(
        frames, yoon2022.keys(frames, method, MODE), ("slowest",), lambda seconds: seconds, POSITIVE
    )


# --- time to an accuracy: steps of fig3-slim's trainings times what a step takes over the slowest link
# ------------------------------------------------------------------------------------


def _slim_steps(frames: Frames) -> Frames:
    return _part(frames, "never", is_slim=True)


def _trainings(frames: Frames) -> dict[str, list[str]]:
    """The keys of the whole trainings, by their name in fig3-slim."""
    found = _part(frames, "epoch", is_slim=True)
    return {name: line.keys for name, line in slim.lines(found).items()} if len(found.runs) else {}


def steps_to(frames: Frames, name: str, accuracy: float) -> _reaching.Steps:
    return _reaching.steps_to(frames, _trainings(frames).get(name, []), slim.COLUMN, accuracy)


def seconds_to(frames: Frames, name: str, accuracy: float) -> Value | None:
    """Seconds of a training until a validation first shows this accuracy, over the slowest link; None where
    not every seed gets there.
    """
    step = _step_s(_slim_steps(frames), CURVES[name])
    return step and _reaching.seconds_to(steps_to(frames, name, accuracy), step.value)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not (by_link := links(frames)):
        raise ValueError(f"nothing to draw: there is no run in timing mode {MODE}")
    steps = _slim_steps(frames)
    curves = {name: keys for name, keys in _trainings(frames).items() if _step_s(steps, CURVES[name])}
    methods = list(dict.fromkeys(method for found in by_link.values() for method in _methods(found)))
    columns = len(by_link) + bool(curves)
    with plots.canvas(style.two_columns(2.9), 1, columns, squeeze=False) as (figure, (row,)):
        for at, (axes, (link, found)) in enumerate(zip(row, by_link.items(), strict=False)):
            _draw_link(axes, found, methods)
            axes.set_title(_title(found, link))
            axes.set_yticks(range(len(methods)), [look(method).label for method in methods] if not at else [])
        if curves:
            _draw_curves(row[-1], frames, curves)
        figure.legend(handles=_keys(), loc="outside lower center", ncols=3)
    return figure


def _title(frames: Frames, link: str) -> str:
    """Its bandwidth, and in brackets what the workers found."""
    beta = captions.values(frames, "cluster.link.beta_s_per_byte")
    found = captions.values(frames, "provenance.machine.link.together_gbit_s")
    rate = f"{number(8e-9 / beta[0])} Gbit/s" if beta else link
    return f"{rate} (found: {number(min(found))})" if found else rate


def _draw_link(axes: plots.Axes, frames: Frames, methods: Sequence[str]) -> None:
    """Milliseconds of a step, a bar for each method from the top."""
    longest = max(sum(_parts_ms(frames, method).values()) for method in _methods(frames))
    for y, method in enumerate(methods):
        if not yoon2022.keys(frames, method, MODE):
            continue
        plots.pile(axes, y, parts := _parts_ms(frames, method))
        end = sum(parts.values())
        against = slowdown(frames, *(yoon2022.keys(frames, each, MODE) for each in (method, "dense")))
        text = brief(end)
        if against is not None and method != "dense":
            text += f" ({brief(against.value, 2)}x)"
        plots.above(axes, end, y, text, xytext=(3, 0), ha="left", va="center", fontsize=6)
    axes.set(xlabel=f"Time per step (ms{captions.simulated(frames)})", xlim=(0, 1.45 * longest))
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


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


def _keys() -> list[plots.Patch]:
    rest, *others = plots.phase_keys(["forward", *COMMUNICATION])
    rest.set_label("all else; with overlap, all")
    return [rest, *others]


def _draw_curves(axes: plots.Axes, frames: Frames, curves: Mapping[str, list[str]]) -> None:
    steps = _slim_steps(frames)
    for name, keys in curves.items():
        step, table = _step_s(steps, CURVES[name]), curve(frames, keys, slim.COLUMN)
        if step is not None and len(table):
            plots.curve(axes, table["step"] * step.value / 60, table, look(CURVES[name]))
    axes.set(
        xlabel="Minutes over 1 Gbit/s, derived", ylabel="Validation top-1 (%)", title="Slim VGG-16, 8 workers"
    )
    axes.set_ylim(bottom=0)  # room for the legend
    axes.legend(loc="lower right", fontsize=6)


def table(frames: Frames) -> list[Table]:
    """Times and ratios on each link, and the derived time to an accuracy."""
    tables = []
    for link, found in links(frames).items():
        rows = []
        for method in _methods(found):
            own, dense = (yoon2022.keys(found, each, MODE) for each in (method, "dense"))
            overlapped = yoon2022.keys(found, "dense-buckets-overlapped", MODE)
            step = _step_s(found, method)
            rows.append(
                {
                    "method": look(method).label,
                    "step": step.times(1e3) if step else None,
                    **{phase: _parts_ms(found, method).get(phase) for phase in COMMUNICATION},
                    "step / dense": slowdown(found, own, dense),
                    "step / dense, overlapped": slowdown(found, own, overlapped),
                }
            )
        units = dict.fromkeys(("step", *COMMUNICATION), f"ms{captions.simulated(found)}")
        tables.append(
            Table(f"Time per step over {_title(found, link)}", pd.DataFrame(rows), units, PARTS_NOTE)
        )
    reached = [
        {
            "method": look(CURVES[name]).label,
            **{f"{number(accuracy)} %": seconds_to(frames, name, accuracy) for accuracy in ACCURACIES},
        }
        for name in _trainings(frames)
    ]
    if reached and _slim_steps(frames).runs.size:
        units = {f"{number(accuracy)} %": "s" for accuracy in ACCURACIES}
        tables.append(
            Table(
                "Time to a validation accuracy over 1 Gbit/s, derived",
                pd.DataFrame(reached),
                units,
                f"{DERIVED} {INTERVALS}",
            )
        )
    return tables


PARTS_NOTE = "Means over ranks; a step on its slowest rank. What overlaps is not taken apart."
DERIVED = (
    "Derived, not run as a whole: the steps until a validation of fig3-slim's trainings (8 virtual workers) "
    "first shows this accuracy, times the measured step of the same model with 8 workers over the link."
)
INTERVALS = (
    "Means over seeds; a dash where not every seed gets there. Intervals are over seeds and begin where the "
    "validation before might have shown it; a step's time counts as known."
)


def caption(frames: Frames, profile: str) -> str:
    derived = f" Right: accuracy against time. {DERIVED}" if _trainings(frames) else ""
    return (
        "Time of a training step over links that are really slow: nodes on one machine, joined by token "
        "buckets. Top-k, Random-k and Ok-Topk at density 0.001; all variants in turns in one group of "
        "processes; behind each bar the ratio to dense. Overlapped: buckets of 8 MB travel while "
        f"backpropagation goes on.{derived} {captions.setting(frames)} {captions.timing(frames)}"
    )


# --- claims
# ------------------------------------------------------------------------------------


def claims() -> list[Claim]:
    return [
        *(_faster(link, method, "dense") for link in LINKS for method in ("topk", "topk-fused")),
        *(_faster(link, "topk-buckets-fused-overlapped", "dense-buckets-overlapped") for link in LINKS),
        Claim(
            text="on 1 Gbit/s, dense takes several times as long as fused Top-k: how many times",
            paper=None,
            unit="x",
            source="no published number; the aim of this project",
            kind="ordering",
            tolerance=FACTOR,
            reason="Neither overlaps; VGG-16 sends 59 MB a step, Top-k 0.1 MB.",
            ours=lambda frames: ratio(frames, LINKS[0], "dense", "topk-fused"),
            timed=True,
            group=NARROW,
        ),
        Claim(
            text="on 1 Gbit/s, Top-k has an accuracy sooner than dense, the highest of both: how many times",
            paper="expected",
            unit="x",
            source="text under Fig. 4: better than the baseline when the communication bandwidth is narrow",
            kind="ordering",
            tolerance=1.0,
            reason=f"More than once is sooner. {DERIVED}",
            ours=_sooner,
            timed=True,
            group=NARROW,
        ),
        Claim(
            text="communication of Top-k falls once its selection is cheap, on 1 Gbit/s: by how much",
            paper="expected",
            unit="ms",
            source="section on future work: a cheap selection removes the delayed synchronisation",
            kind="ordering",
            tolerance=0.0,
            reason="Wait and transfer of both, with the same bytes; any margin counts.",
            ours=_communication_falls,
            timed=True,
        ),
    ]


NARROW = "sparsification on narrow links"


def _faster(link: str, method: str, baseline: str) -> Claim:
    rate = link.removeprefix("ethernet_").replace("g", " Gbit/s")
    return Claim(
        text=f"on {rate}, {look(method).label} is faster than {look(baseline).label}: how many times",
        paper="expected",
        unit="x",
        source="text under Fig. 4: better than the baseline when the communication bandwidth is narrow",
        kind="ordering",
        tolerance=1.0,
        reason="More than once is faster; the paper had NVLink and PCIe, and no such link.",
        ours=lambda frames: ratio(frames, link, baseline, method),
        timed=True,
        group=NARROW,
    )


def _sooner(frames: Frames) -> Value | None:
    """Dense's time over Top-k's until the highest of `ACCURACIES` that all seeds of both reach."""
    timed, names = _slim_steps(frames), ("dense", "topk")
    times = slowdown(timed, *(yoon2022.keys(timed, CURVES[name], MODE) for name in names))
    for accuracy in reversed(ACCURACIES):
        dense, topk = (steps_to(frames, name, accuracy) for name in names)
        if times and _reaching.all_reach(dense) and _reaching.all_reach(topk):
            return _reaching.sooner(dense, topk, times)
    return None


def _communication_falls(frames: Frames) -> Value | None:
    found = links(frames).get(LINKS[0], empty())
    torch, fused = (yoon2022.keys(found, method, MODE) for method in ("topk", "topk-fused"))
    less = phase_difference(found, torch, fused, COMMUNICATION)
    return less.times(1e3) if less else None
