"""Savings of local steps and coded messages, by the papers' own formulas: nothing is run.

A message is what one worker hands over, as the papers' ratios count it. Collectives send more: an allreduce
about two such messages, gathering one to each other worker. Scales of tensors, a few bytes each, are left
out. That the library packs messages to the bytes computed here is a test (tests/figures/test_local_costs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import marks, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.figures._published import exact_estimate, no_runs
from experiments.figures.papers import make_claim, published_value

TITLE = "What local steps and coded messages save, by arithmetic, beside what is published"
FP32, BF16 = 4.0, 2.0  # bytes of an element
FP4 = 0.5
TOPK_DENSITY = 0.001
TOPK_ENTRY_BYTES = 8  # of an fp32 and of an int32
SPARSELOCO: dict[str, int] = published_value("sarfi2025.message")
CHUNK = SPARSELOCO["chunk"]  # elements
DEMO: dict[str, int] = published_value("peng2024.message")
COEFFICIENT = DEMO["place"] + DEMO["value"]  # bytes
PERIODS: dict[str, int] = published_value("iacob2025.periods")
DESLOC_EVERY = 256  # inferred: the power of two at which the published 170 times come out
# Tables of Streaming DiLoCo, a column for each method: 4 by percent of utilisation, 5 by millions of
# parameters, and 1 by billions of tokens.
GBIT = pd.DataFrame(published_value("douillard2025.gbit"))
LOSS = pd.DataFrame(published_value("douillard2025.loss"))
EXCHANGED = pd.DataFrame(published_value("douillard2025.exchanged"))
HOURS = pd.DataFrame(published_value("douillard2025.hours"))
GBIT_PER_HOUR = 3600  # through 1 Gbit/s
GB, MEGABIT = 1e9, 1e6
MODEL = 1_000_000_000  # elements in the picture
EVERY = np.geomspace(1, 1000, 31)
runs = no_runs


class ExchangeScheme(NamedTuple):
    """A way to exchange: its look, the size of its messages and how often they are sent."""

    look: style.MethodStyle
    message_bytes_per_element: float  # of the model
    is_sent_once_per_round: bool  # in H steps
    line_style: str = "-"


def sparseloco_chunk_bytes(bits_per_value: int) -> float:
    """Return the bytes of a chunk of SparseLoCo, indices and values."""
    return SPARSELOCO["chosen"] * (SPARSELOCO["place"] + bits_per_value) / 8


def demo_chunk_bytes(k: int) -> float:
    """Return the bytes of a chunk of k coefficients, as its code sends it."""
    return float(k * COEFFICIENT)


PACKED, UNPACKED = (sparseloco_chunk_bytes(SPARSELOCO[name]) for name in ("value", "unpacked"))
SCHEMES = {
    "fp32": ExchangeScheme(style.MethodStyle("data parallel, fp32", "#000000", "", ""), FP32, False),
    "bf16": ExchangeScheme(style.MethodStyle("data parallel, bf16", "#000000", "", ""), BF16, False, "--"),
    "demo": ExchangeScheme(
        style.MethodStyle("DeMo, k = 32, 12 B each", "#CC79A7", "", ""),
        demo_chunk_bytes(DEMO["chosen"]) / DEMO["chunk"],
        False,
    ),
    "topk": ExchangeScheme(
        style.MethodStyle("Top-k 0.1 %, 8 B each", "#0072B2", "", ""), TOPK_DENSITY * TOPK_ENTRY_BYTES, False
    ),
    "diloco": ExchangeScheme(style.MethodStyle("DiLoCo, fp32", "#D55E00", "", ""), FP32, True),
    "fp4": ExchangeScheme(style.MethodStyle("DiLoCo, FP4", "#D55E00", "", ""), FP4, True, "--"),
    "unpacked": ExchangeScheme(
        style.MethodStyle("SparseLoCo, not packed", "#009E73", "", ""), UNPACKED / CHUNK, True, "--"
    ),
    "packed": ExchangeScheme(style.MethodStyle("SparseLoCo", "#009E73", "", ""), PACKED / CHUNK, True),
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


class ByteRatio(NamedTuple):
    """Ratio of bytes saved, as published and by arithmetic, with its H and the bytes that it refers to."""

    label: str
    published: float
    computed: float
    element_bytes: float  # of what it is a ratio to
    every: float  # the H that it holds
    extra_divisor: float = 1  # by which H divides besides, where the ratio leaves H out


def published_and_computed_byte_ratios() -> list[ByteRatio]:
    """Return the published ratios, each with ours."""
    every = published_value("douillard2023.every")
    inner = published_value("sarfi2025.every")
    streams = published_value("douillard2025.every")
    covenant = published_value("lidin2026.less")
    demo = published_value("peng2024.less")
    parallel = published_value("iacob2025.less")["parallel"]
    local_adam = published_value("iacob2025.less")["local_adam"]
    megabytes = published_value("peng2024.megabytes")
    return [
        ByteRatio("DiLoCo, H 500", published_value("douillard2023.less"), every, FP32, every),
        ByteRatio(
            "Streaming, H 100, FP4 / bf16",
            published_value("douillard2025.less"),
            streaming_diloco_byte_ratio(),
            BF16,
            streams,
        ),
        ByteRatio(
            "Streaming's peak, 3 layers / 24",
            published_value("douillard2025.peak"),
            streaming_diloco_peak_ratio(),
            FP32,
            1,
        ),
        ByteRatio("Covenant-72B, packed / fp32", covenant, sparseloco_byte_ratio(PACKED), FP32, inner, inner),
        ByteRatio("the same, not packed", covenant, sparseloco_byte_ratio(UNPACKED), FP32, inner, inner),
        ByteRatio(
            "the same, packed / bf16", covenant, sparseloco_byte_ratio(PACKED, BF16), BF16, inner, inner
        ),
        ByteRatio("DeMo, k 16 / fp32", demo, demo_byte_ratio(16, FP32), FP32, 1),
        ByteRatio("DeMo, k 32 / fp32", demo, demo_byte_ratio(DEMO["chosen"], FP32), FP32, 1),
        ByteRatio(
            "DeMo, k 1 / bf16", megabytes["dense"] / megabytes["least"], demo_byte_ratio(1, BF16), BF16, 1
        ),
        ByteRatio("DES-LOC, K 256", parallel, desloc_byte_ratio_over_data_parallel(), FP32, DESLOC_EVERY),
        ByteRatio("DES-LOC / Local Adam", local_adam, desloc_byte_ratio_over_local_adam(), 3 * FP32, 1),
        ByteRatio(
            "MuLoCo, 2 bits / bf16",
            published_value("therien2025.less"),
            muloco_byte_ratio(),
            BF16,
            inner,
            inner,
        ),
        ByteRatio("ZeRO++", published_value("wang2023.less"), zeropp_byte_ratio(), BF16, 1),
    ]


def sparseloco_byte_ratio(chunk_bytes: float, element_bytes: float = FP32) -> float:
    return CHUNK * element_bytes / chunk_bytes


def demo_byte_ratio(k: int, element_bytes: float) -> float:
    return DEMO["chunk"] * element_bytes / demo_chunk_bytes(k)


def streaming_diloco_byte_ratio() -> float:
    return float(published_value("douillard2025.every") * BF16 / FP4)


def streaming_diloco_peak_ratio() -> float:
    """Return all layers over those of a fragment, of streaming DiLoCo."""
    layers = published_value("douillard2025.layers")
    return float(layers["model"] / layers["fragment"])


def desloc_byte_ratio_over_data_parallel() -> float:
    """Return the ratio against a gradient every step."""
    return DESLOC_EVERY / sum(1 / period for period in PERIODS.values())


def desloc_byte_ratio_over_local_adam() -> float:
    return len(PERIODS) / sum(1 / period for period in PERIODS.values())


def muloco_byte_ratio() -> float:
    return float(8 * BF16 / published_value("therien2025.bits"))


def zeropp_byte_ratio() -> float:
    """Return weights forward and back and gradients, by weights in 8 bits, none, and gradients in 4."""
    return 3 * BF16 / (1 + 0 + FP4)


def covenant_upload_s(chunk_bytes: float) -> float:
    """Return the seconds in which one message of Covenant-72B is uploaded at its published uplink."""
    bits = 8 * published_value("lidin2026.elements") * chunk_bytes / CHUNK
    return float(bits / (MEGABIT * published_value("lidin2026.uplink")))


def published_bandwidth_ratio_by_utilisation(method: str) -> pd.Series[float]:
    """Return the bandwidth of data parallelism over that of the method, by utilisation."""
    ratios: pd.Series[float] = GBIT["parallel"] / GBIT[method]
    return ratios


def published_loss_difference_by_parameters(method: str, other: str) -> pd.Series[float]:
    """Return by how much a method's loss is above another's in Table 5, by parameters."""
    differences: pd.Series[float] = (LOSS[method] - LOSS[other]).round(2)
    return differences


def published_over_computed_hours_by_tokens() -> pd.Series[float]:
    """Return the hours of data parallelism over those that its terabytes take at 1 Gbit/s, by tokens."""
    ratios: pd.Series[float] = HOURS["parallel"] / (8 * 1e3 * EXCHANGED["parallel"] / GBIT_PER_HOUR)
    return ratios


def draw(frames: Frames, profile: str) -> plots.Figure:
    origins = {"published ratio": ("*", "#000000"), "by arithmetic (right)": ("s", OURS.colour)}
    keys = marks.dot_legend_handles(origins)
    panels = [_bytes_panel, _ratios_panel]
    return plots.compose_figure(
        panels, 3.5, first_legend_entries=keys, legend_columns=4, width_ratios=(1.15, 1)
    )


def _bytes_panel(axes: plots.Axes) -> None:
    """Draw megabytes of a worker and step against H."""
    megabytes = MODEL / 1e6
    lines = []
    for scheme in SCHEMES.values():
        steps = EVERY if scheme.is_sent_once_per_round else np.ones_like(EVERY)
        line = {"linestyle": scheme.line_style}
        lines.append(
            plots.Curve(scheme.look, EVERY, megabytes * scheme.message_bytes_per_element / steps, line)
        )
    plots.curves_panel(
        lines, log_y_ticks=(0.01, 0.1, 1, 10, 100, 1000),
        xlabel="H, local steps between exchanges", xscale="log",
        ylabel="MB of one worker and step, 1 billion elements", title="a worker's own messages",
    )(axes)  # fmt: skip
    axes.set_xlim(0.7, 3500)
    _set_ticks(axes, DECADES)
    box = {"boxstyle": "square,pad=0.1", "facecolor": "#FFFFFF", "edgecolor": "none", "alpha": 0.8}
    stars = [ratio for ratio in published_and_computed_byte_ratios() if ratio.label in STARS]
    for ratio, (name, place) in zip(stars, STARS.values(), strict=True):
        x = ratio.every
        y = megabytes * ratio.element_bytes / ratio.published / ratio.extra_divisor
        axes.plot(x, y, color="#000000", marker="*", linestyle="", mfc="white", ms=8, zorder=5)
        text = f"{name} {format_number(round(ratio.published))}x"
        plots.annotate_above(axes, x, y, text, **place, bbox=box, zorder=4)


def _ratios_panel(axes: plots.Axes) -> None:
    """Draw published and re-derived ratios, a row each."""
    ratios = published_and_computed_byte_ratios()
    rows = range(len(ratios))
    dots = [
        plots.Curve(OURS, [ratio.computed for ratio in ratios], rows, {"label": None, "ms": 4}),
        plots.Curve(
            PUBLISHED, [ratio.published for ratio in ratios], rows, {"label": None, "mfc": "none", "ms": 8}
        ),
    ]
    plots.dots_panel(
        dots, row_labels=[ratio.label for ratio in ratios], xlabel="Times fewer bytes", xscale="log",
        title="as published, and by arithmetic", grid="x",
    )(axes)  # fmt: skip
    _set_ticks(axes, FACTORS)


def _set_ticks(axes: plots.Axes, ticks: Sequence[float]) -> None:
    axes.set_xticks(ticks, [format_number(tick) for tick in ticks])
    axes.minorticks_off()


def table(frames: Frames) -> list[Table]:
    """Return messages, ratios, uploads, and what Streaming DiLoCo's Tables 1, 4 and 5 say of each other."""
    ratio_rows = [
        {"ratio": ratio.label, "published": ratio.published, "by arithmetic": ratio.computed}
        for ratio in published_and_computed_byte_ratios()
    ]
    bandwidths = pd.DataFrame(
        {
            "utilisation": GBIT.index,
            "data parallel over DiLoCo": published_bandwidth_ratio_by_utilisation("diloco").array,
            "data parallel over streaming": published_bandwidth_ratio_by_utilisation("streaming").array,
        }
    )
    losses = {
        "parallel": "data parallel", "diloco_30": "DiLoCo, H 30", "streaming_30": "streaming, H 30",
        "streaming_100": "streaming, H 100",
    }  # fmt: skip
    loss_frame = LOSS[[*losses]].rename(columns=losses).rename_axis("parameters").reset_index()
    return [
        _schemes_table(),
        Table.from_rows("Times fewer bytes", ratio_rows),
        _uploads_table(),
        Table(
            "Bandwidth for one utilisation, ratio", bandwidths, {"utilisation": "%"},
            "By Streaming DiLoCo's Table 4, which is its authors' simulation of 1 billion parameters.",
        ),
        Table("Loss on C4", loss_frame, {"parameters": "million"}, "Streaming DiLoCo's Table 5."),
        _hours_table(),
    ]  # fmt: skip


def _schemes_table() -> Table:
    rows = [
        {
            "scheme": scheme.look.label,
            "of 4096 elements": CHUNK * scheme.message_bytes_per_element,
            "sent": "every H steps" if scheme.is_sent_once_per_round else "every step",
            "fp32 over it": FP32 / scheme.message_bytes_per_element,
            "bf16 over it": BF16 / scheme.message_bytes_per_element,
            "fp32 over it, H = 30": FP32
            / scheme.message_bytes_per_element
            * (30 if scheme.is_sent_once_per_round else 1),
        }
        for scheme in SCHEMES.values()
    ]
    return Table.from_rows("A worker's message", rows, {"of 4096 elements": "B"})


def _uploads_table() -> Table:
    round_s = published_value("lidin2026.communication")
    chunks = published_value("lidin2026.elements") / CHUNK / GB
    rows = [
        {
            "message": label,
            "size": chunks * nbytes,
            "upload": covenant_upload_s(nbytes),
            "told of a round": round_s,
            "uplink for that": 8 * 1e3 * chunks * nbytes / round_s,
        }
        for label, nbytes in (("packed", PACKED), ("not packed", UNPACKED), ("bf16, dense", CHUNK * BF16))
    ]
    units = {
        "size": "GB", "upload": "s at 110 Mbit/s", "told of a round": "s", "uplink for that": "Mbit/s",
    }  # fmt: skip
    return Table.from_rows("One message of 72.7 billion parameters", rows, units)


def _hours_table() -> Table:
    frame = pd.DataFrame({
        "tokens": EXCHANGED.index,
        "data parallel": EXCHANGED["parallel"].array,
        "streaming": EXCHANGED["streaming"].array,
        "times fewer": (EXCHANGED["parallel"] / EXCHANGED["streaming"]).array,
        "data parallel over 1 Gbit/s": HOURS["parallel"].array,
        "that these bytes take": (HOURS["parallel"] / published_over_computed_hours_by_tokens()).array,
    })  # fmt: skip
    units = {
        "tokens": "billion", "data parallel": "TB", "streaming": "TB", "data parallel over 1 Gbit/s": "h",
        "that these bytes take": "h",
    }  # fmt: skip
    note = "Streaming DiLoCo's Table 1; how many times fewer and the last column are computed."
    return Table("Bytes and hours", frame, units, note)


def facts(frames: Frames) -> dict[str, object]:
    ratios = published_bandwidth_ratio_by_utilisation("diloco")
    return {
        "packed": format_number(PACKED),
        "unpacked": format_number(UNPACKED),
        "chosen": SPARSELOCO["chosen"],
        "chunk": CHUNK,
        "upload": format_number(round(covenant_upload_s(PACKED))),
        "upload_unpacked": format_number(round(covenant_upload_s(UNPACKED))),
        "half": format_number(ratios.iloc[0]),
        "most": format_number(ratios.iloc[-1]),
        "coefficient": COEFFICIENT,
        "hours": format_number(round(1 / published_over_computed_hours_by_tokens().iloc[0])),
    }


def claims() -> list[Claim]:
    """Return what the published numbers say of each other.

    Only numbers that were read where they were published are judged, and only what somebody stated of them.
    What others tell, and ratios to what is not named, are in picture and tables alone.
    """
    evaluated = pd.Series(published_value("douillard2025.evaluated"))
    inner = (evaluated[["replica", "mean"]] - evaluated["outer"]).round(2)
    replicas = pd.DataFrame(published_value("douillard2025.replicas"))
    values: dict[str, float | tuple[float, int]] = {
        "lidin2026.local-costs.packed": sparseloco_byte_ratio(PACKED),
        "douillard2023.local-costs.diloco": published_value("douillard2023.every"),
        "douillard2025.local-costs.streaming-fp4": _min_and_count(
            published_loss_difference_by_parameters("diloco_30", "streaming_30")
        ),
        "douillard2025.local-costs.streaming-outer": _min_and_count(inner),
        "douillard2025.local-costs.streaming-bandwidth": _min_and_count(
            published_bandwidth_ratio_by_utilisation("streaming")
        ),
        "douillard2025.local-costs.diloco-bandwidth": _min_and_count(
            published_bandwidth_ratio_by_utilisation("diloco")
        ),
        "douillard2025.local-costs.streaming-exchanged": streaming_diloco_byte_ratio(),
        "douillard2025.local-costs.streaming-peak": streaming_diloco_peak_ratio(),
        "douillard2025.local-costs.streaming-hours": _max_and_count(
            published_over_computed_hours_by_tokens()
        ),
        "douillard2025.local-costs.streaming-replicas": _min_and_count((replicas[4] - replicas[2]).round(2)),
        "therien2025.local-costs.muloco": muloco_byte_ratio(),
    }
    return [
        make_claim(name, exact_estimate, *(ours if isinstance(ours, tuple) else (float(ours), 1)))
        for name, ours in values.items()
    ]


def _min_and_count(ratios: pd.Series[float]) -> tuple[float, int]:
    return float(ratios.min()), int(ratios.count())


def _max_and_count(ratios: pd.Series[float]) -> tuple[float, int]:
    return float(ratios.max()), int(ratios.count())
