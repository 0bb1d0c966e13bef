"""What selecting costs by number of elements: exact searches, and approximate ones by the distribution.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772, propose
an approximate selection that is cheap on GPUs. `make bench BENCH=select` times the same operators alone, with
sorting and memory's floor beside them; here they stand in whole steps of one worker, so that they are runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from analysis import captions, plots, style
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.remembered import remembered
from analysis.stats import COUNTED, POSITIVE, Value, of_phases, phase_ratio
from analysis.steps import warm
from analysis.tables import Table

TITLE = "Time of selecting by number of elements, exact and approximate"
DENSITY = 0.001
SCALE = {"method.density": DENSITY}
EXACT = "topk"  # torch.topk, which everything is compared with
PUBLISHED = "gaussiank-published"
LOOKS = {
    EXACT: style.look("topk")._replace(label="torch.topk, exact"),
    "topk-fused": style.look("topk-fused")._replace(label="fused, exact"),
    "gaussiank": style.look("gaussiank")._replace(label="Gaussian-k, exactly k"),
    PUBLISHED: style.Look("Gaussian-k as published, about k", "#E69F00", "X", ""),
    "dgc": style.look("dgc")._replace(label="DGC's sample, at most k"),
    "sidco": style.Look("SIDCo, about k", "#44AA99", "v", ""),
    "randomk-hash": style.look("randomk-hash")._replace(label="Random-k by hash: no search"),
}
METHODS = {
    EXACT: "method=topk select=torch",
    "topk-fused": "method=topk select=fused",
    "gaussiank": "method=gaussiank",
    PUBLISHED: "method=gaussiank method.rule=published",
    "dgc": "method=dgc method.scope=global method.dense_vectors=false method.momentum=0",
    "sidco": "method=sidco method.scope=global",
    "randomk-hash": "method=randomk method.sampling=hash",
}
# Elements, and minutes at most: from the size of a small layer to beyond that of a whole ResNet-50.
SIZES = {
    "smoke": {2**14: 0.02, 2**17: 0.05},
    "laptop": {2**16: 0.5, 2**18: 0.5, 2**20: 1.0, 2**22: 1.5, 2**24: 3.0, 2**26: 6.0},
    "paper": {2**16: 1.0, 2**18: 1.0, 2**20: 1.0, 2**22: 2.0, 2**24: 4.0, 2**26: 6.0, 2**28: 10.0},
}
DENSITIES = {"smoke": 0.01, "laptop": DENSITY, "paper": DENSITY}
MUCH = 2.0  # times
CONTENT = 4 / 3  # of k: the most that the published rule is content with


def runs(profile: str) -> list[list[str]]:
    """One process; at each size all methods take turns."""
    if profile not in SIZES:
        raise ValueError(f"no profile {profile!r}; there are: {', '.join(SIZES)}")
    words = (f"{name}:'{words} method.density={DENSITIES[profile]}'" for name, words in METHODS.items())
    variants = f"variants={{{','.join(words)}}}"
    return [
        [
            "recipe=none", f"profile={profile}", "task=vector", f"task.elements={size}", "task.tensors=1",
            "cluster=local", "workers=1", "train.validate=never", "timing.mode=serialised",
            "timing.warmup_steps=2", f"alternate.limit_min={minutes}", variants,
        ]
        for size, minutes in SIZES[profile].items()
    ]  # fmt: skip


def sizes(frames: Frames) -> list[int]:
    """Elements, ascending."""
    return [int(size) for size in captions.values(frames, "task.elements")]


def keys(frames: Frames, method: str, size: int) -> list[str]:
    runs = frames.runs
    if not len(runs):
        return []
    return list(runs["key"][runs["variant"].eq(method) & runs["task.elements"].eq(size)])


def milliseconds(frames: Frames, method: str, size: int) -> Value | None:
    """Adding the gradient to the residual, searching, and emptying the residual of what was found."""
    found = of_phases(frames, keys(frames, method, size), ("select",), lambda seconds: seconds, POSITIVE)
    return found.times(1e3) if found else None


@remembered
def gain(frames: Frames, method: str, size: int, over: str = EXACT) -> Value | None:
    """Time of another method's selecting over that of this one's, paired by turns."""
    return phase_ratio(frames, keys(frames, over, size), keys(frames, method, size), "select")


def selected(frames: Frames, method: str, size: int) -> float | None:
    """Elements per step over k, in the mean."""
    found = keys(frames, method, size)
    if not found:
        return None
    density = float(frames.runs.set_index("key")["method.density"][found[0]])
    return float(warm(frames, found[0]).steps["density"].mean()) * size / max(1, int(density * size))


def draw(frames: Frames, profile: str) -> plots.Figure:
    found = sizes(frames)
    if not found:
        raise ValueError("nothing to draw: there is no run")
    with plots.canvas(style.two_columns(3.2), 1, 2) as (figure, (times, gains)):
        for axes, measure in ((times, milliseconds), (gains, gain)):
            values = {
                method: {size: value for size in found if (value := measure(frames, method, size))}
                for method in LOOKS
            }
            for method, look in LOOKS.items():
                if method != EXACT or axes is times:
                    plots.points(axes, list(values[method]), list(values[method].values()), look)
            every = [value.value for of_method in values.values() for value in of_method.values()]
            if every:  # an interval over few turns that resemble each other may span powers of ten
                axes.set_ylim(min(every) / 2, 2 * max(every))
        gains.axhline(1, color=LOOKS[EXACT].colour, linestyle="--", linewidth=1)
        times.set(ylabel="Time of selecting (ms)")
        gains.set(ylabel="Time of torch.topk / own")
        for axes in (times, gains):
            axes.set(xlabel="Elements", yscale="log")
            axes.set_xscale("log", base=2)
            axes.set_xticks(found, [f"$2^{{{size.bit_length() - 1}}}$" for size in found])
            axes.grid(visible=True, axis="y")
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def table(frames: Frames) -> list[Table]:
    columns = {f"{size:,}": size for size in sizes(frames)}

    def rows(cell: Callable[[str, int], object]) -> pd.DataFrame:
        found: pd.DataFrame = pd.DataFrame([
            {"method": look.label, **{name: cell(method, size) for name, size in columns.items()}}
            for method, look in LOOKS.items()
        ])  # fmt: skip
        return found

    return [
        Table(
            "Time of selecting by number of elements",
            rows(lambda method, size: milliseconds(frames, method, size)),
            dict.fromkeys(columns, "ms"),
        ),
        Table(
            "Time of torch.topk over that of each",
            rows(lambda method, size: gain(frames, method, size)),
            dict.fromkeys(columns, "x"),
        ),
        Table("Elements selected over k", rows(lambda method, size: selected(frames, method, size))),
    ]


def caption(frames: Frames, profile: str) -> str:
    threads = captions.listed(captions.values(frames, "threads"))
    return (
        "Left: time of selecting in a step of one worker, which adds the gradient to the residual, searches, "
        "and takes what it found out of the residual. Right: the time of torch.topk over it; above the "
        "dashed line is faster. Intervals that reach the frame go on beyond it (table). Density "
        f"{captions.listed(map(number, captions.values(frames, 'method.density')))}; gradients from a "
        "generator, heavy-tailed. DGC's has its memory of momentum besides, at momentum 0, which is one more "
        f"pass. {threads} thread{'s' if threads != '1' else ''}. {captions.setting(frames)} "
        f"{captions.timing(frames)}"
    )


SOURCE = "abstract: an approximate selection by the gradients' distribution, computing-efficient for GPUs"
AT = "at the largest size"


def claims() -> list[Claim]:
    return [
        Claim(
            text=f"Gaussian-k as published selects in much less time than torch.topk: how many times, {AT}",
            paper="computing-efficient for GPUs",
            unit="x",
            source=SOURCE,
            kind="ordering",
            tolerance=MUCH,
            reason=f"Much is more than {number(MUCH)} times. The abstract has no number.",
            ours=lambda frames: _largest(frames, PUBLISHED),
            accelerator=ANY_GPU,
            timed=True,
        ),
        *(_faster(method) for method in (PUBLISHED, "gaussiank", "dgc", "sidco", "topk-fused")),
        Claim(
            text=f"the fused exact search is faster than Gaussian-k as published: how many times, {AT}",
            paper=None,
            unit="x",
            source="no published number: what is gained by giving exactness up",
            kind="ordering",
            tolerance=1.0,
            reason="More than once is faster.",
            ours=lambda frames: _largest(frames, "topk-fused", PUBLISHED),
            timed=True,
        ),
        Claim(
            text=f"elements that Gaussian-k as published selects over k, {AT}",
            paper=None,
            unit="x",
            source="hclhkbu/GaussianK-SGD: its rule is content with 2k/3 to 4k/3",
            kind="limit",
            tolerance=CONTENT,
            reason="It tries three thresholds at most, of which none need be near k. Counts have no error.",
            ours=_selected,
        ),
    ]


def _faster(method: str) -> Claim:
    return Claim(
        text=f"{LOOKS[method].label}: faster than torch.topk, how many times, {AT}",
        paper=None,
        unit="x",
        source="no published number",
        kind="ordering",
        tolerance=1.0,
        reason="More than once is faster, on whatever device ran it.",
        ours=lambda frames: _largest(frames, method),
        timed=True,
    )


def _largest(frames: Frames, method: str, over: str = EXACT) -> Value | None:
    return gain(frames, method, sizes(frames)[-1], over) if sizes(frames) else None


def _selected(frames: Frames) -> Value | None:
    share = selected(frames, PUBLISHED, sizes(frames)[-1]) if sizes(frames) else None
    return None if share is None else Value(share, share, share, 1, COUNTED)
