"""Table 2 of Eghlidi and Jaggi 2020: a layer-wise step, split, over 10 Gbit/s.

Theirs is a picture without numbers, of ResNet-18 on 8 K80 joined by 10 Gbit/s; the sentences are those of
section 4.2.2. Here VGG-16 stands in for ResNet-18 (14.7 instead of 11.2 million parameters).
"""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import brief, number
from analysis.stats import POSITIVE, SHARE, Value, of_phases, phase_difference, slowdown
from analysis.steps import breakdown
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Breakdown of a layer-wise step over 10 Gbit/s: who beats dense?"
MODE = "serialised"
SCALE = {"task.name": "resnet18_cifar10", "task.batch_size": 128, "workers": 8, "method.density": 0.01}
EMULATED = ["cluster=netns", "link=ethernet_10g", "timing.warmup_steps=2", "launch.on_mismatch=label"]
SCALES = {
    "smoke": ["task=cnn_digits", "workers=2", "task.batch_size=16", *EMULATED],
    "laptop": [
        "task=vgg16_cifar10", "workers=4", "task.batch_size=8", *EMULATED, "alternate.block_steps=2",
        "alternate.limit_min=10",
    ],
    "paper": [
        "task=vgg16_cifar10", "workers=8", "device=cpu", "task.batch_size=8", *EMULATED,
        "alternate.block_steps=2", "alternate.limit_min=60",
    ],
}  # fmt: skip
REPEATS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
SPARSE = "method.density=0.01 method.density_warmup=[] method.scope=layer method.feedback=gradient"
PACKED, REDUCED = "method.packed=true", "method.exchange=allreduce"
VARIANTS = {
    "dense": ["method=dense", "method.scope=layer"],
    "topk": ["method=topk", SPARSE, PACKED],
    "randomk": ["method=randomk", SPARSE, PACKED],  # by torch.randperm
    "randomk-allreduce": ["method=randomk", SPARSE, REDUCED, "method.shared=true", "method.sampling=hash"],
    "blockrandomk": ["method=blockrandomk", SPARSE],
    "blockrandomk-allreduce": ["method=blockrandomk", SPARSE, REDUCED],
}
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
SECTION = "section 4.2.2, on their Table 2"
SAME = 5.0  # % of dense's: forward and backward passes within it are constant


def runs(profile: str) -> list[list[str]]:
    return yoon2022.timing_runs(profile, MODE, VARIANTS, scales=SCALES, repeats=REPEATS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = yoon2022.present(frames, MODE)
    ordered = [method for method in VARIANTS if method in methods]
    with plots.canvas(style.two_columns(2.4)) as (figure, axes):
        for y, method in enumerate(ordered):
            parts = _parts_ms(frames, method)
            plots.pile(axes, y, parts)
            against, end = _ratio(frames, method), sum(parts.values())
            text = f"{number(round(end))} ms"
            if against is not None and method != "dense":
                text += f" ({brief(against.value)}x)"
            plots.above(axes, end, y, text, xytext=(3, 0), ha="left", va="center")
        axes.set_yticks(range(len(ordered)), [LABELS[method] for method in ordered])
        axes.set_ylim(len(ordered) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.14)
        axes.set_xlabel(f"Time per step (ms{captions.simulated(frames)})")
        keys = plots.phase_keys(PARTS)
        for key, (_, label) in zip(keys, PARTS.values(), strict=True):
            key.set_label(label)
        figure.legend(handles=keys, loc="outside lower center", ncols=5)
    return figure


def table(frames: Frames) -> Table:
    """Milliseconds of each part, and the ratio to standard SGD."""
    methods = yoon2022.present(frames, MODE)
    unit = f"ms{captions.simulated(frames)}"
    rows = [
        {
            "method": LABELS[method],
            **{PARTS[part][1]: took for part, took in _parts_ms(frames, method).items()},
            "step": _step_ms(frames, method),
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
    only = "Block-random-k is the only configuration with a lower time than standard SGD"
    return [
        *(
            _order(
                f"standard SGD takes longer than {LABELS[method]}: how many times", only, ("dense", method)
            )
            for method in ("blockrandomk", "blockrandomk-allreduce")
        ),
        *(
            _order(
                f"{LABELS[method]} takes longer than standard SGD: how many times", only, (method, "dense")
            )
            for method in ("topk", "randomk", "randomk-allreduce")
        ),
        *(
            Claim(
                text=f"forward and backward passes of {LABELS[method]}, less those of standard SGD",
                paper=0.0,
                unit="%",
                source=f"{SECTION}: constant across all algorithms",
                kind="shape",
                tolerance=SAME,
                reason=f"A test of equivalence: the whole interval within {number(SAME)} % is constant.",
                ours=partial(_passes, method=method),
                timed=True,
                group="constant passes",
            )
            for method in VARIANTS
            if method != "dense"
        ),
        Claim(
            text="Top-k's gradients are exchanged in less time than standard SGD's: by how much",
            paper="in words",
            unit="ms",
            source=f"{SECTION}: compression leads to less time for the exchange",
            kind="ordering",
            tolerance=0.0,
            reason="Wait and transfer; any margin counts.",
            ours=_saved,
            timed=True,
        ),
        Claim(
            text="Top-k spends most of its step on coding: its share above a half",
            paper="in words",
            unit="points",
            source=f"{SECTION}: Top-k spends most of its time to find the top k gradients",
            kind="ordering",
            tolerance=0.0,
            reason="Select, packing and scatter count as coding and decoding; more than half is most.",
            ours=_coding,
            timed=True,
        ),
    ]


def _order(text: str, sentence: str, pair: tuple[str, str]) -> Claim:
    return Claim(
        text=text,
        paper="in words",
        unit="x",
        source=f"{SECTION}: {sentence}",
        kind="ordering",
        tolerance=1.0,
        reason="More than once is longer. CPU cores compute and select here, not K80s.",
        ours=partial(_ratio, longer=pair[0], shorter=pair[1]),
        timed=True,
        group="who beats standard SGD",
    )


def _ratio(frames: Frames, longer: str, shorter: str = "dense") -> Value | None:
    return slowdown(frames, *_pair(frames, longer, shorter))


def _pair(frames: Frames, *methods: str) -> list[list[str]]:
    return [yoon2022.keys(frames, method, MODE) for method in methods]


def _passes(frames: Frames, method: str) -> Value | None:
    """What FP and BP take more than dense's, in percent of these."""
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


def _step_ms(frames: Frames, method: str) -> Value | None:
    return of_phases(
        frames, yoon2022.keys(frames, method, MODE), ("slowest",), lambda seconds: 1e3 * seconds, POSITIVE
    )


def _parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Mean milliseconds of their parts; what two clocks share by microseconds is no negative bar."""
    seconds = breakdown(frames, yoon2022.keys(frames, method, MODE))
    return {
        part: max(0.0, 1e3 * sum(float(seconds.get(phase, 0.0)) for phase in phases))
        for part, (phases, _) in PARTS.items()
    }
