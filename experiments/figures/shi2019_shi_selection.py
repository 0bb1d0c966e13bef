"""What selecting costs by number of elements: exact searches, and approximate ones by the distribution.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv:1911.08772, propose
an approximate selection that is cheap on GPUs. `make bench BENCH=select` times the same operators alone, with
sorting and memory's floor beside them; here they stand in whole steps of one worker, so that they are runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames, cache_by_frames, find_keys
from analysis.records.steps import warm_steps
from analysis.stats import COUNTED, Estimate, phase_time, phase_time_ratio
from analysis.tables import Table
from experiments.config.run import Run, RunSettings
from experiments.figures import papers
from experiments.figures._runs import TIMED, profile_entry, with_density
from experiments.figures.papers import claim, claim_each

TITLE = "Time of selecting by number of elements, exact and approximate"
DENSITY = 0.001
SCALE = {"method.density": DENSITY}
EXACT, PUBLISHED = "topk", "gaussiank-published"  # torch.topk, which everything is compared with
_DATA = papers.item("shi2019.shi-selection")
METHODS: dict[str, RunSettings] = {name: own["settings"] for name, own in _DATA["methods"].items()}
LOOKS = {
    name: style.method_style(name)._replace(label=own["label"], **own.get("look", {}))
    for name, own in _DATA["methods"].items()
}
SIZES: dict[str, dict[int, float]] = _DATA["minutes"]
Measure = Callable[[Frames, str, int], Estimate | None]
DENSITIES = {"smoke": 0.01, "laptop": DENSITY, "paper": DENSITY}
CONTENT = 4 / 3  # of k: the most that the published rule is content with


def runs(profile: str) -> list[Run]:
    """One process; at each size all methods take turns."""
    variants = with_density(METHODS, DENSITIES[profile])
    shared = {
        **TIMED, "profile": profile, "task": "vector", "task.tensors": 1, "cluster": "local", "workers": 1,
    }  # fmt: skip
    return [
        Run({**shared, "task.elements": size, "alternate.limit_min": minutes}, variants)
        for size, minutes in profile_entry(SIZES, profile).items()
    ]


def sizes(frames: Frames) -> list[int]:
    """Elements, ascending."""
    return [int(size) for size in captions.distinct_values(frames, "task.elements")]


def keys(frames: Frames, method: str, size: int) -> list[str]:
    return find_keys(frames, {"variant": method, "task.elements": size})


def milliseconds(frames: Frames, method: str, size: int) -> Estimate | None:
    """Adding the gradient to the residual, searching, and emptying the residual of what was found."""
    return phase_time(frames, keys(frames, method, size), "select", unit=1e3)


@cache_by_frames
def gain(frames: Frames, method: str, size: int, over: str = EXACT) -> Estimate | None:
    """Time of another method's selecting over that of this one's, paired by turns."""
    return phase_time_ratio(frames, keys(frames, over, size), keys(frames, method, size), "select")


def selected(frames: Frames, method: str, size: int) -> float | None:
    """Elements per step over k, in the mean."""
    if not (found := keys(frames, method, size)):
        return None
    density = float(frames.runs.set_index("key")["method.density"][found[0]])
    return (
        float(warm_steps(frames, found[0]).steps["sent_density"].mean()) * size / max(1, int(density * size))
    )


def draw(frames: Frames, profile: str) -> plots.Figure:
    gains = {method: look for method, look in LOOKS.items() if method != EXACT}
    exact = plots.Curve(LOOKS[EXACT]._replace(label=""), None, Estimate(1.0))
    panels = [
        _panel(frames, milliseconds, LOOKS, [], ylabel="Time of selecting (ms)"),
        _panel(frames, gain, gains, [exact], ylabel="Time of torch.topk / own"),
    ]
    return plots.compose_figure(panels if len(frames.runs) else [], 3.2, ncols=3)


def _panel(
    frames: Frames,
    measure: Measure,
    shown: Mapping[str, style.MethodStyle],
    more: list[plots.Curve],
    **words: Any,
) -> plots.Panel:
    values = {
        method: {size: value for size in sizes(frames) if (value := measure(frames, method, size))}
        for method in LOOKS
    }
    every = [value.value for of_method in values.values() for value in of_method.values()]
    if every:  # an interval over few turns that resemble each other may span powers of ten
        words["ylim"] = (min(every) / 2, 2 * max(every))
    lines = [
        plots.Curve(look, list(values[name]), list(values[name].values())) for name, look in shown.items()
    ]
    return plots.curves_panel(
        [*lines, *more], sizes=sizes(frames), grid="y", xlabel="Elements", yscale="log",
        xticklabels=[f"$2^{{{size.bit_length() - 1}}}$" for size in sizes(frames)], **words,
    )  # fmt: skip


def table(frames: Frames) -> list[Table]:
    columns = {f"{size:,}": size for size in sizes(frames)}

    def of(title: str, cell: Callable[[Frames, str, int], object], unit: str = "") -> Table:
        rows = [
            {"method": look.label, **{name: cell(frames, method, size) for name, size in columns.items()}}
            for method, look in LOOKS.items()
        ]
        return Table.from_rows(title, rows, dict.fromkeys(columns, unit))

    return [
        of("Time of selecting by number of elements", milliseconds, "ms"),
        of("Time of torch.topk over that of each", gain, "x"),
        of("Elements selected over k", selected),
    ]


def facts(frames: Frames) -> dict[str, object]:
    threads = captions.join_words(captions.distinct_values(frames, "threads"))
    densities = captions.join_words(map(format_number, captions.distinct_values(frames, "method.density")))
    return {"threads": f"{threads} thread{'s' if threads != '1' else ''}", "densities": densities}


def claims() -> list[Claim]:
    compared = (PUBLISHED, "gaussiank", "dgc", "sidco", "topk-fused")
    return [
        claim("shi2019.gaussiank-much-faster", least_gain, PUBLISHED),
        *claim_each("shi2019.faster", least_gain, {method: LOOKS[method].label for method in compared}),
        claim("shi2019.fused-faster-than-gaussiank", least_gain, "topk-fused", PUBLISHED),
        claim("shi2019.gaussiank-selects", most_selected, tolerance=CONTENT),
    ]


def least_gain(frames: Frames, method: str, over: str = EXACT) -> Estimate | None:
    """The gain at the size where it is least."""
    gains = [value for size in sizes(frames) if (value := gain(frames, method, size, over))]
    return min(gains, key=lambda value: value.value, default=None)


def most_selected(frames: Frames) -> Estimate | None:
    """What Gaussian-k as published selects over k, at the size where it is most."""
    shares = [share for size in sizes(frames) if (share := selected(frames, PUBLISHED, size)) is not None]
    return Estimate.exact(max(shares), len(shares), COUNTED) if shares else None
