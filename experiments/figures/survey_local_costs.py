"""What local steps and coded messages save, by the papers' own formulas: nothing is run.

A message is what one worker hands over, as the papers' ratios count it. Collectives send more: an allreduce
about two such messages, gathering one to each other worker. Scales of tensors, a few bytes each, are left
out. That the library packs messages to the bytes computed here is a test (tests/figures/test_local_costs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.stats import PRINTED, Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures.papers import claim, value

TITLE = "What local steps and coded messages save, by arithmetic, beside what is published"
FP32, BF16 = 4.0, 2.0  # bytes of an element
FP4 = 0.5
TOPK, TOPK_ENTRY = 0.001, 8  # density; bytes of an fp32 and of an int32
SPARSELOCO: dict[str, int] = value("sarfi2025.message")
DEMO: dict[str, int] = value("peng2024.message")
COEFFICIENT = DEMO["place"] + DEMO["value"]  # bytes
PERIODS: dict[str, int] = value("iacob2025.periods")
DESLOC_EVERY = 256  # inferred: the power of two at which the published 170 times come out
GBIT: dict[str, dict[int, float]] = value("douillard2025.gbit")
LOSS: dict[str, dict[int, float]] = value("douillard2025.loss")
EXCHANGED: dict[str, dict[int, float]] = value("douillard2025.exchanged")
HOURS: dict[str, dict[int, float]] = value("douillard2025.hours")
GBIT_PER_HOUR = 3600  # through 1 Gbit/s
GB, MEGABIT = 1e9, 1e6
MODEL = 1_000_000_000  # elements in the picture
EVERY = np.geomspace(1, 1000, 31)


class Scheme(NamedTuple):
    """A way to exchange, and its look."""

    look: style.MethodStyle
    element: float  # bytes of a message, for each element of the model
    is_local: bool  # sent once in H steps
    line: str = "-"


def sparseloco_bytes(bits: int) -> float:
    """Of a chunk, with so many bits a value."""
    return SPARSELOCO["chosen"] * (SPARSELOCO["place"] + bits) / 8


def demo_bytes(k: int) -> float:
    """Of a chunk, as its code sends it."""
    return float(k * COEFFICIENT)


PACKED, UNPACKED = (sparseloco_bytes(SPARSELOCO[name]) for name in ("value", "unpacked"))
CHUNK = SPARSELOCO["chunk"]
SCHEMES = {
    "fp32": Scheme(style.MethodStyle("data parallel, fp32", "#000000", "", ""), FP32, False),
    "bf16": Scheme(style.MethodStyle("data parallel, bf16", "#000000", "", ""), BF16, False, "--"),
    "demo": Scheme(
        style.MethodStyle("DeMo, k = 32, 12 B each", "#CC79A7", "", ""),
        demo_bytes(DEMO["chosen"]) / DEMO["chunk"],
        False,
    ),
    "topk": Scheme(style.MethodStyle("Top-k 0.1 %, 8 B each", "#0072B2", "", ""), TOPK * TOPK_ENTRY, False),
    "diloco": Scheme(style.MethodStyle("DiLoCo, fp32", "#D55E00", "", ""), FP32, True),
    "fp4": Scheme(style.MethodStyle("DiLoCo, FP4", "#D55E00", "", ""), FP4, True, "--"),
    "unpacked": Scheme(
        style.MethodStyle("SparseLoCo, not packed", "#009E73", "", ""), UNPACKED / CHUNK, True, "--"
    ),
    "packed": Scheme(style.MethodStyle("SparseLoCo", "#009E73", "", ""), PACKED / CHUNK, True),
}  # fmt: skip
# What is marked on the left: its name there, and where that stands.
STARS: dict[str, tuple[str, dict[str, Any]]] = {
    "DiLoCo, H 500": ("DiLoCo", {"xytext": (5, 3), "ha": "left"}),
    "Streaming, H 100, FP4 / bf16": ("Streaming", {"xytext": (8, -6), "ha": "right", "va": "top"}),
    "Covenant-72B, packed / fp32": ("Covenant-72B", {"xytext": (-5, -4), "ha": "right", "va": "top"}),
    "DeMo, k 16 / fp32": ("DeMo, up to", {"xytext": (6, -1), "ha": "left", "va": "center"}),
    "DES-LOC, K 256": ("DES-LOC", {"xytext": (5, 4), "ha": "left"}),
}
DECADES, FACTORS = (1, 10, 100, 1000), (2, 5, 10, 20, 50, 100, 200, 500)
PUBLISHED, OURS = style.MethodStyle("", "#000000", "*", ""), style.MethodStyle("", "#0072B2", "s", "")


class Ratio(NamedTuple):
    """How many times fewer bytes, as published and by arithmetic; at which H and of what it is drawn."""

    label: str
    published: float
    ours: float
    of: float  # bytes of an element that it is a ratio to
    every: float  # the H that it holds
    more: float = 1  # by which H divides besides, where the ratio leaves H out


def ratios() -> list[Ratio]:
    parallel, local_adam = value("iacob2025.less")["parallel"], value("iacob2025.less")["local_adam"]
    every, inner = value("douillard2023.every"), value("sarfi2025.every")
    streams = value("douillard2025.every")
    return [
        Ratio("DiLoCo, H 500", value("douillard2023.less"), every, FP32, every),
        Ratio(
            "Streaming, H 100, FP4 / bf16", value("douillard2025.less"), streams * BF16 / FP4, BF16, streams
        ),
        Ratio("Streaming's peak, 3 layers / 24", value("douillard2025.peak"), peak(), FP32, 1),
        Ratio("Covenant-72B, packed / fp32", value("lidin2026.less"), sparseloco(PACKED), FP32, inner, inner),
        Ratio("the same, not packed", value("lidin2026.less"), sparseloco(UNPACKED), FP32, inner, inner),
        Ratio(
            "the same, packed / bf16", value("lidin2026.less"), sparseloco(PACKED, BF16), BF16, inner, inner
        ),
        Ratio("DeMo, k 16 / fp32", value("peng2024.less"), demo(16, FP32), FP32, 1),
        Ratio("DeMo, k 32 / fp32", value("peng2024.less"), demo(DEMO["chosen"], FP32), FP32, 1),
        Ratio("DeMo, k 1 / bf16", demo_told(), demo(1, BF16), BF16, 1),
        Ratio("DES-LOC, K 256", parallel, desloc(), FP32, DESLOC_EVERY),
        Ratio("DES-LOC / Local Adam", local_adam, desloc_over_local_adam(), 3 * FP32, 1),
        Ratio("MuLoCo, 2 bits / bf16", value("therien2025.less"), muloco(), BF16, inner, inner),
        Ratio("ZeRO++", value("wang2023.less"), zeropp(), BF16, 1),
    ]


def sparseloco(nbytes: float, of: float = FP32) -> float:
    return CHUNK * of / nbytes


def demo(k: int, of: float) -> float:
    return DEMO["chunk"] * of / demo_bytes(k)


def demo_told() -> float:
    told = value("peng2024.megabytes")
    return float(told["dense"] / told["least"])


def peak() -> float:
    """Of streaming DiLoCo: all layers over those of a fragment."""
    layers = value("douillard2025.layers")
    return float(layers["model"] / layers["fragment"])


def desloc() -> float:
    """Against a gradient every step."""
    return DESLOC_EVERY / sum(1 / period for period in PERIODS.values())


def desloc_over_local_adam() -> float:
    return len(PERIODS) / sum(1 / period for period in PERIODS.values())


def muloco() -> float:
    return float(8 * BF16 / value("therien2025.bits"))


def zeropp() -> float:
    """Weights forward and back and gradients, by weights in 8 bits, none, and gradients in 4."""
    return 3 * BF16 / (1 + 0 + FP4)


def upload_s(nbytes: float) -> float:
    """Seconds for one message of Covenant-72B, with so many bytes a chunk."""
    bits = 8 * value("lidin2026.elements") * nbytes / CHUNK
    return float(bits / (MEGABIT * value("lidin2026.uplink")))


def bandwidths(method: str) -> np.ndarray:
    """(utilisations,): of data parallelism over those of the method."""
    return np.array([GBIT["parallel"][share] / GBIT[method][share] for share in GBIT["parallel"]])


def losses(method: str, other: str) -> np.ndarray:
    """(sizes,): of Streaming DiLoCo's Table 5, by how much the method's is above the other's."""
    return np.array([round(LOSS[method][size] - LOSS[other][size], 2) for size in LOSS[other]])


def through_1_gbit_s() -> np.ndarray:
    """(budgets,): the hours of data parallelism over those that its terabytes take, by the same table."""
    takes = [8 * 1e3 * terabytes / GBIT_PER_HOUR for terabytes in EXCHANGED["parallel"].values()]
    return np.array([*HOURS["parallel"].values()]) / takes


def noloco() -> dict[str, float]:
    """The DiLoCo that NoLoCo is compared with, over it: local steps, and bytes of a worker and step."""
    steps = {name: each["every"] for name, each in value("kolehmainen2025.configurations").items()}
    models = value("kolehmainen2025.messages")
    nbytes = {name: models[name] / steps[name] for name in steps}
    return {"every": steps["diloco"] / steps["noloco"], "bytes": nbytes["diloco"] / nbytes["noloco"]}


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    keys = marks.dot_legend_handles(
        {"published ratio": ("*", "#000000"), "by arithmetic (right)": ("s", OURS.colour)}
    )
    return plots.compose_figure([_lines, _ratios], 3.5, keys=keys, ncols=4, width_ratios=(1.15, 1))


def _lines(axes: plots.Axes) -> None:
    """Megabytes of a worker and step against H."""
    megabytes = MODEL / 1e6
    lines = [
        plots.Curve(
            each.look, EVERY, megabytes * each.element / (EVERY if each.is_local else np.ones_like(EVERY)),
            {"linestyle": each.line},
        )
        for each in SCHEMES.values()
    ]  # fmt: skip
    stars = [each for each in ratios() if each.label in STARS]
    plots.curves_panel(
        lines, log=(0.01, 0.1, 1, 10, 100, 1000), xlabel="H, local steps between exchanges", xscale="log",
        ylabel="MB of one worker and step, 1 billion elements", title="a worker's own messages",
    )(axes)  # fmt: skip
    axes.set_xlim(0.7, 3500)
    axes.set_xticks(DECADES, [format_number(each) for each in DECADES])
    axes.minorticks_off()
    behind = {"boxstyle": "square,pad=0.1", "facecolor": "#FFFFFF", "edgecolor": "none", "alpha": 0.8}
    for each, (name, place) in zip(stars, STARS.values(), strict=True):
        x, y = each.every, megabytes * each.of / each.published / each.more
        axes.plot(x, y, color="#000000", marker="*", linestyle="", mfc="white", ms=8, zorder=5)
        text = f"{name} {format_number(round(each.published))}x"
        plots.annotate_above(axes, x, y, text, **place, bbox=behind, zorder=4)


def _ratios(axes: plots.Axes) -> None:
    """Published and re-derived ratios, a row each."""
    found = ratios()
    y = range(len(found))
    plots.dots_panel(
        [
            plots.Curve(OURS, [each.ours for each in found], y, {"label": None, "ms": 4}),
            plots.Curve(
                PUBLISHED, [each.published for each in found], y, {"label": None, "mfc": "none", "ms": 8}
            ),
        ],
        rows=[each.label for each in found], xlabel="Times fewer bytes", xscale="log",
        title="as published, and by arithmetic", grid="x",
    )(axes)  # fmt: skip
    axes.set_xticks(FACTORS, [format_number(each) for each in FACTORS])
    axes.minorticks_off()


def table(frames: Frames) -> list[Table]:
    """Messages, ratios, uploads, and what Streaming DiLoCo's Tables 1, 4 and 5 say of each other."""
    return [_of_schemes(), _of_ratios(), _of_uploads(), _of_bandwidths(), _of_losses(), _of_hours()]


def _of_schemes() -> Table:
    rows: list[dict[str, Any]] = [
        {
            "scheme": each.look.label,
            "of 4096 elements": CHUNK * each.element,
            "sent": "every H steps" if each.is_local else "every step",
            "fp32 over it": FP32 / each.element,
            "bf16 over it": BF16 / each.element,
            "fp32 over it, H = 30": FP32 / each.element * (30 if each.is_local else 1),
        }
        for each in SCHEMES.values()
    ]
    return Table.from_rows("A worker's message", rows, {"of 4096 elements": "B"})


def _of_ratios() -> Table:
    rows = [
        {"ratio": each.label, "published": each.published, "by arithmetic": each.ours} for each in ratios()
    ]
    return Table.from_rows("Times fewer bytes", rows)


def _of_uploads() -> Table:
    told, bound = value("lidin2026.communication"), value("lidin2026.elements") / CHUNK / GB
    rows = [
        {
            "message": label, "size": bound * nbytes, "upload": upload_s(nbytes), "told of a round": told,
            "uplink for that": 8 * 1e3 * bound * nbytes / told,
        }
        for label, nbytes in (("packed", PACKED), ("not packed", UNPACKED), ("bf16, dense", CHUNK * BF16))
    ]  # fmt: skip
    units = {
        "size": "GB", "upload": "s at 110 Mbit/s", "told of a round": "s", "uplink for that": "Mbit/s",
    }  # fmt: skip
    return Table.from_rows("One message of 72.7 billion parameters", rows, units)


def _of_bandwidths() -> Table:
    rows = [
        {
            "utilisation": share,
            "data parallel over DiLoCo": diloco,
            "data parallel over streaming": streaming,
        }
        for share, diloco, streaming in zip(
            GBIT["parallel"], bandwidths("diloco"), bandwidths("streaming"), strict=True
        )
    ]
    note = "By Streaming DiLoCo's Table 4, which is its authors' simulation of 1 billion parameters."
    return Table.from_rows("Bandwidth for one utilisation, ratio", rows, {"utilisation": "%"}, note)


def _of_losses() -> Table:
    rows = [
        {
            "parameters": size, "data parallel": LOSS["parallel"][size],
            "DiLoCo, H 30": LOSS["diloco_30"][size], "streaming, H 30": LOSS["streaming_30"][size],
            "streaming, H 100": LOSS["streaming_100"][size],
        }
        for size in LOSS["parallel"]
    ]  # fmt: skip
    return Table.from_rows("Loss on C4", rows, {"parameters": "million"}, "Streaming DiLoCo's Table 5.")


def _of_hours() -> Table:
    rows = [
        {
            "tokens": tokens, "data parallel": terabytes, "streaming": EXCHANGED["streaming"][tokens],
            "times fewer": terabytes / EXCHANGED["streaming"][tokens],
            "data parallel over 1 Gbit/s": HOURS["parallel"][tokens],
            "that these bytes take": HOURS["parallel"][tokens] / share,
        }
        for (tokens, terabytes), share in zip(
            EXCHANGED["parallel"].items(), through_1_gbit_s(), strict=True
        )
    ]  # fmt: skip
    units = {
        "tokens": "billion", "data parallel": "TB", "streaming": "TB", "data parallel over 1 Gbit/s": "h",
        "that these bytes take": "h",
    }  # fmt: skip
    note = "Streaming DiLoCo's Table 1; how many times fewer and the last column are computed."
    return Table.from_rows("Bytes and hours", rows, units, note)


def facts(frames: Frames) -> dict[str, object]:
    return {
        "packed": format_number(PACKED), "unpacked": format_number(UNPACKED), "chosen": SPARSELOCO["chosen"],
        "chunk": CHUNK, "upload": format_number(round(upload_s(PACKED))),
        "upload_unpacked": format_number(round(upload_s(UNPACKED))),
        "half": format_number(bandwidths("diloco")[0]),
        "most": format_number(bandwidths("diloco")[-1]), "coefficient": COEFFICIENT,
        "hours": format_number(round(1 / through_1_gbit_s()[0])),
    }  # fmt: skip


def claims() -> list[Claim]:
    """What the published numbers say of each other."""
    told = value("lidin2026.communication")
    computing = value("lidin2026.computing")
    evaluated, replicas = value("douillard2025.evaluated"), value("douillard2025.replicas")
    inner = [round(evaluated[name] - evaluated["outer"], 2) for name in ("replica", "mean")]
    four = [round(replicas[4][tokens] - loss, 2) for tokens, loss in replicas[2].items()]
    found: dict[str, float | tuple[float, int]] = {
        "lidin2026.local-costs.packed": sparseloco(PACKED),
        "lidin2026.local-costs.unpacked": sparseloco(UNPACKED),
        "lidin2026.local-costs.bf16": sparseloco(PACKED, BF16),
        "lidin2026.local-costs.utilisation": 100 * computing / (computing + told),
        "lidin2026.local-costs.upload": told / upload_s(PACKED),
        "lidin2026.local-costs.upload-unpacked": told / upload_s(UNPACKED),
        "peng2024.local-costs.demo": demo(16, FP32),
        "peng2024.local-costs.demo-reference": demo(DEMO["chosen"], FP32),
        "peng2024.local-costs.demo-least": demo(1, BF16),
        "douillard2023.local-costs.diloco": float(value("douillard2023.every")),
        "douillard2025.local-costs.streaming-loss": _most(
            100 * losses("diloco_30", "parallel") / [*LOSS["parallel"].values()]
        ),
        "douillard2025.local-costs.streaming-fp4": _least(losses("diloco_30", "streaming_30")),
        "douillard2025.local-costs.streaming-outer": _least(inner),
        "douillard2025.local-costs.streaming-bandwidth": _least(bandwidths("streaming")),
        "douillard2025.local-costs.diloco-bandwidth": _least(bandwidths("diloco")),
        "douillard2025.local-costs.streaming-exchanged": value("douillard2025.every") * BF16 / FP4,
        "douillard2025.local-costs.streaming-peak": peak(),
        "douillard2025.local-costs.streaming-hours": _most(through_1_gbit_s()),
        "douillard2025.local-costs.streaming-replicas": _least(four),
        "therien2025.local-costs.muloco": muloco(),
        "iacob2025.local-costs.desloc-local-adam": desloc_over_local_adam(),
        "iacob2025.local-costs.desloc": desloc(),
        "kolehmainen2025.local-costs.noloco-every": noloco()["every"],
        "kolehmainen2025.local-costs.noloco-bytes": noloco()["bytes"],
        "wang2023.local-costs.zeropp": zeropp(),
    }
    return [
        claim(name, _exact, *(ours if isinstance(ours, tuple) else (float(ours), 1)))
        for name, ours in found.items()
    ]  # fmt: skip


def _least(several: Sequence[float] | np.ndarray) -> tuple[float, int]:
    return float(min(several)), len(several)


def _most(several: Sequence[float] | np.ndarray) -> tuple[float, int]:
    return float(max(several)), len(several)


def _exact(frames: Frames, ours: float, count: int) -> Estimate:
    return Estimate.exact(ours, count, PRINTED)
