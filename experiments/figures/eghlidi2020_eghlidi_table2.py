"""Table 2 of Eghlidi and Jaggi 2020: a layer-wise step, split, over 10 Gbit/s.

Theirs is a picture without numbers, of ResNet-18 on 8 K80 joined by 10 Gbit/s; the sentences are those of
section 4.2.2. Here VGG-16 stands in for ResNet-18 (14.7 instead of 11.2 million parameters).
"""

from __future__ import annotations

import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks
from analysis.pictures.numbers import brief, number
from analysis.records.frames import Frames
from analysis.records.steps import breakdown
from analysis.stats import SHARE, Value, of_phases, phase_difference, slowdown, taken
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim

TITLE = "Breakdown of a layer-wise step over 10 Gbit/s: who beats dense?"
MODE = "serialised"
SCALE = {"task.name": "resnet18_cifar10", "task.batch_size": 128, "workers": 8, "method.density": 0.01}
REPEATS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
SPARSE = {
    "method.density": 0.01, "method.density_warmup": [], "method.scope": "layer",
    "method.feedback": "gradient",
}  # fmt: skip
PACKED, REDUCED = {**SPARSE, "method.packed": True}, {**SPARSE, "method.exchange": "allreduce"}
VARIANTS: dict[str, RunSettings] = {
    "dense": {"method": "dense", "method.scope": "layer"},
    "topk": {"method": "topk", **PACKED},
    "randomk": {"method": "randomk", **PACKED},  # by torch.randperm
    "randomk-allreduce": {
        "method": "randomk", **REDUCED, "method.shared": True, "method.sampling": "hash",
    },
    "blockrandomk": {"method": "blockrandomk", **SPARSE},
    "blockrandomk-allreduce": {"method": "blockrandomk", **REDUCED},
}  # fmt: skip
LABELS = {
    "dense": "standard SGD",
    "topk": "Top-k",
    "randomk": "Random-k",
    "randomk-allreduce": "Random-k, allReduce",
    "blockrandomk": "Block-random-k",
    "blockrandomk-allreduce": "Block-random-k, allReduce",
}
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
    return yoon2022.timing_runs(profile, MODE, VARIANTS, at="eghlidi-table2", repeats=REPEATS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = yoon2022.present(frames, MODE)
    bars = [
        plots.Bar(LABELS[method], _parts_ms(frames, method), _told(frames, method))
        for method in VARIANTS
        if method in methods
    ]
    keys = marks.phase_keys(PARTS, {part: label for part, (_, label) in PARTS.items()})
    panel = plots.piles(bars, xlabel=f"Time per step (ms{captions.simulated(frames)})", xmargin=0.14)
    return plots.picture([panel], 2.4, keys=keys, ncols=5)


def _told(frames: Frames, method: str) -> str:
    """The whole step, and its ratio to dense."""
    text, against = f"{number(round(sum(_parts_ms(frames, method).values())))} ms", _ratio(frames, method)
    return f"{text} ({brief(against.value)}x)" if against is not None and method != "dense" else text


def table(frames: Frames) -> Table:
    """Milliseconds of each part, and the ratio to standard SGD."""
    methods = yoon2022.present(frames, MODE)
    unit = f"ms{captions.simulated(frames)}"
    rows = [
        {
            "method": LABELS[method],
            **{PARTS[part][1]: took for part, took in _parts_ms(frames, method).items()},
            "step": taken(frames, yoon2022.keys(frames, method, MODE), "slowest", unit=1e3),
            "step / standard SGD": _ratio(frames, method),
        }
        for method in VARIANTS
        if method in methods
    ]
    units = {"step": unit, **{label: unit for _, label in PARTS.values()}}
    note = "Means over ranks; a step on its slowest rank."
    return Table("Time per layer-wise step, by part", pd.DataFrame(rows), units, note)


def caption(frames: Frames, profile: str) -> str:
    return (
        "Mean time of a training step by part, layer by layer, density 0.01, with error feedback; behind "
        "each bar its ratio to standard SGD, which exchanges each layer whole. Random-k with allGather draws "
        "by torch.randperm, with allReduce by a hash that all workers share. VGG-16 on CPU cores stands in "
        f"for ResNet-18 on K80s. {captions.setting(frames)} {captions.timing(frames)}"
    )


def claims() -> list[Claim]:
    quicker = ("blockrandomk", "blockrandomk-allreduce")
    return [
        *(
            claim("eghlidi2020.dense-longer", _ratio, "dense", method, case=method, label=LABELS[method])
            for method in quicker
        ),
        *(
            claim("eghlidi2020.longer", _ratio, method, "dense", case=method, label=LABELS[method])
            for method in VARIANTS
            if method not in ("dense", *quicker)
        ),
        *(
            claim("eghlidi2020.passes", _passes, method, case=method, label=LABELS[method])
            for method in VARIANTS
            if method != "dense"
        ),
        claim("eghlidi2020.topk-exchanges-sooner", _saved),
        claim("eghlidi2020.topk-mostly-codes", _coding),
    ]


def _ratio(frames: Frames, longer: str, shorter: str = "dense") -> Value | None:
    return slowdown(frames, *_pair(frames, longer, shorter))


def _pair(frames: Frames, *methods: str) -> list[list[str]]:
    return [yoon2022.keys(frames, method, MODE) for method in methods]


def _passes(frames: Frames, method: str) -> Value | None:
    """Time of FP and BP beyond dense's, in percent of these."""
    own, dense = _pair(frames, method, "dense")
    more = phase_difference(frames, own, dense, ("forward", "backward"))
    if more is None:
        return None
    return more.times(100 / float(breakdown(frames, dense)[["forward", "backward"]].sum()))


def _saved(frames: Frames) -> Value | None:
    dense, topk = _pair(frames, "dense", "topk")
    less = phase_difference(frames, dense, topk, EXCHANGE)
    return less.times(1e3) if less else None


def _coding(frames: Frames) -> Value | None:
    phases = [phase for phase in CODING if f"{phase}_s" in frames.steps]
    share = of_phases(
        frames,
        yoon2022.keys(frames, "topk", MODE),
        ("step", *phases),
        lambda step, *coding: 100 * sum(coding) / step,
        SHARE,
    )
    if share is None:
        return None
    low, high = (None if edge is None else edge - 50 for edge in (share.low, share.high))
    return share._replace(value=share.value - 50, low=low, high=high)


def _parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Mean milliseconds of their parts; what two clocks share by microseconds is no negative bar."""
    seconds = breakdown(frames, yoon2022.keys(frames, method, MODE))
    return {
        part: max(0.0, 1e3 * sum(float(seconds.get(phase, 0.0)) for phase in phases))
        for part, (phases, _) in PARTS.items()
    }
